"""The tables of docs/support.md and the READMEs, each between its two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from compat.environment import PYTHON, ROOT, STACKS, SWIFT, Cell
from compat.trial import STACK_TESTS, Counts, Trial

BEGIN, END = "<!-- compatibility: begin -->", "<!-- compatibility: end -->"
PAGE = ROOT / "docs/support.md"
READMES = [ROOT / name for name in ("README.md", "README_CN.md")]

PARTS = ("unit", *STACK_TESTS)
HEAD = ("ms-swift", "vLLM", "Python", "transformers", "torch", "works", "installs", *PARTS, "tried")
SHOWN = ("transformers", "torch")


def write_tables(trials: Sequence[Trial]) -> None:
    """Write the table of all cells into its page, and the overview into both READMEs."""
    write_into(PAGE, table(trials), BEGIN, END)
    for readme in READMES:
        write_into(readme, overview(trials), BEGIN, END)


def write_into(page: Path, made: str, begin: str, end: str) -> None:
    """Replace what is between the marks of a page; raises `ValueError` where there are none."""
    before, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"{page}: there is no {begin} ... {end} to put the table into")
    page.write_text(f"{before}{begin}\n\n{made}\n\n{end}{after}", encoding="utf-8")
    print(f"{page.name}: written")


def table(trials: Iterable[Trial]) -> str:
    """Markdown: a row for each cell that was tested; below it those of which only names were looked
    at, what excludes what, and what releases go without."""
    ordered = sorted(trials, key=lambda trial: _order(Cell.of(trial.cell)))
    rows = [_row(trial) for trial in ordered if not (trial.excluded or _names_hold(trial))]
    return "\n".join([*_rows(HEAD, rows), "", *_notes(ordered)])


def overview(trials: Iterable[Trial]) -> str:
    """Markdown: ms-swift by vLLM, with the releases of Python that each works on."""
    of_cell = {trial.cell: trial for trial in trials}
    head = ("ms-swift", *(f"vLLM {release}" for release in STACKS))
    rows = []
    for swift in reversed(SWIFT):
        tried = [
            [of_cell[str(cell)] for p in PYTHON if str(cell := Cell(swift, vllm, p)) in of_cell]
            for vllm in STACKS
        ]
        rows.append((swift, *map(_verdict, tried)))
    return "\n".join(_rows(head, rows))


def summary(trial: Trial) -> str:
    """One line for the terminal."""
    if trial.excluded:
        return f"no such environment: {trial.excluded}"
    if _names_hold(trial):
        return f"{trial.pins_held} names hold; nothing was run"
    counts = ", ".join(f"{name} {_counts(trial.tests.get(name))}" for name in PARTS)
    wrong = f"; {'; '.join(trial.pins_wrong)}" if trial.pins_wrong else ""
    return f"{'works' if trial.works else 'not all seen to work'}: {counts}{wrong}"


def _order(cell: Cell) -> tuple[int, int, int]:
    """Newest ms-swift first, oldest vLLM first, newest Python first; -1 for others."""

    def place(part: str, axis: Sequence[str]) -> int:
        return axis.index(part) if part in axis else -1

    return (
        place(cell.swift, SWIFT[::-1]),
        place(cell.vllm, [*STACKS]),
        place(cell.python, PYTHON[::-1]),
    )


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], f"{'|---' * len(head)}|", *lines[1:]]


def _row(trial: Trial) -> list[str]:
    cell = Cell.of(trial.cell)
    return [
        *(cell.swift, cell.vllm, cell.python),
        *(trial.versions.get(name, "") for name in SHOWN),
        "yes" if trial.works else "no",
        ", ".join(trial.changes) or f"{len(trial.would_install or [])}, none of the stack",
        *(_counts(trial.tests.get(part)) for part in PARTS),
        f"{trial.date}, {trial.commit}",
    ]


def _names_hold(trial: Trial) -> bool:
    """Only names were looked at, and nothing speaks against it."""
    return not (trial.tests or trial.pins_wrong or trial.changes or trial.excluded)


def _verdict(trials: Sequence[Trial]) -> str:
    makeable = [trial for trial in trials if not trial.excluded]
    if not makeable:
        return "excluded by their own requirements" if trials else "not tried"
    words = {
        "Python {}": [t for t in makeable if t.works],
        "names only: {}": [t for t in makeable if _names_hold(t)],
        "not: {}": [t for t in makeable if not t.works and not _names_hold(t)],
    }
    return "; ".join(
        word.format(", ".join(Cell.of(trial.cell).python for trial in of_word))
        for word, of_word in words.items()
        if of_word
    )


def _counts(counts: Counts | None) -> str:
    if counts is None:
        return "not run"
    parts = [f"{counts.passed} passed"]
    parts += [f"{counts.failed} failed"] if counts.failed else []
    parts += [f"{counts.skipped} skipped"] if counts.skipped else []
    return ", ".join(parts)


def _notes(trials: Sequence[Trial]) -> list[str]:
    said = "Names hold, an installation changes none of the stack, nothing was run"
    cells = ", ".join(trial.cell for trial in trials if _names_hold(trial))
    only_names = [f"- {said}: {cells}."] if cells else []
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        if trial.excluded:
            reasons.setdefault(trial.excluded, []).append(trial.cell)
    excluded = [f"- {', '.join(c)} cannot be installed: {why}" for why, c in reasons.items()]
    missing: dict[str, set[str]] = {}
    for trial in trials:
        if trial.missing:
            release = f"vLLM {Cell.of(trial.cell).vllm}"
            missing.setdefault(release, set()).update(trial.missing)
    without = [
        f"- {release} goes without: {'; '.join(sorted(missing[release]))}."
        for release in sorted(missing)
    ]
    wrong = [f"- {t.cell}: `{text}`." for t in trials for text in t.pins_wrong]
    return [*only_names, *without, *wrong, *excluded]
