"""`swift-grpo-ext report RUN_DIR`: one HTML page that opens offline, and the curves as PNGs.

Everything is in the page: curves as inline SVG, images as small JPEGs, words in English and
Chinese. It reads `diversity.jsonl` (`record`), ms-swift's `logging.jsonl` and the sample log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from swift_grpo_ext.diversity import charts
from swift_grpo_ext.diversity.aligned import WorstGroup, worst_groups
from swift_grpo_ext.diversity.charts import Mark
from swift_grpo_ext.diversity.collision import format_p
from swift_grpo_ext.diversity.metrics import evenly
from swift_grpo_ext.diversity.record import RoundRecord, read_records, time_of
from swift_grpo_ext.diversity.series import Panel, make_panels, read_log

PAGE, PICTURE = "report.html", "report.png"
MAX_ROWS = 1000
MAX_ALARMS = 50
LONG_TEXT = 160
"""Characters from which on completions stand beside each other, not below."""

METRIC_COLUMNS = {
    "col_unique": "unique_ratio",
    "col_vendi": "vendi",
    "col_answers": "distinct_answers",
    "col_similarity": "edit_similarity",
    "col_surprisal": "surprisal",
}
COLUMNS = ("col_round", "col_verdict", "col_log10_p", "col_bits", *METRIC_COLUMNS,
           "col_reward", "col_samples")  # fmt: skip


def write_report(
    run_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None
) -> list[Path]:
    """Write the page and the picture.

    Args:
        run_dir: `--output_dir` of a run.
        output: the folder that they go to; `run_dir` if left out.

    Returns:
        The files.

    Raises:
        FileNotFoundError: the folder holds neither of the files that a report is made from.
        OSError: a file cannot be written.
    """
    run_dir, folder = Path(run_dir), Path(run_dir if output is None else output)
    log, records = read_log(run_dir), read_records(run_dir)
    if not log and not records:
        raise FileNotFoundError(
            f"{run_dir} holds neither rounds in diversity.jsonl nor steps in logging.jsonl: give "
            "the --output_dir of a run that trained with --callbacks diversity."
        )
    words = read_words()
    panels = make_panels(log, records)
    marks = alarm_marks(records)
    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / PAGE, folder / PICTURE
    page.write_text(_render(run_dir, words, panels, marks, log, records), encoding="utf-8")
    charts.write_png(panels, marks, [words[p.key][0] for p in panels], picture)
    return [page, picture]


def read_words() -> dict[str, list[str]]:
    """The words of the page: English, Chinese."""
    path = Path(__file__).with_name("templates") / "words.json"
    words: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return words


def alarm_marks(records: Sequence[RoundRecord]) -> list[Mark]:
    marks = [
        Mark(time=time_of(r), kind=r.verdict, text=r.alarm)
        for r in records
        if r.alarm and r.phase == "train"
    ]
    return list(evenly(marks, charts.WIDTH // 2))


def alarm_streaks(records: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Alarms of one kind in a row together: what was said first of broken randomness, and last of a
    collapse, which counts its rounds."""
    in_order = sorted(records, key=lambda r: r.phase == "eval")
    streaks = groupby(in_order, key=lambda r: (r.phase, r.verdict, r.alarm is not None))
    alarms = []
    for (_, kind, is_alarm), streak in ((key, list(rounds)) for key, rounds in streaks):
        text = streak[-1 if kind == "collapse" else 0].alarm or ""
        if is_alarm:
            text = text.removeprefix("diversity: ")
            alarms.append({"kind": kind, "text": text, "rounds": len(streak)})
    return alarms


def _render(
    run_dir: Path,
    words: dict[str, list[str]],
    panels: Sequence[Panel],
    marks: Sequence[Mark],
    log: Sequence[dict[str, Any]],
    records: Sequence[RoundRecord],
) -> str:
    span = charts.span_of(panels, marks)
    groups, problem = worst_groups(run_dir, records)
    alarms = alarm_streaks(records)
    environment = Environment(
        loader=PackageLoader("swift_grpo_ext.diversity"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("report.html").render(
        run_name=run_dir.resolve().name,
        words=words,
        verdict=overall_verdict(records),
        facts=_facts(records),
        alarms=alarms[:MAX_ALARMS],
        num_more_alarms=max(len(alarms) - MAX_ALARMS, 0),
        panels=[
            {
                "key": p.key,
                "curves": p.curves,
                "svg": Markup(charts.svg(p, marks, span, words[p.key][0])),
            }
            for p in panels
        ],
        curves={p.key: [_rounded(c.points) for c in p.curves] for p in panels},
        chart={"left": charts.LEFT, "right": charts.RIGHT, "width": charts.WIDTH},
        groups=[{**vars_of(g), "is_long": _is_long(g)} for g in groups],
        groups_problem=problem,
        columns=COLUMNS,
        rows=_table_rows(records, log),
        num_rounds=len(records),
    )


def overall_verdict(records: Sequence[RoundRecord]) -> str:
    """The worst that there was an alarm about; `none` for no rounds."""
    alarms = {r.verdict for r in records if r.alarm}
    for kind in ("broken", "collapse"):
        if kind in alarms:
            return kind
    if any(r.verdict == "unknown" for r in records):
        return "unknown"
    return "healthy" if records else "none"


def _facts(records: Sequence[RoundRecord]) -> list[tuple[str, str]]:
    seconds = np.mean([r.seconds for r in records]) if records else 0.0
    lowest = min((r.log10_p for r in records), default=0.0)
    verdicts = [r.verdict for r in records]
    return [
        ("rounds_watched", f"{len(records):,}"),
        ("samples_watched", f"{sum(r.num_samples for r in records):,}"),
        ("broken_rounds", str(verdicts.count("broken"))),
        ("collapse_rounds", str(verdicts.count("collapse"))),
        ("lowest_p", format_p(lowest / float(np.log10(2)))),
        ("cost", f"{seconds * 1e3:.0f} ms"),
    ]


def _table_rows(
    records: Sequence[RoundRecord], log: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    rewards = {row["step"]: row.get("reward") for row in log}
    order = {id(record): number for number, record in enumerate(records)}
    alarms = evenly([r for r in records if r.alarm], MAX_ROWS // 2)
    others = evenly([r for r in records if not r.alarm], MAX_ROWS - len(alarms))
    return [
        {
            "order": order[id(r)],
            "name": f"{r.phase} {r.step}.{r.number}",
            "verdict": r.verdict,
            "cells": [
                r.log10_p,
                r.shared_bits,
                *(r.metrics.get(name) for name in METRIC_COLUMNS.values()),
                rewards.get(time_of(r)) if r.phase == "train" else None,
                r.num_samples,
            ],
        }
        for r in sorted([*alarms, *others], key=lambda r: order[id(r)])
    ]


def vars_of(group: WorstGroup) -> dict[str, Any]:
    return {name: getattr(group, name) for name in group.__dataclass_fields__}


def _is_long(group: WorstGroup) -> bool:
    return any(len(c.shared) + len(c.rest) > LONG_TEXT for c in group.completions)


def _rounded(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    return [[x, float(f"{y:.5g}")] for x, y in points]
