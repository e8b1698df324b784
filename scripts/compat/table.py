"""The tables of docs/support.md and the READMEs, each between its two marks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from compat.environment import PYTHON, ROOT, STACKS, SWIFT, Cell
from compat.trial import PARTS, Trial

BEGIN, END = "<!-- compatibility: begin -->", "<!-- compatibility: end -->"
PAGE = ROOT / "docs/support.md"
READMES = [ROOT / name for name in ("README.md", "README_CN.md")]
HEAD = ("ms-swift", "vLLM", "Python", "transformers", "torch", "works", "installs", *PARTS, "tried")


def write_into(page: Path, made: str, begin: str, end: str) -> None:
    """Replace what is between the marks of a page; raises `ValueError` where there are none."""
    before, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"{page}: there is no {begin} ... {end} to put the table into")
    page.write_text(f"{before}{begin}\n\n{made}\n\n{end}{after}", encoding="utf-8")
    print(f"{page.name}: written")


def write_tables(trials: Sequence[Trial]) -> None:
    """Write the table of all cells into its page, and the overview into both READMEs."""
    write_into(PAGE, table(trials), BEGIN, END)
    for readme in READMES:
        write_into(readme, overview(trials), BEGIN, END)


def table(trials: Iterable[Trial]) -> str:
    """Return a row for each cell that was tested, as Markdown; below it those of which only names
    were looked at, what releases go without, what is wrong, and what excludes what."""
    order = {str(Cell(s, v, p)): None for s in SWIFT[::-1] for v in STACKS for p in PYTHON[::-1]}
    of_cell = {trial.cell: trial for trial in trials}
    ordered = [of_cell[cell] for cell in {**order, **of_cell} if cell in of_cell]
    rows = []
    for trial in ordered:
        if trial.excluded or trial.names_hold:
            continue
        cell = Cell.of(trial.cell)
        rows.append(
            (
                *(cell.swift, cell.vllm, cell.python),
                *(trial.versions.get(name, "") for name in ("transformers", "torch")),
                "yes" if trial.works else "no",
                ", ".join(trial.changes) or f"{len(trial.would_install)}, none of the stack",
                *(str(trial.tests.get(part, "not run")) for part in PARTS),
                f"{trial.date}, {trial.commit}",
            )
        )
    names_only = ", ".join(trial.cell for trial in ordered if trial.names_hold)
    notes = [
        f"Names hold, an installation changes none of the stack, nothing was run: {names_only}"
    ]
    reasons: dict[str, list[str]] = {}
    missing: dict[str, set[str]] = {}
    for trial in ordered:
        if trial.excluded:
            reasons.setdefault(trial.excluded, []).append(trial.cell)
        if trial.missing:
            missing.setdefault(Cell.of(trial.cell).vllm, set()).update(trial.missing)
        notes += [f"{trial.cell}: `{text}`" for text in trial.pins_wrong]
    for release, names in sorted(missing.items()):
        notes.append(f"vLLM {release} goes without: {'; '.join(sorted(names))}")
    for reason, cells in reasons.items():
        notes.append(f"{', '.join(cells)} cannot be installed: {reason.removesuffix('.')}")
    return "\n".join([*markdown(HEAD, rows), "", *(f"- {note}." for note in notes)])


def overview(trials: Iterable[Trial]) -> str:
    """Return ms-swift by vLLM with the releases of Python that each works on, as Markdown."""
    of_cell = {trial.cell: trial for trial in trials}
    rows = []
    for swift in reversed(SWIFT):
        tried = [
            [of_cell[str(cell)] for p in PYTHON if str(cell := Cell(swift, vllm, p)) in of_cell]
            for vllm in STACKS
        ]
        rows.append((swift, *map(verdict, tried)))
    return "\n".join(markdown(("ms-swift", *(f"vLLM {release}" for release in STACKS)), rows))


def verdict(trials: Sequence[Trial]) -> str:
    """Return what the overview says of one ms-swift and one vLLM."""
    makeable = [trial for trial in trials if not trial.excluded]
    if not makeable:
        return "excluded by their own requirements" if trials else "not tried"
    pythons: dict[str, list[str]] = {"Python": [], "names only:": [], "not:": []}
    for trial in makeable:
        word = "Python" if trial.works else "names only:" if trial.names_hold else "not:"
        pythons[word].append(Cell.of(trial.cell).python)
    return "; ".join(f"{word} {', '.join(found)}" for word, found in pythons.items() if found)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return [lines[0], f"{'|---' * len(head)}|", *lines[1:]]
