"""Tabulates conversations on held-out digits before and after training, over several runs.

    python examples/tool_call/summarize.py output/tool_call

Reads the records of the runs in a folder, as seeds.sh makes them: the first round of evaluation is
that of the untrained model, the last one that of the trained. Prints Markdown.
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


def conversations(run: Path) -> dict[int, list[tuple[list[str], float]]]:
    """Return the texts of each conversation's turns, and its reward, by the evaluation's step."""
    texts, rewards = defaultdict[Any, list[str]](list), {}
    place = ("step", "number", "group", "index")
    for row in read_samples(run).to_pylist():
        if row["phase"] == "eval":  # turns come in their order
            texts[tuple(row[name] for name in place)].append(row["text"])
    for row in read_rewards(run).to_pylist():
        if row["phase"] == "eval":
            rewards[tuple(row[name] for name in place)] = row["reward"]
    found = defaultdict[int, list[tuple[list[str], float]]](list)
    for key, turns in texts.items():
        found[key[0]].append((turns, rewards[key]))
    return found


def figures(talks: list[tuple[list[str], float]]) -> dict[str, float]:
    """The tool answers calls with a wrong digit alone, and 1 of a reward is for a right one."""
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
    """Mean, lowest and highest of the runs, before and after."""
    evaluated = [conversations(run) for run in runs]
    sides = [[figures(found[end(found)]) for found in evaluated] for end in (min, max)]
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
    parser.add_argument("folder", type=Path, help="holds the runs")
    options = parser.parse_args()
    runs = sorted(path for path in options.folder.iterdir() if (path / "args.json").exists())
    if not runs:
        parser.error(f"{options.folder} holds no run; bash examples/tool_call/seeds.sh makes three")
    print(table(runs))


if __name__ == "__main__":
    main()
