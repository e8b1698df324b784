"""Report runs of the digit example with several seeds, or compare a run with the published ones.

    python examples/digits/experiment.py report DIR                  write results, plot, tables
    python examples/digits/experiment.py report RESULTS.json         print the tables of results
    python examples/digits/experiment.py check output/digits-seed42  compare with the band

README.md shows how to make the runs of DIR; all need the same number of steps. `check` exits with 1
if a run gained too little or is outside the band of its start model, and with 2 if no run can be
compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

import numpy as np
from band import (
    FIGURES,
    PROMISED_GAIN,
    band_of,
    gains,
    has_too_little_gain,
    outside,
    start_difference,
)
from records import (
    NUM_ENDS,
    RESULTS,
    SHARES,
    Record,
    deviations,
    is_finished,
    published,
    read_results,
    read_run,
    settings,
    write_results,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # the demo does not install matplotlib

COMMAND = "python examples/digits/experiment.py report DIR"
WINDOW = 10  # steps of the moving average
COLOUR = "#0072b2"


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the finished runs with the published settings among these folders and inside them.

    Raises:
        ValueError: a named run has other settings, or there is no run.
    """
    runs = []
    for path in paths:
        if is_finished(path):
            other = deviations(settings(path))
            if other:
                raise ValueError(f"{path} cannot be compared: {'; '.join(other.values())}")
            runs.append(path)
            continue
        children = sorted(filter(is_finished, path.iterdir())) if path.is_dir() else []
        runs += [child for child in children if not deviations(settings(child))]
    if not runs:
        raise ValueError(
            f"no finished run with the published settings in {', '.join(map(str, paths))}. "
            "Make one with bash scripts/demo.sh"
        )
    return runs


def command_report(options: argparse.Namespace) -> int:
    path: Path = options.path
    if path.is_file():
        print(all_tables(read_results(path)))
        return 0
    records = sorted(map(read_run, find_runs([path])), key=lambda record: record.seed)
    if len(counts := {record.num_steps for record in records}) > 1:
        raise ValueError(f"the runs of {path} have {sorted(counts)} steps; expected one number")
    tables, results = all_tables(records), RESULTS / f"steps{counts.pop()}.json"
    print(tables)
    write_results(results, COMMAND, records)
    results.with_suffix(".md").write_text(tables, encoding="utf-8")
    plot_seeds(records).savefig(results.with_suffix(".png"), dpi=90, facecolor="white")
    print(f"wrote {results}, and .md and .png beside it", file=sys.stderr)
    return 0


def command_check(options: argparse.Namespace) -> int:
    status = 0
    for run in find_runs(options.runs):
        record = read_run(run)
        lines, is_wrong = verdict(record, published(record.num_steps))
        print(f"{run.name}: {gains(record)}", *lines, sep="\n  ")
        status |= has_too_little_gain(record) or (is_wrong and not options.gain_only)
    return status


def verdict(record: Record, seeds: Sequence[Record]) -> tuple[list[str], bool]:
    """Compare a run with the promised gain and with the published runs of as many steps.

    Returns:
        A line for each finding, and whether the run is outside the band.
    """
    gain = "Too little gain" if has_too_little_gain(record) else "Enough gain"
    lines = [f"{gain}: {record.gain:+.2f}, expected {PROMISED_GAIN} or more on any machine."]
    if step := (record.machine or {}).get("first_step"):
        lines.append(f"The run was resumed after step {step}.")
    if not seeds:
        lines.append(f"No runs of {record.num_steps} steps are published.")
        return lines, False
    band, wrong = f"the band of the {len(seeds)} published seeds", outside(record, seeds)
    if start := start_difference(record, seeds):
        lines.append(
            f"Not compared with {band}, because the start model differs ({start}): the warm start "
            "gives other weights on another kind of processor."
        )
    elif wrong:
        lines.append(f"Outside {band}: {'; '.join(wrong)}. So is one of twenty sound runs.")
    else:
        lines.append(f"Within {band}.")
    return lines, bool(wrong and not start)


# --- tables and plot ---


def all_tables(records: Sequence[Record]) -> str:
    sections = {"Seeds": seed_table, "The band": band_table, "Time": time_table}
    parts = [f"## {title}\n\n{table(records)}" for title, table in sections.items()]
    return "\n\n".join([f"`{COMMAND}`\n\n{machines(records)}", *parts]) + "\n"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, f"{'|---' * len(head)}|", *others])


