"""Writes alarms in English and Chinese, for the log and the run's page. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from swift_grpo_ext.diversity.collision import format_p
from swift_grpo_ext.record.tables import DiversityRow
from swift_grpo_ext.sampling.seeding import SampleId

ENGLISH, CHINESE = LANGUAGES = (0, 1)
MAX_NAMED_ORIGINS = 4


@cache
def read_words() -> dict[str, list[str]]:
    """Return all words by key as [English, Chinese]."""
    path = Path(__file__).with_name("words.json")
    words: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return words


def alarm_line(record: DiversityRow, num_collapsed: int) -> str:
    """Return one line for the log: verdict, round (the last of `num_collapsed`), cause, remedy, and
    samples that share noise."""
    words = read_words()
    name, remedy = words[record.verdict][ENGLISH], words[record.remedy][ENGLISH]
    cause = f"{describe_cause(record, ENGLISH)} {remedy}"
    if record.verdict != "broken":
        return f"diversity: {name} in {record.round}, {num_collapsed} rounds in a row: {cause}"
    # The most improbable collision; the page describes all that the record holds.
    collision = describe_collision(record.collisions[0], ENGLISH)
    more = f" And {len(record.collisions) - 1} more." if len(record.collisions) > 1 else ""
    return f"diversity: {name} in {record.round}: {cause} {collision}{more}"


def describe_cause(record: DiversityRow, language: int) -> str:
    """Return why the round is an alarm, with its figures."""
    return read_words()[f"cause_{record.verdict}"][language].format(
        p=format_p(record.log10_p),
        copied=record.metrics["copied_ratio"],
        common_mode=record.metrics["common_mode"],
    )


def describe_collision(collision: dict[str, Any], language: int) -> str:
    """Return a sentence about samples that share a prefix (of `DiversityRow.collisions`)."""
    earlier = collision["earlier"][-1:]
    return read_words()[f"collision_{collision['kind']}"][language].format(
        samples=_name(collision["samples"], collision["num_samples"], language),
        num_tokens=collision["num_tokens"],
        bits=collision["bits"],
        earlier=_name(earlier, len(earlier), language),
        round="".join(str(SampleId(**origin["sample_id"]).round) for origin in earlier),
    )


def _name(origins: Sequence[dict[str, Any]], num_origins: int, language: int) -> str:
    """Return samples by group, rank, replica and seed, as far as the last two are known."""
    words, named = read_words(), []
    for origin in origins[:MAX_NAMED_ORIGINS]:
        sample_id, replica, seed = origin["sample_id"], origin["replica"], origin["seed"]
        turn = f" turn {sample_id['turn']}" if sample_id["turn"] else ""
        engine = f", replica {replica!r}" if replica else ""
        engine += "" if seed is None else f", seed {seed}"
        values = {**sample_id, "turn": turn, "rank": origin["rank"], "engine": engine}
        named.append(words["origin"][language].format(**values))
    num_more = num_origins - len(named)
    more = words["more_origins"][language].format(number=num_more) if num_more else ""
    return ", ".join(named) + more
