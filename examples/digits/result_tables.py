"""The experiment's tables, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median, stdev

from band import FIGURES, band_of
from plan import BASE, COMPLETIONS_A_STEP, NO_VLLM, VARIANTS, Variant
from records import SHARES, Record, of_variant

LABELS = dict(zip(SHARES, ("greedy accuracy", "sampled accuracy", "right form"), strict=True))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(cells) for cells in (head, *rows)]
    return "\n".join(
        [f"| {lines[0]} |", "|---" * len(head) + "|", *(f"| {x} |" for x in lines[1:])]
    )


def seed_table(records: Sequence[Record]) -> str:
    """One row a seed: before -> after and the gain in points."""
    rows = [
        [str(record.seed), *(_gain(record, share) for share in SHARES)]
        for record in of_variant(records, BASE.name)
    ]
    return markdown(["seed", *LABELS.values()], rows)


def _gain(record: Record, share: str) -> str:
    before, after = record.before[share], record.after[share]
    return f"{before:.1%} -> {after:.1%} ({100 * (after - before):+.1f})"


def band_table(records: Sequence[Record]) -> str:
    """What the seeds came to, and where one more run should end."""
    base = of_variant(records, BASE.name)
    rows = []
    for figure in FIGURES:
        values = [figure.of(record) for record in base]
        band = band_of(figure, base)
        shown = (min(values), max(values), fmean(values))
        spread = f"{100 * stdev(values):.1f} points" if figure.percent else f"{stdev(values):.3f}"
        limits = f"{figure.show(band.low)} to {figure.show(band.high)}"
        rows.append([figure.label, *map(figure.show, shown), spread, limits])
    head = [f"{len(base)} seeds", "lowest", "highest", "mean", "standard deviation", "band"]
    return markdown(head, rows)


COLUMNS: dict[str, Callable[[Record], float]] = {
    "greedy accuracy": lambda r: r.after["greedy_accuracy"],
    "sampled accuracy": lambda r: r.after["sampled_accuracy"],
    "last reward": lambda r: r.last_reward,
}
"""What variants are compared by: each seed's value, in the order of the seeds."""


def _results(chosen: Sequence[Record]) -> list[str]:
    def show(name: str, value: float) -> str:
        return f"{value:.2f}" if name == "last reward" else f"{value:.1%}"

    return [", ".join(show(name, of(r)) for r in chosen) for name, of in COLUMNS.items()]


def _seeds(chosen: Sequence[Record]) -> str:
    return ", ".join(str(record.seed) for record in chosen)


def compared(records: Sequence[Record], variants: Sequence[Variant]) -> Mapping[str, list[Record]]:
    """The runs of each variant: of the published settings, those seeds that another has too."""
    found = {v.name: of_variant(records, v.name) for v in variants}
    seeds = {r.seed for name, chosen in found.items() for r in chosen if name != BASE.name}
    found[BASE.name] = of_variant(records, BASE.name, sorted(seeds))
    return {name: chosen for name, chosen in found.items() if chosen}


def group_size_table(records: Sequence[Record]) -> str:
    """What the group size does, at 64 completions a step; shares are means over steps and seeds."""
    variants = [v for v in VARIANTS.values() if v.vllm]
    rows = []
    for name, chosen in compared(records, variants).items():
        variant, alike = VARIANTS[name], fmean(r.groups_alike for r in chosen)
        shares = (f"{alike:.0%}", f"{variant.prompts_a_step * (1 - alike):.1f}")
        size = (str(variant.group_size), str(variant.prompts_a_step), f"{variant.epochs:.1f}")
        rows.append([*size, *_results(chosen), *shares, _seeds(chosen)])
    groups = ("groups without a difference", "groups with one, a step")
    return markdown(["G", "prompts a step", "epochs", *COLUMNS, *groups, "seeds"], rows)


def vllm_table(records: Sequence[Record]) -> str:
    """Rollouts by vLLM and by transformers, with the time of a step."""
    rows = [
        [
            "vLLM" if VARIANTS[name].vllm else "transformers (`--use_vllm false`)",
            *_results(chosen),
            ", ".join(f"{r.step_seconds:.2f}" for r in chosen),
            ", ".join(f"{sum(r.curves['step_seconds']) / 60:.1f}" for r in chosen),
            _seeds(chosen),
        ]
        for name, chosen in compared(records, [BASE, NO_VLLM]).items()
    ]
    head = ["rollouts by", *COLUMNS, "seconds a step", "minutes, all steps", "seeds"]
    return markdown(head, rows)


def time_table(records: Sequence[Record]) -> str:
    """Each run's time a step, and how busy the machine was meanwhile."""
    rows = []
    for record in records:
        machine = record.machine or {}
        quick, slow = _tails(record.curves["step_seconds"])
        rows.append(
            [
                record.name,
                f"{record.step_seconds:.2f} ({quick:.2f} to {slow:.2f})",
                f"{record.curves['step_seconds'][0]:.1f}",
                f"{machine.get('load_average') or 'not recorded'}",
                f"{machine.get('started') or 'not recorded'}",
            ]
        )
    head = ["run", "seconds a step: median (5% to 95%)", "first step", "load average", "started"]
    return markdown(head, rows)


def _tails(values: Sequence[float]) -> tuple[float, float]:
    """The values that 5% are below and 5% are above."""
    ordered = sorted(values)
    cut = len(ordered) // 20
    return ordered[cut], ordered[-1 - cut]


def median_step_seconds(records: Sequence[Record]) -> float:
    return median(record.step_seconds for record in records)


def machines(records: Sequence[Record]) -> str:
    """What the runs were made on; a line for each different machine."""
    lines: dict[str, list[str]] = {}
    for record in records:
        lines.setdefault(_machine(record), []).append(record.name)
    if len(lines) == 1:
        return next(iter(lines))
    return "\n".join(f"- {', '.join(names)}: {line}" for line, names in lines.items())


def _machine(record: Record) -> str:
    made = record.machine
    if made is None:
        return "machine not recorded"
    threads = made["omp_num_threads"] or "unset"
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return (
        f"{made['cores']} cores of {made['cpu']}, {made['memory_gib']} GiB, "
        f"OMP_NUM_THREADS {threads}; Python {made['python']}, {versions}"
    )


def all_tables(records: Sequence[Record], command: str) -> str:
    """Everything, as one Markdown page; parts that no run belongs to are left out."""
    parts = [f"`{command}`\n\n{machines(records)}"]
    if len(of_variant(records, BASE.name)) > 1:
        parts += ["## Seeds\n\n" + seed_table(records), "## The band\n\n" + band_table(records)]
    names = {record.variant for record in records}
    if len(names - {NO_VLLM.name}) > 1:
        title = f"## Group size, at {COMPLETIONS_A_STEP} completions a step"
        parts.append(f"{title}\n\n{group_size_table(records)}")
    if NO_VLLM.name in names:
        parts.append("## Rollouts with and without vLLM\n\n" + vllm_table(records))
    parts.append("## Time\n\n" + time_table(records))
    return "\n\n".join(parts) + "\n"
