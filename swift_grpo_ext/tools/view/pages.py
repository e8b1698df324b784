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
from swift_grpo_ext.tools.diff import read_args
from swift_grpo_ext.tools.view import overview, several
from swift_grpo_ext.tools.view.advice import advise, mean_step
from swift_grpo_ext.tools.view.group import RunView, image_bytes
from swift_grpo_ext.tools.view.overview import evenly_spaced
from swift_grpo_ext.tools.view.runs import (
    FUNCTION,
    NotFoundError,
    find_samples,
    list_groups,
    parse_place,
)

HERE = Path(__file__).parent
PAGE_ROWS = 50

Address = Callable[..., str]


@cache
def words() -> dict[str, list[str]]:
    """Return all words by key as [English, Chinese]: the page's, and those of alarms."""
    return {**read_words(), **json.loads((HERE / "words.json").read_text(encoding="utf-8"))}


def both(texts: Sequence[str]) -> Markup:
    """Return English and Chinese; the page shows the one that its reader chose."""
    return Markup('<span lang="en">{}</span><span lang="zh">{}</span>').format(*texts)


def pair(key: str) -> list[str]:
    """Return the words of a key as [English, Chinese]; a key without words, such as the name of a
    reward function, as it is."""
    return words().get(key, [key.removeprefix(FUNCTION)] * 2)


def word(key: str, **values: object) -> Markup | str:
    """Return the words of a key in both languages, with values in their places."""
    texts = [text.format(**values) if values else text for text in pair(key)]
    return both(texts) if texts[0] != texts[1] else texts[0]


def number(value: float | None) -> str:
    """Return a number as the page shows it."""
    if value is None:
        return "–"
    if float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.3f}"


def rounded(value: object) -> str:
    """Return a setting as the page shows it: of a number, six digits at most."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:120]


def apart(*values: object) -> list[object]:
    """Return values that differ with as many digits as show it."""
    for digits in range(4, 17):
        shown = [f"{v:.{digits}g}" if isinstance(v, float) else v for v in values]
        if len({*map(str, shown)}) == len(values):
            return shown
    return list(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("swift_grpo_ext.tools.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    files = ("uPlot.iife.min.js", "script.js", "uPlot.min.css", "style.css")
    texts = [(HERE / "static" / name).read_text(encoding="utf-8") for name in files]
    digests = [hashlib.sha256(script.encode()).digest() for script in texts[:2]]
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    environment.filters.update(number=number, rounded=rounded)
    environment.globals.update(
        t=word,
        both=both,
        pair=pair,
        apart=apart,
        plotting=Markup(texts[0]),
        script=Markup(texts[1]),
        style=Markup("".join(texts[2:])),
        policy=(
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
            "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'self'"
        ),
        basename=os.path.basename,
    )
    return environment


def address(page: str, /, **values: object) -> str:
    """Return the address of a served page, seen from another one."""
    return f"{page}?{urlencode(values)}"


def render(
    page: str,
    run: RunView | None,
    runs: Sequence[RunView] = (),
    *,
    url: Address = address,
    **values: object,
) -> str:
    """Return a page.

    Args:
        page: the name of the template that stands in `base.html`, or `saved`.
        run: the one that the page is about; None for all `runs`.
        runs: those that are shown beside it, itself among them.
        url: gives the address of a page, or of an `image`, by name and values.
        values: what the template shows.
    """
    runs = runs or [run for run in [run] if run]
    saved = "saved_runs.html" if run is None else "saved.html"
    template = _environment().get_template(saved if page == "saved" else "base.html")
    state = state_of(runs if run is None else [run])
    return template.render(run=run, runs=runs, url=url, page=page, state=state, **values)


def state_of(runs: Sequence[RunView]) -> str:
    """Return a text that changes when what is read of the runs does."""
    return " ".join(
        f"{run.facts.version}{'' if run.facts.is_whole else '…'} {run.log.version[1]} {run.state}"
        for run in runs
    )


# --- what each page shows ---


def samples_values(run: RunView, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of `samples.html`: one page of the samples that match, by prompt, or the
    problem."""
    problem, count, offset = "", 0, 0
    shown: list[dict[str, Any]] = []
    try:
        offset = max(int(query.get("offset") or 0), 0)
        count, shown = find_samples(run, query, offset=offset, limit=PAGE_ROWS)
    except ValueError as e:
        problem = str(e)
    # What follows one another and has one prompt stands below it.
    blocks = groupby(shown, key=lambda row: (row["round"], row["group"], row["fingerprint"]))
    return {
        "query": query,
        "problem": problem,
        "count": count,
        "offset": offset,
        "next_offset": offset + PAGE_ROWS if offset + PAGE_ROWS < count else None,
        "blocks": [list(samples) for _, samples in blocks],
        "facets": run.facts.menus,
        "is_live": not offset,
    }


