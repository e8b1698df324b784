"""The words of alarms, in English and Chinese, for the log and the run's page. Pure.

`words.json` holds all words as [English, Chinese].
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from swift_grpo_ext.diversity.collision import format_p
from swift_grpo_ext.diversity.record import RoundRecord, round_name

ENGLISH, CHINESE = LANGUAGES = (0, 1)
LOW_32_BITS = 2**32
MAX_LINE_COLLISIONS = 2
"""Named in the log; the page names all that the record holds."""

MAX_NAMED_ORIGINS = 4


@cache
def read_words() -> dict[str, list[str]]:
    """Return all words by key as [English, Chinese]."""
    path = Path(__file__).with_name("words.json")
    words: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return words


def alarm_line(record: RoundRecord, num_rounds: int) -> str:
    """Write one line for the log: verdict, round, cause, remedy, and who is concerned.

    Args:
        record: the round's, with its remedy.
        num_rounds: collapsed rounds in a row; not read for broken randomness.
    """
    in_a_row = f", {num_rounds} rounds in a row" if record.verdict == "collapse" else ""
    named = record.collisions[:MAX_LINE_COLLISIONS] if record.verdict == "broken" else []
    words = [
        f"diversity: {read_words()[record.verdict][ENGLISH]} in {record.round_name}{in_a_row}:",
        describe_cause(record, ENGLISH),
        read_words()[record.remedy][ENGLISH],
        *(describe_collision(collision, ENGLISH) for collision in named),
    ]
    num_more = len(record.collisions) - len(named) if named else 0
    return " ".join([*words, f"And {num_more} more." if num_more else ""]).strip()


def describe_cause(record: RoundRecord, language: int) -> str:
    """Say why the round is an alarm, with its figures."""
    return read_words()[f"cause_{record.verdict}"][language].format(
        p=format_p(record.log10_p),
        copied=record.metrics["copied_ratio"],
        common_mode=record.metrics["common_mode"],
    )


def describe_collision(collision: dict[str, Any], language: int) -> str:
    """Say who shares what (an entry of `RoundRecord.collisions`)."""
    earlier = collision["earlier"][-1:]
    return read_words()[f"collision_{collision['kind']}"][language].format(
        samples=_name(collision["samples"], collision["num_samples"], language),
        num_tokens=collision["num_tokens"],
        bits=collision["bits"],
        seeds=_describe_seeds(collision["samples"], language),
        earlier=_name(earlier, len(earlier), language),
        round="".join(round_name(o["sample_id"]) for o in earlier),
    )


def _name(origins: Sequence[dict[str, Any]], num_origins: int, language: int) -> str:
    """Name samples by group, rank and replica."""
    words, named = read_words(), []
    for origin in origins[:MAX_NAMED_ORIGINS]:
        sample_id, replica = origin["sample_id"], origin["replica"]
        turn = f" turn {sample_id['turn']}" if sample_id["turn"] else ""
        engine = f", replica {replica!r}" if replica else ""
        values = {**sample_id, "turn": turn, "rank": origin["rank"], "engine": engine}
        named.append(words["origin"][language].format(**values))
    num_more = num_origins - len(named)
    more = words["more_origins"][language].format(number=num_more) if num_more else ""
    return ", ".join(named) + more


def _describe_seeds(origins: Sequence[dict[str, Any]], language: int) -> str:
    seeds = {origin["seed"] for origin in origins}
    if None in seeds:
        return read_words()["seeds_engine"][language]
    low_bits = {seed % LOW_32_BITS for seed in seeds}
    equal = "seeds_equal" if len(seeds) == 1 else "seeds_low_bits"
    key = equal if len(low_bits) == 1 else "seeds_differ"
    return read_words()[key][language].format(seed=min(seeds), low_bits=min(low_bits))


def remedy_of(record: RoundRecord, seed_mode: str) -> str:
    """Return the key of the remedy.

    Args:
        record: a round with an alarm.
        seed_mode: `--rollout_seed_mode`.
    """
    if record.verdict == "collapse":
        return "remedy_collapse"
    if seed_mode != "sample":
        return "remedy_seed_mode"
    shared = [c["samples"] for c in record.collisions if c["kind"] == "shared"]
    if any(len({origin["seed"] for origin in samples}) == 1 for samples in shared):
        return "remedy_equal_seeds"
    return "remedy_ignored_seeds"


def alarm_streaks(records: Sequence[RoundRecord]) -> list[list[RoundRecord]]:
    """Return rounds in a row of one phase and verdict, training first; those without any alarm are
    left out. A collapse so begins with the rounds that the analyzer's patience waited for."""
    by_phase = sorted(records, key=lambda r: r.phase == "eval")
    streaks = (list(s) for _, s in groupby(by_phase, key=lambda r: (r.phase, r.verdict)))
    return [streak for streak in streaks if any(record.alarm for record in streak)]
