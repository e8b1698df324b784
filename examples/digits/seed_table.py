"""The README's table of seeds, as Markdown, from the demo's `evaluation.json` of each.

python examples/digits/seed_table.py examples/digits/results/seed*.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

METRICS = {
    "greedy_accuracy": "greedy accuracy",
    "sampled_accuracy": "sampled accuracy",
    "sampled_format": "right form",
}


def seed_table(files: Sequence[Path]) -> str:
    """One row a seed (a file's name without `seed`), before -> after and the gain in points."""
    head = ["| seed | " + " | ".join(METRICS.values()) + " |", "|---" * (len(METRICS) + 1) + "|"]
    return "\n".join(head + [_row(file) for file in files])


def _row(file: Path) -> str:
    before, after = json.loads(file.read_text(encoding="utf-8"))
    cells = [
        f"{before[key]:.1%} -> {after[key]:.1%} ({100 * (after[key] - before[key]):+.1f})"
        for key in METRICS
    ]
    return f"| {file.stem.removeprefix('seed')} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print(seed_table([Path(name) for name in sys.argv[1:]]))
