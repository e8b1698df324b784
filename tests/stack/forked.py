"""Runs `swift rlhf` and `swift rollout` for many command lines: imports once, forks for each.

Reads a JSON list of cases from the file named; writes the list of results beside it. A case is
`{"command": "rlhf" | "rollout", "argv": [...], "env": {...}, "hidden": ["module", ...]}`, a result
`{"status": ..., "output": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import swift.pipelines


def run(case: dict[str, Any]) -> dict[str, Any]:
    # Loaded here, in the parent, once; `rollout` not before it is asked for, since it needs vLLM.
    main = getattr(swift.pipelines, f"{case['command']}_main")
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            _be(case, main, output.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return {"status": status, "output": output.read()}


def _be(case: dict[str, Any], main: Callable[[], Any], output: int) -> None:
    """Become the process of a case; never returns."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(case.get("env", {}))
    for module in case.get("hidden", ()):
        sys.modules[module] = None  # type: ignore[assignment]
    sys.argv = ["swift", *case["argv"]]
    try:
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    cases = Path(sys.argv[1])
    results = [run(case) for case in json.loads(cases.read_text(encoding="utf-8"))]
    cases.with_name("results.json").write_text(json.dumps(results), encoding="utf-8")
