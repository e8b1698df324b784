"""Starts runs as `check` does, up to their template and data, each forked from one process.

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
from swift_grpo_ext.tools.check.command import begin_run, describe_rounds
from swift_grpo_ext.tools.harness import begin
from swift_grpo_ext.tools.sources import Source
from tests.rig.processes import started

HEALTHY = "healthy"
"""The rows of this case are encoded on both sides, too, which takes as long as several starts."""


def begun(sources: Mapping[str, Source], folder: Path) -> dict[str, list[Finding]]:
    """Return the findings of each start, by the name of its case."""
    files = folder / "cases.json", folder / "found.jsonl"
    files[0].write_text(json.dumps(sources))
    command = [sys.executable, "-m", "tests.rig.starts", *map(str, files)]
    with started(command, folder / "log") as running:
        finished = running.wait(900)
    assert finished.returncode == 0, finished.cause
    found: dict[str, list[Finding]] = {name: [] for name in sources}
    for line in files[1].read_text().splitlines():
        name, finding = json.loads(line)
        found[name].append(Finding(**finding))
    return found


def main(cases: Path, found: Path) -> None:
    for name, case in json.loads(cases.read_text()).items():
        if not (child := os.fork()):
            findings = list[Finding]()
            source = Source(*case)
            try:
                if name == HEALTHY:
                    begin_run({source.side: source}, findings.append)
                elif (run := begin(source, findings.append)) and source.side == "training":
                    findings += describe_rounds(run)
            except BaseException:
                traceback.print_exc()
            with found.open("a") as file:
                file.writelines(json.dumps([name, asdict(each)]) + "\n" for each in findings)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
