"""Makes a run's pages as HTML: for the server, or all in one file that opens offline.

Every page holds its style, its script and (offline) its images.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from swift_grpo_ext.diversity import alarms
from swift_grpo_ext.record.query import where_round
from swift_grpo_ext.tools.runs import run_name
from swift_grpo_ext.tools.view.group import read_group, read_image
from swift_grpo_ext.tools.view.overview import evenly_spaced, overview_values, runs_values
from swift_grpo_ext.tools.view.runs import NotFoundError, Run, find_samples, list_groups, parse

HERE = Path(__file__).parent
PAGE_ROWS = 50

Query = Mapping[str, str]  # the values of an address
Address = Callable[..., str]  # gives the address of a page, or of an `image`, by name and values


# --- words, numbers, templates ---


@cache
def words() -> dict[str, list[str]]:
    """Return all words by key as [English, Chinese]: the page's, and those of alarms."""
    own = json.loads((HERE / "words.json").read_text(encoding="utf-8"))
    return {**alarms.read_words(), **own}


def both(texts: Iterable[str]) -> Markup:
    """Return English and Chinese; the page shows the one that its reader chose."""
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(*texts)


def word(key: str, **values: object) -> Markup:
    """Return the words of a key in both languages, with values in their places."""
    return both(text.format(**values) for text in words()[key])


def number(value: object) -> str:
    """Return a value as the page shows it; a number has four digits or more."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return "–" if value is None else str(value)


@cache
def _environment() -> Environment:
    # Completions are hostile text: all text is escaped, and the policy lets no other script run.
    environment = Environment(
        loader=PackageLoader("swift_grpo_ext.tools.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = (
        (HERE / "static" / name).read_text(encoding="utf-8") for name in ("script.js", "style.css")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.filters.update(number=number, basename=os.path.basename)
    environment.globals.update(
        t=word,
        cause=lambda row: both(alarms.describe_cause(row, lang) for lang in alarms.LANGUAGES),
        collision=lambda c: both(alarms.describe_collision(c, lang) for lang in alarms.LANGUAGES),
        script=Markup(script),
        style=Markup(style),
        policy=(
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'"
        ),
    )
    return environment


def address(page: str, /, **values: object) -> str:
    """Return the address of a served page, seen from another one."""
    return f"{page}?{urlencode(values)}" if values else page


def _section(page: str, run: Run | None, url: Address, values: Mapping[str, Any]) -> Markup:
    """Return the content of a page, by the template of its name; `run` is None for all runs."""
    template = _environment().get_template(f"{page}.html")
    return Markup(template.render(run=run, facts=run and run.facts, url=url, **values))


def state_of(runs: Sequence[Run]) -> str:
    """Return a text that changes when new files of the runs were read; … marks unread files."""
    return " ".join(f"{run.facts.version}{'…' * (not run.record.is_whole)}" for run in runs)


def render(runs: Sequence[Run], index: int | None, page: str, query: Query) -> str:
    """Return a served page of the run with an index, or of all runs; raises NotFoundError."""
    if page not in ({"runs"} if index is None else VALUES):
        raise NotFoundError(f"there is no page {page}")
    run = None if index is None else runs[index]
    shown = [run] if run else runs
    is_live = page != "group" and not {"offset", "round"} & {*query}
    state = state_of(shown) if is_live else ""  # before the values: these may be newer, never older
    values = VALUES[page](run, query) if run else runs_values(runs)
    tabs = {"runs": "../runs" if run else "runs"} if len(runs) > 1 else {}
    tabs |= {name: name for name in ("overview", "samples", "groups")} if run else {}
    section = _section(page, run, address, values)
    return _whole(shown, page, state, tabs=tabs, sections={"": section})


def _whole(runs: Sequence[Run], page: str, state: str = "", **parts: Mapping[str, str]) -> str:
    """Return a page with its `tabs`, and its `sections` by their ids; a saved page shows one at a
    time. A page with a state updates itself."""
    template = _environment().get_template("base.html")
    return template.render(
        name=run_name(runs[0].run_dir) if len(runs) == 1 else "swift-grpo-ext",
        facts=max((run.facts for run in runs), key=lambda facts: facts.updated),
        is_whole=all(run.record.is_whole for run in runs),
        page=page,
        state=state,
        **parts,
    )


# --- the values of each page ---


def samples_values(run: Run, query: Query) -> dict[str, Any]:
    """Return the values of `samples.html`, one page of the samples that match."""
    count, shown = find_samples(run, query, PAGE_ROWS)
    # Consecutive samples of one prompt are shown below it.
    blocks = groupby(shown, key=lambda row: (row["round"], row["group"], row["fingerprint"]))
    page = {"query": query, "offset": int(query.get("offset", 0)), "page_rows": PAGE_ROWS}
    return {**page, "count": count, "blocks": [list(samples) for _, samples in blocks]}


def groups_values(run: Run, query: Query) -> dict[str, Any]:
    """Return the values of `groups.html`: the groups of a round; without a name, of the
    newest."""
    rounds = run.facts.rounds
    if not rounds:
        return {"rounds": None, "groups": []}
    shown = parse(query, "round") if query.get("round") else rounds[0]
    if shown not in rounds:
        raise NotFoundError(f"the record has no {shown}")
    at = rounds.index(shown)
    beside = rounds[at + 1 : at + 2], shown, rounds[max(at - 1, 0) : at]
    return {"rounds": beside, "groups": list_groups(run, shown)}


def group_values(run: Run, query: Query) -> dict[str, Any]:
    """Return the values of `group.html`; a round's groups count from 0."""
    round_, group = parse(query, "round"), parse(query, "group")
    last = f'select max("group") as last from samples where {where_round(round_)}'
    return {**read_group(run, round_, group), **run.record.rows(last)[0]}


