"""Starts runs up to their template and data, each forked from one process.

python -m tests.rig.starts CASES.json FOUND.json
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from swift_grpo_ext.checks.finding import Finding
from swift_grpo_ext.tools.check.command import describe_rounds
from swift_grpo_ext.tools.harness import begin
from swift_grpo_ext.tools.sources import Source
from tests.rig.processes import started


def begun(sources: Mapping[str, Source], folder: Path) -> dict[str, list[Finding]]:
    """Return the findings of each start, by the name of its case."""
    (folder / "cases.json").write_text(json.dumps(sources))
    files = (str(folder / "cases.json"), str(folder / "found.json"))
    with started([sys.executable, "-m", "tests.rig.starts", *files], folder / "log") as running:
        finished = running.wait(900)
    assert finished.returncode == 0, finished.cause
    found = json.loads((folder / "found.json").read_text())
    return {name: [Finding(**each) for each in findings] for name, findings in found.items()}


def start(source: Source) -> list[Finding]:
    findings: list[Finding] = []
    begun = begin(source, findings.append)
    if begun is not None and source.side == "training":
        findings += describe_rounds(begun)
    return findings


def main(cases: Path, found: Path) -> None:
    results = {}
    for name, source in json.loads(cases.read_text()).items():
        one = found.with_suffix(".one")
        if not (child := os.fork()):
            try:
                findings = start(Source(*source))
                one.write_text(json.dumps([asdict(finding) for finding in findings]))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        results[name] = json.loads(one.read_text())
        one.unlink()
    found.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
