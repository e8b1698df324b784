"""Paths, results and tables of the benchmarks. Import this module first: it sets `sys.path`."""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples/digits"))
from machine import describe_machine
from pages import ROOT, markdown

from scripts.bench.measure import Measures

SWIFT = Path(sys.executable).with_name("swift")
DEFAULT_MODEL = Path(os.environ.get("ASSETS", ".assets")) / "tiny_vlm"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_rows(fixed: Mapping[str, Any], measures: Mapping[str, list[Measures]]) -> list[Any]:
    """Return a row for each way: `fixed`, the way's name, and lists of values by measure."""
    return [
        {**fixed, "way": way, **{name: [m[name] for m in measured] for name in measured[0]}}
        for way, measured in measures.items()
    ]


class Results:
    """The rows of a run. The file is written after each case, so an interrupted run keeps them."""

    def __init__(self, output: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._output = output
        self._head: dict[str, Any] = {"command": command(), "environment": environment()}
        load = self._head["environment"]["load_at_start"]
        if load > 0.5:
            # OpenMP's threads wait for each other in busy loops, so one core that is occupied makes
            # vLLM up to 10 times slower.
            print(f"warning: the load average is {load}; stop other processes", file=sys.stderr)

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        if self._output:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            content = {**self._head, "rows": self.rows}
            self._output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def command() -> str:
    """Return the command line without this machine's folders."""
    words = [Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]]
    plain = [f"DIR/{Path(w).name}" if Path(w).is_absolute() else w for w in words]
    return shlex.join(["python", *plain])


def environment() -> dict[str, Any]:
    return {
        **describe_machine(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_at_start": round(os.getloadavg()[0], 2),
        "openmp": {name: value for name, value in os.environ.items() if name.startswith("OMP_")},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def as_markdown(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], measures: Sequence[str]
) -> str:
    """Return a table of medians. Brackets contain ratios to the first way of the same case.

    A ratio is the median over repetitions, because the runs of a repetition are close in time.
    """
    lines = []
    for row in rows:
        cells = [str(row[name]) for name in names]
        same = [r for r in rows if all(r[name] == row[name] for name in names if name != "way")]
        for measure in measures:
            values, first = row.get(measure, []), same[0].get(measure, [])
            cells.append(f"{median(values):.4g}" if values else "")
            if values and first and all(first) and row is not same[0]:
                shares = [ours / theirs for ours, theirs in zip(values, first, strict=True)]
                cells[-1] += f" ({median(shares):.3f})"
        lines.append(cells)
    return markdown((*names, *measures), lines)