def groups_values(run: RunView, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of `groups.html`: the groups of a round, the newest if none is named;
    raises NotFoundError where there is no such round."""
    rounds = run.facts.rounds
    names = [".".join(map(str, name)) for name in rounds]
    shown = query.get("round") or next(iter(names), "")
    if shown and shown not in names:
        raise NotFoundError(f"the record has no {shown}")
    at = names.index(shown) if names else 0
    return {
        "names": names,
        "shown": shown,
        "later": names[at - 1] if at > 0 else None,
        "earlier": names[at + 1] if at + 1 < len(names) else None,
        "groups": list_groups(run, rounds[at]) if names else [],
        "is_live": not query.get("round"),
    }


def group_values(run: RunView, query: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `group.html`; raises NotFoundError where there is no such group."""
    name, number = parse_place(query, "group")
    group = run.group(name, number)
    groups = f'select distinct "group" from samples where {where_round(name)} order by all'
    numbers = [row["group"] for row in run.record.rows(groups)]
    at = numbers.index(number)
    return {
        "group": group,
        "earlier_group": numbers[at - 1] if at else None,
        "later_group": numbers[at + 1] if at + 1 < len(numbers) else None,
    }


def overview_values(run: RunView) -> dict[str, Any]:
    """Return the values of `overview.html`: how the run is now, its alarms with their groups, and
    its curves, in which alarms in training are shaded."""
    records = run.facts.diversity
    alarms = overview.list_alarms(records)
    shaded = [alarm for alarm in alarms if alarm["phase"] == "train"]
    log, trained = run.log, [name.step for name in run.facts.rounds if name.phase == "train"]
    panels = overview.make_panels(run, records, log.steps)
    rewards = panels.get("reward", {}).get("reward", [])
    return {
        "log": log,
        "step": max(log.step, max(trained, default=-1) + 1),  # some steps may not be logged
        "reward": rewards[-1][1] if rewards else None,
        "mean_reward": overview.mean_of_last(rewards),
        "minutes_left": (log.max_steps - log.step) * (log.seconds or 0) / 60,
        "verdict": overview.overall_verdict(records),
        "alarms": alarms,
        "shaded": shaded,
        "charts": overview.make_charts(panels, shaded),
        "advices": advise(mean_step([*log.steps.values()]), read_args(run.run_dir)),
        "alarm_groups": overview.alarm_groups(run, records),
        "is_live": True,
    }


# --- one file ---


def write_page(runs: Sequence[Path], output: str | os.PathLike[str], num_groups: int = 40) -> Path:
    """Write the overview and a selection of groups as one page, of several runs their curves, and
    of two what parts them; return its path.

    Args:
        runs: their folders.
        num_groups: how many groups it holds at most, spread evenly over the rounds.

    Raises:
        FileNotFoundError: there are neither samples nor logs nor what the monitor measured yet.
        OSError: the page cannot be written.
    """
    views = [RunView(folder) for folder in runs]
    for run in views:
        run.refresh()
        if not run.facts.rounds and not run.log.steps and not run.facts.diversity:
            raise FileNotFoundError(f"{run.run_dir}: {words()['no_samples'][0]}")
    if len(views) == 1:
        page = _saved_run(views[0], num_groups)
    else:
        pair = several.pair_values(views, (0, 1)) if len(views) == 2 else {}
        page = render("saved", None, views, **several.runs_values(views), **pair)
    path = Path(output)
    path.write_text(page, encoding="utf-8")
    return path


def _saved_run(run: RunView, num_groups: int) -> str:
    places = run.record.rows(
        'select distinct phase, step, number, "group" from samples '
        'order by step, phase desc, number, "group"'
    )
    listed, shown = [], []
    for phase, step, number, group in (p.values() for p in evenly_spaced(places, num_groups)):
        name = RoundId(phase, step, number)
        listed += [card for card in list_groups(run, name) if card["group"] == group]
        shown.append(group_values(run, listed[-1]))

    def address_inside(page: str, **values: Any) -> str:
        if page == "image":
            try:
                name, group, number = parse_place(values, "group", "number")
                turn = values.get("index"), values.get("turn", 0)
                content = image_bytes(run.medium_name(name, group, number, *turn), "small")
            except NotFoundError:
                return ""
            return f"data:image/png;base64,{base64.b64encode(content).decode()}"
        place = f"-{values['round']}-{values['group']}" if page == "group" else ""
        return f"#{page}{place}"

    values = {"listed": listed, "pages": shown, **overview_values(run)}
    return render("saved", run, url=address_inside, **values)
