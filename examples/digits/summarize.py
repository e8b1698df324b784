"""The end of the demo: the reward curve as a picture, accuracy before and after, what is where."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
from records import rows_by_step
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")

import matplotlib.pyplot as plt

WINDOW = 10
"""Steps of the moving average."""

CURVES = {"rewards/DigitAccuracy/mean": "accuracy", "rewards/DigitFormat/mean": "format"}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Mean reward of each step's samples, faint, under its moving average."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, label in CURVES.items():
        values = [float(row[key]) for row in rows]
        (line,) = axes.plot(range(1, len(values) + 1), values, alpha=0.25)
        smooth = [
            sum(values[max(0, i - WINDOW + 1) : i + 1]) / min(i + 1, WINDOW)
            for i in range(len(values))
        ]
        axes.plot(range(1, len(values) + 1), smooth, color=line.get_color(), label=label)
    axes.set(xlabel="optimizer step", ylabel="mean reward of the step's samples", ylim=(0, 1.02))
    axes.set_title("GRPO on handwritten digits: tiny Qwen2.5-VL, vLLM on CPU")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", title=f"average of {WINDOW} steps")
    figure.savefig(path, dpi=110)


def table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    result = Table(title=f"Held-out digits ({before['rows']} images)")
    for column in ("", "before", "after", "gain (points)"):
        result.add_column(column, justify="left" if not column else "right")
    for key in ("greedy_accuracy", "sampled_accuracy", "sampled_format"):
        gain = 100 * (after[key] - before[key])
        cells = (f"{before[key]:.1%}", f"{after[key]:.1%}", f"{gain:+.1f}")
        result.add_row(key.replace("_", " "), *cells)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's directory")
    options = parser.parse_args()
    run: Path = options.run
    before, after = json.loads((run / "evaluation.json").read_text(encoding="utf-8"))
    plot(rows_by_step(run), run / "reward_curve.png")
    Console().print(table(before, after))
    print(f"reward curve   {run / 'reward_curve.png'}")
    print(f"checkpoint     {after['model']}")
    print(f"training log   {run / 'logging.jsonl'}  (swift's own output: swift.log)")


if __name__ == "__main__":
    main()
