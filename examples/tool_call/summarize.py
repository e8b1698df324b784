"""Print a Markdown table of conversations on held-out digits before and after training.

    python examples/tool_call/summarize.py output/tool_call

The folder has the runs of seeds.sh. In their records, the first round of evaluation is before
training and the last round is after training.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from swift_grpo_ext.record.query import read_rewards, read_samples

CALL = re.compile(r"<answer>(\d)</answer>")
FIGURES = {
    "reward": "reward, mean",
    "calls": "first turns that are a call, and nothing else",
    "first": "right in the first turn",
    "second": "right in the second, of those that had one",
    "right": "right in the end",
}


Conversation = tuple[list[str], float]  # texts of the turns, and the reward


def conversations(run: Path) -> dict[int, list[Conversation]]:
    """Return the conversations of each evaluation, by its step."""
    texts, rewards = defaultdict[Any, list[str]](list), {}
    key_columns = ("step", "number", "group", "index")
    for row in read_samples(run).to_pylist():
        if row["phase"] == "eval":  # turns are in order
            texts[tuple(row[name] for name in key_columns)].append(row["text"])
    for row in read_rewards(run).to_pylist():
        if row["phase"] == "eval":
            rewards[tuple(row[name] for name in key_columns)] = row["reward"]
    by_step = defaultdict[int, list[Conversation]](list)
    for key, turns in texts.items():
        by_step[key[0]].append((turns, rewards[key]))
    return by_step


def figures(talks: list[Conversation]) -> dict[str, float]:
    """Return the values of `FIGURES`. A right digit gives a reward of 1 or more, a wrong digit 0.2
    at most; only a call with a wrong digit has a second turn."""
    rights = [reward > 0.9 for _, reward in talks]
    firsts = [right and len(turns) == 1 for (turns, _), right in zip(talks, rights, strict=True)]
    seconds = [right for (turns, _), right in zip(talks, rights, strict=True) if len(turns) > 1]
    return {
        "reward": fmean(reward for _, reward in talks),
        "calls": fmean(CALL.fullmatch(turns[0]) is not None for turns, _ in talks),
        "first": fmean(firsts),
        "second": fmean(seconds) if seconds else float("nan"),
        "right": fmean(rights),
    }


def table(runs: list[Path]) -> str:
    """Return mean, minimum and maximum over the runs, before and after training."""
    evaluated = [conversations(run) for run in runs]
    sides = [[figures(by_step[end(by_step)]) for by_step in evaluated] for end in (min, max)]
    count, steps = len(next(iter(evaluated[0].values()))), {max(found) for found in evaluated}
    lines = [
        f"{', '.join(run.name for run in runs)}: {count} conversations each, before and after "
        f"{', '.join(map(str, sorted(steps)))} steps; mean (lowest to highest)",
        "",
        "| | before | after |",
        "|---|---|---|",
    ]
    for name, label in FIGURES.items():
        cells = []
        for side in sides:
            values = [one[name] for one in side]
            shown = "{:.3f}" if name == "reward" else "{:.1%}"
            mean, low, high = (shown.format(v) for v in (fmean(values), min(values), max(values)))
            cells.append(f"{mean} ({low} to {high})")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the runs")
    options = parser.parse_args()
    runs = sorted(path for path in options.folder.iterdir() if (path / "args.json").exists())
    if not runs:
        parser.error(f"{options.folder} has no run. Make runs with examples/tool_call/seeds.sh")
    print(table(runs))


if __name__ == "__main__":
    main()