# By a page's name, the function that returns its values for a run, or raises NotFoundError.
VALUES: dict[str, Callable[[Run, Query], dict[str, Any]]] = {
    "overview": lambda run, _: overview_values(run),
    "samples": samples_values,
    "groups": groups_values,
    "group": group_values,
}


# --- one file ---


def write_page(runs: Sequence[Path], output: str | os.PathLike[str], num_groups: int = 40) -> Path:
    """Write one page that opens offline, and return its path. It is a run's overview with the
    groups of alarms and `num_groups` others, as many of each round; or the page of several runs.

    Raises:
        FileNotFoundError: a run has not begun.
        OSError: the page cannot be written.
    """
    opened = [Run(folder) for folder in runs]
    for run in opened:
        run.refresh()
        if not run.facts.has_begun:
            raise FileNotFoundError(f"{run.run_dir}: {words()['no_samples'][0]}")
    if len(opened) == 1:
        sections = _saved_run(opened[0], num_groups)
    else:
        sections = {"runs": _section("runs", None, lambda *_: "", runs_values(opened))}
    tabs = {page: f"#{page}" for page in sections if not page.startswith("group-")}
    path = Path(output)
    path.write_text(_whole(opened, "", tabs=tabs, sections=sections), encoding="utf-8")
    return path


def _saved_run(run: Run, num_groups: int) -> dict[str, Markup]:
    """Return the sections of a run's file by their ids."""

    def inside(page: str, /, **values: Any) -> str:
        if page == "image":
            try:
                content = read_image(run, {**values, "size": "small"})
            except NotFoundError:
                return ""
            return f"data:image/png;base64,{base64.b64encode(content).decode()}"
        return f"#group-{values['round']}-{values['group']}" if page == "group" else f"#{page}"

    values = overview_values(run)
    rounds = evenly_spaced(run.facts.rounds, num_groups)
    each = num_groups // max(len(rounds), 1)
    groups = [group for round_ in rounds for group in list_groups(run, round_)[:each]]
    sections = {
        "overview": _section("overview", run, inside, values),
        "groups": _section("groups", run, inside, {"rounds": None, "groups": groups}),
    }
    for row in [*(group["first"] for group in values["worst_groups"]), *groups]:
        group = read_group(run, parse(row, "round"), row["group"])
        section = _section("group", run, inside, {**group, "last": None})
        sections[f"group-{row['round']}-{row['group']}"] = section
    return sections
