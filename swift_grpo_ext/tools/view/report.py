"""`swift-grpo-ext report RUN_DIR`: one HTML page that opens offline, and the curves as a PNG.

The page contains everything: curves as inline SVG, images as small JPEGs, words in English and
Chinese. Its sources are `diversity.jsonl` (`record`), ms-swift's `logging.jsonl`, the sample log.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from swift_grpo_ext.diversity import alarms
from swift_grpo_ext.diversity.collision import format_p
from swift_grpo_ext.diversity.metrics import evenly_spaced
from swift_grpo_ext.diversity.record import RoundRecord, read_records, round_name
from swift_grpo_ext.record.reader import read_group
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.tools.view import charts
from swift_grpo_ext.tools.view.charts import AlarmSpan, Panel

PAGE, PICTURE = "report.html", "report.png"
MAX_ROWS = 1000
"""Of the table: half of them with an alarm at most."""

MAX_ALARMS = 50
MAX_GROUPS = 10
"""Of the worst ones."""

MAX_GROUPS_OF_ROUND = 2
MAX_CHARACTERS = 2000
THUMBNAIL = 128
"""Pixels, of the longer side."""

VERDICTS = ("broken", "collapse", "unknown", "healthy")
"""The worst first."""

TABLE_METRICS = ("unique_ratio", "vendi", "distinct_answers", "edit_similarity", "surprisal")
COLUMNS = ("round", "verdict", "log10_p", "shared_bits", *TABLE_METRICS, "reward", "samples")


def write_report(
    run_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> list[Path]:
    """Write the page and the picture.

    Args:
        run_dir: `--output_dir` of a run.
        output: their folder; `run_dir` if left out.

    Returns:
        The files.

    Raises:
        FileNotFoundError: the folder holds neither of the files that a report is made from.
        OSError: a file cannot be written.
    """
    run_dir, folder = Path(run_dir), Path(run_dir if output is None else output)
    log, records = charts.read_log(run_dir), read_records(run_dir)
    if not log and not records:
        raise FileNotFoundError(
            f"{run_dir} holds neither rounds in diversity.jsonl nor steps in logging.jsonl: give "
            "the --output_dir of a run that trained with --callbacks diversity."
        )
    panels, spans = charts.make_panels(log, records), alarm_spans(records)
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / PAGE, folder / PICTURE
    page.write_text(_render(run_dir, panels, spans, log, records), encoding="utf-8")
    titles = [alarms.read_words()[panel.key][alarms.ENGLISH] for panel in panels]
    charts.write_png(panels, spans, titles, picture)
    return [page, picture]


def _render(
    run_dir: Path,
    panels: Sequence[Panel],
    spans: Sequence[AlarmSpan],
    log: Sequence[dict[str, Any]],
    records: Sequence[RoundRecord],
) -> str:
    limits = charts.step_limits(panels, spans)
    groups, problem = worst_groups(run_dir, records)
    streaks = alarms.alarm_streaks(records)
    loader = PackageLoader("swift_grpo_ext.tools.view")
    page = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return page.get_template("report.html").render(
        run_name=run_dir.resolve().name,
        words=alarms.read_words(),
        verdict=overall_verdict(records),
        facts=_facts(records),
        alarms=[_alarm(streak) for streak in streaks[:MAX_ALARMS]],
        num_more_alarms=max(len(streaks) - MAX_ALARMS, 0),
        panels=[(panel, Markup(charts.to_svg(panel, spans, limits))) for panel in panels],
        chart={
            "left": charts.LEFT,
            "right": charts.RIGHT,
            "width": charts.WIDTH,
            "limits": limits,
            "curves": {p.key: [*map(_rounded, p.curves.values())] for p in panels},
        },
        groups=groups,
        groups_problem=problem,
        columns=COLUMNS,
        rows=_table_rows(records, log),
        num_rounds=len(records),
    )


def alarm_spans(records: Sequence[RoundRecord]) -> list[AlarmSpan]:
    """Steps of training with an alarm; rounds in a row together."""
    return [
        AlarmSpan(first=s[0].steps_done, last=s[-1].steps_done, kind=s[0].verdict)
        for s in alarms.alarm_streaks(records)
        if s[0].phase == "train"
    ]


def overall_verdict(records: Sequence[RoundRecord]) -> str:
    """The worst verdict with an alarm; `none` for no rounds."""
    alarming = {r.verdict for r in records if r.alarm}
    alarming |= {"unknown" for r in records if r.verdict == "unknown"}
    return next((v for v in VERDICTS if v in alarming), "healthy" if records else "none")


def _facts(records: Sequence[RoundRecord]) -> list[tuple[str, str]]:
    seconds = sum(r.seconds for r in records) / max(len(records), 1)
    verdicts = [r.verdict for r in records]
    return [
        ("rounds_watched", f"{len(records):,}"),
        ("samples_watched", f"{sum(r.num_samples for r in records):,}"),
        ("broken_rounds", str(verdicts.count("broken"))),
        ("collapse_rounds", str(verdicts.count("collapse"))),
        ("lowest_p", format_p(min((r.log10_p for r in records), default=0.0))),
        ("cost", f"{seconds * 1e3:.0f} ms"),
    ]


def _alarm(streak: Sequence[RoundRecord]) -> dict[str, Any]:
    """Texts in both languages, from the most improbable round of broken randomness or the last one
    of a collapse."""
    first, last = streak[0], streak[-1]
    told = min(streak, key=lambda r: r.log10_p) if first.verdict == "broken" else last
    collisions = told.collisions if first.verdict == "broken" else []
    return {
        "kind": first.verdict,
        "first": first.round_name,
        "last": f"{last.step}.{last.number}",
        "num_rounds": len(streak),
        "remedy": told.remedy,
        "cause": [alarms.describe_cause(told, language) for language in alarms.LANGUAGES],
        "collisions": [
            [alarms.describe_collision(collision, language) for language in alarms.LANGUAGES]
            for collision in collisions
        ],
    }


def _table_rows(
    records: Sequence[RoundRecord], log: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    rewards = {row["step"]: row.get("reward") for row in log}
    parts = [r for r in records if r.alarm], [r for r in records if not r.alarm]
    shown = {id(record) for part in parts for record in evenly_spaced(part, MAX_ROWS // 2)}
    return [
        {
            "order": order,
            "name": f"{r.phase} {r.step}.{r.number}",
            "verdict": r.verdict,
            "cells": [
                *(r.log10_p, r.shared_bits, *(r.metrics.get(name) for name in TABLE_METRICS)),
                *(rewards.get(r.steps_done) if r.phase == "train" else None, r.num_samples),
            ],
        }
        for order, r in enumerate(records)
        if id(r) in shown
    ]


def _rounded(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[x, float(f"{y:.5g}")] for x, y in points]


# --- the worst groups: which completions are equal, and how far others agree ---


@dataclass(frozen=True, kw_only=True)
class ShownCompletion:
    """One completion, with all samples that gave it."""

    rows: list[SampleRow]
    shared: str
    """Its beginning, as far as another completion of the group begins so too."""

    rest: str
    """What follows, up to `MAX_CHARACTERS` in all."""

    earlier: str
    """The earlier round that it comes from; empty for this one."""


@dataclass(frozen=True, kw_only=True)
class WorstGroup:
    """One group."""

    record: RoundRecord
    number: int
    prompt: str
    images: list[tuple[str, str]]
    """Name and data URI of each."""

    media: list[str]
    """Names of media that cannot be shown."""

    completions: list[ShownCompletion]
    num_samples: int


def worst_groups(
    run_dir: str | os.PathLike[str], records: Sequence[RoundRecord]
) -> tuple[list[WorstGroup], str]:
    """Groups of the worst rounds, alarms first; and why some are missing, empty if none is."""
    ranked = sorted(records, key=_badness)
    wanted = [(r, g) for r in ranked for g in r.worst_groups[:MAX_GROUPS_OF_ROUND]][:MAX_GROUPS]
    found: list[WorstGroup] = []
    missing = ""
    for record, number in wanted:
        try:
            found.append(_worst_group(run_dir, record, number))
        except (OSError, ValueError) as e:
            missing = missing or str(e)
    return found, missing


def _badness(record: RoundRecord) -> tuple[Any, ...]:
    unique_ratio = record.metrics.get("unique_ratio", 1.0)
    verdict = VERDICTS.index(record.verdict)
    return verdict, record.alarm is None, record.log10_p, unique_ratio, record.step


def _worst_group(run_dir: str | os.PathLike[str], record: RoundRecord, number: int) -> WorstGroup:
    rows = _read(run_dir, {**vars(record), "group": number})
    earlier = [
        row
        for collision in record.collisions
        if any(origin["sample_id"]["group"] == number for origin in collision["samples"])
        for origin in collision["earlier"][-1:]
        for row in _read_earlier(run_dir, origin["sample_id"])
    ]
    images, media = thumbnails(rows[0].media)
    return WorstGroup(
        record=record,
        number=number,
        prompt=_prompt_text(rows[0].prompt),
        images=images,
        media=media,
        completions=_merge_equal(rows, earlier),
        num_samples=len(rows),
    )


def _read(run_dir: str | os.PathLike[str], sample_id: dict[str, Any]) -> list[SampleRow]:
    names = ("phase", "step", "number", "group")
    return read_group(run_dir, **{name: sample_id[name] for name in names})


def _read_earlier(run_dir: str | os.PathLike[str], sample_id: dict[str, Any]) -> list[SampleRow]:
    """The row of an earlier round's sample; nothing if it is gone."""
    with suppress(ValueError):
        rows = _read(run_dir, sample_id)
        return [row for row in rows if row.sample_id.index == sample_id["index"]][:1]
    return []


