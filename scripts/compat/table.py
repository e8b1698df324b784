"""The table in docs/compatibility.md, between its two marks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from compat.trial import Counts, Trial

BEGIN, END = "<!-- compatibility: begin -->", "<!-- compatibility: end -->"
HEAD = (
    "| ms-swift | works | with | pins | unit tests | training |",
    "|---|---|---|---|---|---|",
)

_CAUSE = re.compile(r"(?<=is missing) \(.*\)$")  # Python's words for it


def table(trials: Iterable[Trial]) -> str:
    """Markdown, and below it why a release does not work."""
    trials = list(trials)
    notes = [note for trial in trials if (note := _note(trial))]
    return "\n".join([*HEAD, *map(_row, trials), *(["", *notes] if notes else [])])


def put_into(text: str, made: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what is between the marks replaced; raises `ValueError` where they are not."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"there is no {begin} ... {end} to put the table into")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def write_pages(
    pages: Mapping[str, Path], made: Callable[[str], str], begin: str, end: str
) -> None:
    """Put what is `made` for each language between the marks of its page, and say so."""
    for language, page in pages.items():
        text = put_into(page.read_text(encoding="utf-8"), made(language), begin, end)
        page.write_text(text, encoding="utf-8")
        print(f"{page.name}: written")


def rows_of(text: str) -> dict[str, bool]:
    """The releases in a text's table, and whether they work."""
    made = text.partition(BEGIN)[2].partition(END)[0]
    return {m[1]: m[2] == "yes" for m in re.finditer(r"^\| (\d[\d.]*) \| (yes|no) \|", made, re.M)}


def _row(trial: Trial) -> str:
    versions = dict(trial.versions)
    release = versions.pop("ms-swift")
    others = [f"{name} {version}" for name, version in versions.items()]
    cells = [
        release,
        "yes" if trial.works else "no",
        ", ".join([*others, *(["no vLLM"] if trial.vllm_clashes else [])]),
        _pins(trial),
        _counts(trial.unit),
        _counts(trial.training),
    ]
    return f"| {' | '.join(cells)} |"


def _pins(trial: Trial) -> str:
    parts = [f"{trial.pins_held} hold"]
    parts += [f"{len(trial.pins_wrong)} not"] if trial.pins_wrong else []
    parts += [f"{trial.pins_unseen} not tested without vLLM"] if trial.pins_unseen else []
    return ", ".join(parts)


def _counts(counts: Counts | None) -> str:
    if counts is None:
        return "not run"
    parts = [f"{counts.passed} passed"]
    parts += [f"{counts.failed} failed"] if counts.failed else []
    parts += [f"{counts.skipped} skipped"] if counts.skipped else []
    return ", ".join(parts)


def _note(trial: Trial) -> str:
    reasons = []
    if trial.refusal:
        reasons.append("the plugin refuses it by name")
    if trial.vllm_clashes:
        clashes = ", ".join(f"`{clash}`" for clash in trial.vllm_clashes)
        reasons.append(f"the pinned vLLM needs {clashes}, which it excludes")
    reasons += [f"`{re.sub(_CAUSE, '', text)}`" for text in trial.pins_wrong]
    said = "; ".join(reasons)
    return f"- {trial.versions['ms-swift']}: {said}." if reasons else ""
