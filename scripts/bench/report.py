"""Print the README's tables of the rollout benchmarks, and plot them.

    python scripts/bench/report.py colocate.json server.json --plot rollouts.png

Times are medians over repetitions. A ratio is the median of the repetitions' own ratios, with the
lowest and the highest: in a repetition, both sides ran within seconds of each other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from tables import WAYS, Row, as_markdown, per_sample

COLOURS = dict(zip(WAYS, ("#d55e00", "#777777", "#0072b2", "#56b4e9"), strict=True))
SHOWN_WAYS = WAYS[:3]
KEY = ("benchmark", "replicas", "case", "num_prompts", "group_size", "way")
"""The columns that name a measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="what the benchmarks wrote; "
                        "of a case that was measured twice, the later file counts")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write the plot there")
    options = parser.parse_args()
    results = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    rows = merge(results)
    print("\n\n".join(describe(result) for result in results))
    print(f"\n{as_markdown(rows)}")
    if options.plot:
        plot(rows, options.plot)


def merge(results: Sequence[dict[str, Any]]) -> list[Row]:
    rows: dict[tuple[Any, ...], Row] = {}
    for row in (row for result in results for row in result["rows"]):
        key = tuple(row.get(name) for name in KEY)
        rows.pop(key, None)  # so that it stands where the later file has it
        rows[key] = row
    return sorted(rows.values(), key=lambda row: row.get("replicas") or 0)


def describe(result: dict[str, Any]) -> str:
    """What made a result: the command, the machine and the versions."""
    made = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    machine = made["accelerator"] or f"{made['cores']} cores of {made['cpu']}"
    return (
        f"`{result['command']}`  \n{made['date']}, {machine}, {made['memory_gib']} GiB, "
        f"Python {made['python']}, {versions}, OpenMP settings {made.get('openmp') or 'unset'}; "
        f"load average at the start {made['load_at_start']}."
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time by group size, a panel for each kind of prompt and path; then cost by batch size."""
    panels = list(time_panels(rows))
    scaling = [row for row in rows if row["benchmark"] == "scaling"]
    width = max(len({row["case"] for row in rows if row["benchmark"] != "scaling"}), 1)
    count = len(panels) + bool(scaling)
    height = -(-count // width)
    figure = Figure(figsize=(3.6 * width, 2.9 * height), layout="constrained")
    axes = list(figure.subplots(height, width, squeeze=False).flat)
    for axis, (title, panel) in zip(axes, panels, strict=False):
        draw_times(axis, title, panel)
    if scaling:
        draw_scaling(axes[len(panels)], scaling)
    for axis in axes[count:]:
        axis.set_visible(False)
    figure.savefig(path, dpi=110, facecolor="white")


def time_panels(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Colocated cases, and those of each server, by kind of prompt."""
    names = {"colocate": "in the training process", "server": "swift rollout"}
    panels: dict[str, list[Row]] = {}
    for row in rows:
        if row["benchmark"] in names and row["way"] in SHOWN_WAYS:
            replicas = row.get("replicas", 1)
            where = names[row["benchmark"]] + (f", {replicas} replicas" if replicas > 1 else "")
            panels.setdefault(f"{row['case']}, {where}", []).append(row)
    yield from panels.items()


def draw_times(axis: Any, title: str, rows: Sequence[Row]) -> None:
    for way in SHOWN_WAYS:
        chosen = [row for row in rows if row["way"] == way]
        if chosen:
            sizes = [row["group_size"] for row in chosen]
            seconds = [median(row["seconds"]) for row in chosen]
            low = [s - min(row["seconds"]) for s, row in zip(seconds, chosen, strict=True)]
            high = [max(row["seconds"]) - s for s, row in zip(seconds, chosen, strict=True)]
            axis.errorbar(
                sizes, seconds, yerr=[low, high], marker="o", capsize=3, label=way,
                color=COLOURS[way],
            )  # fmt: skip
    axis.set(title=title, xlabel="samples of a prompt (G)", ylabel="seconds a batch")
    axis.set_xticks(sorted({row["group_size"] for row in rows}))
    finish(axis, top=max(max(row["seconds"]) for row in rows))


def draw_scaling(axis: Any, rows: Sequence[Row]) -> None:
    for case, style in zip(dict.fromkeys(row["case"] for row in rows), ("o-", "s--", "^:"),
                           strict=False):  # fmt: skip
        chosen = [row for row in rows if row["case"] == case]
        sizes = [row["num_samples"] for row in chosen]
        costs = [per_sample(row) * 1e3 for row in chosen]
        axis.plot(sizes, costs, style, label=case, color=COLOURS["ours"])
    axis.set(title="cost against size (ours, G = 8)", xlabel="samples", ylabel="ms a sample")
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted({row["num_samples"] for row in rows}), minor=False)
    axis.xaxis.set_major_formatter("{x:.0f}")
    finish(axis, top=max(per_sample(row) * 1e3 for row in rows))


def finish(axis: Any, top: float) -> None:
    axis.set_ylim(0, 1.3 * top)  # room for the legend
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, loc="upper left", ncols=2)


if __name__ == "__main__":
    main()
