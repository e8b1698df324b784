"""`swift-grpo-ext report RUN_DIR`: one HTML page that opens offline, and the curves as a PNG.

The page contains everything: curves as inline SVG, images as small JPEGs, words in English and
Chinese. Its sources are `diversity.jsonl` (`record`), ms-swift's `logging.jsonl`, the sample log.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from swift_grpo_ext.diversity import alarms, charts
from swift_grpo_ext.diversity.charts import AlarmSpan, Panel
from swift_grpo_ext.diversity.collision import format_p
from swift_grpo_ext.diversity.metrics import evenly_spaced
from swift_grpo_ext.diversity.record import RoundRecord, read_records
from swift_grpo_ext.diversity.worst_groups import worst_groups

PAGE, PICTURE = "report.html", "report.png"
MAX_ROWS = 1000
"""Of the table: half of them with an alarm at most."""

MAX_ALARMS = 50
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
    environment = Environment(
        loader=PackageLoader("swift_grpo_ext.diversity"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("report.html").render(
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
            "curves": {p.key: [_rounded(c) for c in p.curves.values()] for p in panels},
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
    for kind in ("broken", "collapse"):
        if kind in alarming:
            return kind
    if any(r.verdict == "unknown" for r in records):
        return "unknown"
    return "healthy" if records else "none"


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