def _merge_equal(own: Sequence[SampleRow], earlier: Sequence[SampleRow]) -> list[ShownCompletion]:
    """Each different completion once, sorted by tokens, so that equal beginnings are neighbours."""
    equal: dict[tuple[tuple[int, ...], str], list[SampleRow]] = defaultdict(list)
    for row, name in [(r, "") for r in own] + [
        (r, round_name(asdict(r.sample_id))) for r in earlier
    ]:
        equal[tuple(row.token_ids), name].append(row)
    in_order = sorted(equal.items())
    texts = [rows[0].text for _, rows in in_order]
    shown = []
    for number, (text, ((_, name), rows)) in enumerate(zip(texts, in_order, strict=True)):
        others = [text] if len(rows) > 1 else texts[:number] + texts[number + 1 :]
        common = (os.path.commonprefix([text, o]) for o in others)  # noqa: RUF071 (characters)
        shared = max(common, key=len, default="")[:MAX_CHARACTERS]
        rest = text[len(shared) : MAX_CHARACTERS]
        shown.append(ShownCompletion(rows=rows, shared=shared, rest=rest, earlier=name))
    return shown


def _prompt_text(prompt: str) -> str:
    """The messages' words; the prompt as it was logged if it is not our list of messages."""
    try:
        return "\n".join(f"{m['role']}: {m['content']}" for m in json.loads(prompt))
    except (ValueError, TypeError, KeyError):
        return prompt


def thumbnails(media: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Small images as (name, data URI), and the names of what is no image on this machine."""
    uris = [(Path(name).name, _thumbnail(name)) for name in media]
    others = [name for name, (_, uri) in zip(media, uris, strict=True) if uri is None]
    return [(name, uri) for name, uri in uris if uri], others


def _thumbnail(name: str) -> str | None:
    try:
        with Image.open(name) as image:
            small = image.convert("RGB")
    except (OSError, ValueError):  # no file, no image, no name of a file
        return None
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
