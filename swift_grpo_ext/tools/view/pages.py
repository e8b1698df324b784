"""A run's pages as HTML: from the server, or all in one file that opens offline.

Every page is whole: style, script and (offline) images are inside it, and its policy lets no other
script run. Completions are hostile text; the templates escape all text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from swift_grpo_ext.diversity.alarms import read_words
from swift_grpo_ext.record.query import where_round
from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view import several
from swift_grpo_ext.tools.view.charts import evenly_spaced
from swift_grpo_ext.tools.view.group import read_group, read_image
from swift_grpo_ext.tools.view.overview import overview_values
from swift_grpo_ext.tools.view.runs import (
    NotFoundError,
    Run,
    find_samples,
    list_groups,
    parse_place,
)

HERE = Path(__file__).parent
PAGE_ROWS = 50
TABS = ("overview", "samples", "groups")

Query = Mapping[str, str]
"""The values of an address."""

Address = Callable[..., str]
"""Gives the address of a page, or of an `image`, by name and values."""


# --- words, numbers, templates ---


@cache
def words() -> dict[str, list[str]]:
    """Return all words by key as [English, Chinese]: the page's, and those of alarms."""
    return {**read_words(), **json.loads((HERE / "words.json").read_text(encoding="utf-8"))}


def both(texts: Sequence[str]) -> Markup:
    """Return English and Chinese; the page shows the one that its reader chose."""
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(*texts)


def word(key: str, **values: object) -> Markup:
    """Return the words of a key in both languages, with values in their places."""
    return both([text.format(**values) for text in words()[key]])


def number(value: object) -> str:
    """Return a value as the page shows it: of a number, four digits or more."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
    return "–" if value is None else str(value)


@cache
def _environment() -> Environment:
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
        both=both,
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
    """Return what a page shows, by the template of its name; `run` is None for all runs."""
    template = _environment().get_template(f"{page}.html")
    return Markup(template.render(run=run, url=url, **values))


def state_of(runs: Sequence[Run]) -> str:
    """Return a text that changes when what is read of the runs does; … where some is not yet."""
    return " ".join(
        f"{run.facts.version}{'' if run.record.is_whole else '…'} {run.log.version[1]}"
        for run in runs
    )


def render(runs: Sequence[Run], index: int | None, page: str, query: Query) -> str:
    """Return a served page of the run with an index, or of all runs; raises NotFoundError."""
    values_of = OF_ALL if index is None else OF_RUN
    if page not in values_of:
        raise NotFoundError(f"there is no page {page}")
    run = None if index is None else runs[index]
    shown = [run] if run else runs
    is_live = page not in ("group", "pair") and not {"offset", "round"} & {*query}
    state = state_of(shown) if is_live else ""  # before what is shown, which may be newer
    section = _section(page, run, address, values_of[page](run or runs, query))
    tabs = {"runs": "../runs" if run else "runs"} if len(runs) > 1 else {}
    tabs |= {name: name for name in TABS} if run else {}
    return _whole(shown, tabs, {"": section}, page, state)


def _whole(
    runs: Sequence[Run],
    tabs: Mapping[str, str],
    sections: Mapping[str, Markup],
    page: str = "",
    state: str = "",
) -> str:
    """Return a page with its sections by their ids; a saved one shows one at a time. A page with a
    state follows the runs."""
    return _environment().get_template("base.html").render(
        name=runs[0].name if len(runs) == 1 else "swift-grpo-ext",
        log=max((run.log for run in runs), key=lambda log: log.version),
        is_whole=all(run.record.is_whole for run in runs),
        **{"tabs": tabs, "sections": sections, "page": page, "state": state},
    )  # fmt: skip


# --- what each page shows ---


def samples_values(run: Run, query: Query) -> dict[str, Any]:
    """Return the values of `samples.html`: one page of the samples that match, by prompt; raises
    what `find_samples` does."""
    start = query.get("offset", "")
    offset = int(start) if start.isdecimal() else 0
    count, shown = find_samples(run, query, offset=offset, limit=PAGE_ROWS)
    # What follows one another and has one prompt stands below it.
    blocks = groupby(shown, key=lambda row: (row["round"], row["group"], row["fingerprint"]))
    return {
        "query": query,
        "count": count,
        "offset": offset,
        "page_rows": PAGE_ROWS,
        "blocks": [list(samples) for _, samples in blocks],
    }


def groups_values(run: Run, query: Query) -> dict[str, Any]:
    """Return the values of `groups.html`: the groups of a round, the newest if none is named;
    raises NotFoundError where there is no such round."""
    rounds = run.facts.rounds
    if not query.get("round") and not rounds:
        return {"rounds": [], "groups": []}
    shown = parse_place(query)[0] if query.get("round") else rounds[0]
    if shown not in rounds:
        raise NotFoundError(f"the record has no {shown}")
    at = rounds.index(shown)
    beside = [rounds[i] if 0 <= i < len(rounds) else None for i in (at + 1, at, at - 1)]
    names = [name and ".".join(map(str, name)) for name in beside]
    return {"rounds": names, "groups": list_groups(run, shown)}


def group_values(run: Run, query: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `group.html`; raises NotFoundError where there is no such group."""
    round_, [group] = parse_place(query, "group")
    where = f'from samples where {where_round(round_)} and "group"'
    [beside] = run.record.rows(
        f'select (select max("group") {where} < {group}) as earlier, '
        f'(select min("group") {where} > {group}) as later'
    )
    return {"group": read_group(run, round_, group), **beside}