def seed_table(records: Sequence[Record]) -> str:
    """Return each seed's start, end and gain; gains of shares are in percentage points."""
    rows = []
    for record in records:
        pairs = ((record.before[share], record.after[share]) for share in SHARES)
        cells = (f"{a:.1%} -> {b:.1%} ({100 * (b - a):+.1f})" for a, b in pairs)
        reward = f"{record.first_reward:.2f} -> {record.last_reward:.2f} ({record.gain:+.2f})"
        rows.append([str(record.seed), reward, *cells])
    reward = f"mean reward, first {NUM_ENDS} -> last {NUM_ENDS} steps"
    return markdown(["seed", reward, "greedy accuracy", "sampled accuracy", "right form"], rows)


def band_table(records: Sequence[Record]) -> str:
    """Return statistics of each figure over the seeds, and the band for another run."""
    rows = []
    for figure in FIGURES:
        values, band = [figure.of(record) for record in records], band_of(figure, records)
        shown = (min(values), max(values), fmean(values))
        spread = f"{100 * stdev(values):.1f} points" if figure.percent else f"{stdev(values):.3f}"
        limits = f"{figure.show(band.low)} to {figure.show(band.high)}"
        rows.append([figure.label, *map(figure.show, shown), spread, limits])
    head = [f"{len(records)} seeds", "lowest", "highest", "mean", "standard deviation", "band"]
    return markdown(head, rows)


def time_table(records: Sequence[Record]) -> str:
    """Return each run's seconds for a step, and the machine's load."""
    rows = []
    for record in records:
        machine, seconds = record.machine or {}, record.curves["step_seconds"]
        ordered = sorted(seconds)
        cut = len(ordered) // 20
        spread = f"({ordered[cut]:.2f} to {ordered[-1 - cut]:.2f})"
        load = (str(machine.get(name) or "not recorded") for name in ("load_average", "started"))
        rows.append([record.name, f"{median(seconds):.2f} {spread}", f"{seconds[0]:.1f}", *load])
    times = ("seconds a step: median (5% to 95%)", "first step")
    return markdown(["run", *times, "load average", "started"], rows)


def machines(records: Sequence[Record]) -> str:
    """Return a line for each machine, with the names of its runs."""
    lines: dict[str, list[str]] = {}
    for record in records:
        lines.setdefault(_machine(record), []).append(record.name)
    if len(lines) == 1:
        return next(iter(lines))
    return "\n".join(f"- {', '.join(names)}: {line}" for line, names in lines.items())


def _machine(record: Record) -> str:
    machine = record.machine
    if machine is None:
        return "machine not recorded"
    threads = machine["omp_num_threads"] or "unset"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, "
        f"OMP_NUM_THREADS {threads}; Python {machine['python']}, {versions}"
    )


def plot_seeds(records: Sequence[Record]) -> Figure:
    """Plot every seed, the mean over seeds, and the range from the lowest to the highest seed."""
    from matplotlib.figure import Figure

    rewards = np.stack([smooth(record.curves["reward"]) for record in records])
    steps = np.arange(1, rewards.shape[1] + 1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    low, high = rewards.min(axis=0), rewards.max(axis=0)
    axes.fill_between(steps, low, high, alpha=0.2, color=COLOUR, label="lowest to highest")
    for row in rewards:
        axes.plot(steps, row, color=COLOUR, alpha=0.35, linewidth=0.8)
    axes.plot(steps, rewards.mean(axis=0), color=COLOUR, label="mean of the seeds")
    seeds = ", ".join(str(record.seed) for record in records)
    axes.set(
        title=f"GRPO on handwritten digits, seeds {seeds}",
        xlabel="optimizer step",
        ylabel=f"mean reward, average of {WINDOW} steps",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    return figure


def smooth(values: Sequence[float]) -> np.ndarray:
    """Return the moving average over the last `WINDOW` values; the first averages have fewer."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - WINDOW)
    return (sums[ends] - sums[starts]) / (ends - starts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="print tables; for a folder, also write results")
    report.add_argument("path", type=Path, help="folder of the runs, or a results file")
    report.set_defaults(do=command_report)
    check = commands.add_parser("check", help="compare runs with the published band")
    check.add_argument("runs", type=Path, nargs="+", help="runs, or folders of runs")
    check.add_argument("--gain-only", action="store_true",
                       help="exit with 1 only if the gain is too small")  # fmt: skip
    check.set_defaults(do=command_check)
    options = parser.parse_args()
    try:
        return int(options.do(options))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