OF_RUN: dict[str, Callable[[Any, Query], dict[str, Any]]] = {
    "overview": lambda run, query: overview_values(run),
    "samples": samples_values,
    "groups": groups_values,
    "group": group_values,
}
OF_ALL: dict[str, Callable[[Any, Query], dict[str, Any]]] = {
    "runs": lambda runs, query: several.runs_values(runs),
    "pair": several.pair_values,
}
"""The functions return the values of the pages of one run, and of all runs, by name."""


# --- one file ---


def write_page(runs: Sequence[Path], output: str | os.PathLike[str], num_groups: int = 40) -> Path:
    """Write the overview and a selection of groups as one page, of several runs the settings that
    differ, and of two what parts them; return its path.

    Args:
        runs: their folders.
        num_groups: how many groups it holds beside the alarms', spread evenly over the rounds.

    Raises:
        FileNotFoundError: there are neither samples nor logs nor what the monitor measured yet.
        OSError: the page cannot be written.
    """
    views = [Run(folder) for folder in runs]
    for run in views:
        run.refresh()
        if not run.has_begun:
            raise FileNotFoundError(f"{run.run_dir}: {words()['no_samples'][0]}")
    is_one = len(views) == 1
    sections = _saved_run(views[0], num_groups) if is_one else _saved_runs(views)
    tabs = {page: f"#{page}" for page in sections if not page.startswith("group-")}
    path = Path(output)
    path.write_text(_whole(views, tabs, sections), encoding="utf-8")
    return path


def _saved_runs(runs: Sequence[Run]) -> dict[str, Markup]:
    """Return the sections of several runs' file by their ids."""

    def inside(page: str, /, **values: object) -> str:
        return f"#{page}" if page == "pair" and len(runs) == 2 else ""

    sections = {"runs": _section("runs", None, inside, several.runs_values(runs))}
    if len(runs) == 2:
        values = several.pair_values(runs, {"b": "1"})
        sections["pair"] = _section("pair", None, inside, values)
    return sections


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
    rows = run.record.rows(
        'select distinct phase, step, number, "group" from samples '
        'order by step, phase desc, number, "group"'
    )
    firsts = [group["first"] for group in values["worst_groups"]]
    chosen = {
        (RoundId(row["phase"], row["step"], row["number"]), row["group"]): None
        for row in [*firsts, *evenly_spaced(rows, num_groups)]
    }
    cards = [
        card
        for round_ in dict.fromkeys(round_ for round_, _ in chosen)
        for card in list_groups(run, round_)
        if (round_, card["group"]) in chosen
    ]
    listed = {"rounds": [], "groups": cards, "num_groups": len(rows)}
    sections = {
        "overview": _section("overview", run, inside, values),
        "groups": _section("groups", run, inside, listed),
    }
    for round_, group in chosen:
        shown = read_group(run, round_, group)
        section = _section("group", run, inside, {"group": shown, "earlier": None, "later": None})
        sections[f"group-{shown['first']['round']}-{group}"] = section
    return sections
