"""What a run's page says about its diversity: the verdict, the alarms, and the worst groups. Pure.

Its source is `diversity.jsonl`; the worst groups' completions come from the run's record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift_grpo_ext.diversity import alarms
from swift_grpo_ext.diversity.record import RoundRecord
from swift_grpo_ext.record.reader import RoundName
from swift_grpo_ext.tools.view.group import RunView

MAX_ALARMS = 50
MAX_GROUPS, MAX_GROUPS_OF_ROUND = 6, 2
MAX_COMPLETIONS = 16
"""Of a worst group, equal ones counted once."""

VERDICTS = ("broken", "collapse", "unknown", "healthy")
"""The worst first."""


def overall_verdict(records: Sequence[RoundRecord]) -> str:
    """Return the worst verdict that rose an alarm, or `unknown`; `none` without rounds."""
    alarming = {r.verdict for r in records if r.alarm}
    alarming |= {"unknown" for r in records if r.verdict == "unknown"}
    return next((v for v in VERDICTS if v in alarming), "healthy" if records else "none")


def alarm_spans(records: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Return the steps of training with an alarm, rounds in a row together, for charts to shade."""
    return [
        {"first": streak[0].steps_done, "last": streak[-1].steps_done, "kind": streak[0].verdict}
        for streak in alarms.alarm_streaks(records)
        if streak[0].phase == "train"
    ]


def list_alarms(records: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Return the alarms, rounds in a row as one, with causes as (English, Chinese)."""
    listed = []
    for streak in alarms.alarm_streaks(records)[:MAX_ALARMS]:
        first, last = streak[0], streak[-1]
        is_broken = first.verdict == "broken"
        # The most improbable round tells most of broken randomness, the last one of a collapse.
        told = min(streak, key=lambda r: r.log10_p) if is_broken else last
        listed.append(
            {
                "kind": first.verdict,
                "first": first.round_name,
                "last": f"{last.step}.{last.number}",
                "num_rounds": len(streak),
                "remedy": told.remedy,
                "cause": [alarms.describe_cause(told, lang) for lang in alarms.LANGUAGES],
                "collisions": [
                    [alarms.describe_collision(collision, lang) for lang in alarms.LANGUAGES]
                    for collision in (told.collisions if is_broken else ())
                ],
            }
        )
    return listed


def worst_groups(run: RunView, records: Sequence[RoundRecord]) -> list[dict[str, Any]]:
    """Return groups of the worst rounds, alarms first, as `RunView.group` has them, each with its
    `verdict`. Frozen noise stands beside what it repeats; equal completions stand once, with all
    their indices. Groups that the record has lost are left out."""

    def badness(record: RoundRecord) -> tuple[Any, ...]:
        unique_ratio = record.metrics.get("unique_ratio", 1.0)
        verdict = VERDICTS.index(record.verdict)
        return verdict, record.alarm is None, record.log10_p, unique_ratio, record.step

    ranked = sorted(records, key=badness)
    wanted = [(r, group) for r in ranked for group in r.worst_groups[:MAX_GROUPS_OF_ROUND]]
    shown = []
    for record, number in wanted[:MAX_GROUPS]:
        earlier = []
        for collision in record.collisions:
            if any(origin["sample_id"]["group"] == number for origin in collision["samples"]):
                for origin in collision["earlier"][-1:]:
                    place = origin["sample_id"]
                    name = RoundName(place["phase"], place["step"], place["number"])
                    earlier.append((name, place["group"], place["index"]))
        try:
            group = run.group(RoundName(record.phase, record.step, record.number), number, earlier)
        except KeyError:
            continue
        equal: dict[tuple[Any, ...], dict[str, Any]] = {}
        for sample in sorted(group["samples"], key=lambda s: s["token_ids"]):
            key = (*sample["token_ids"], sample["is_earlier"])
            equal.setdefault(key, {**sample, "indices": []})["indices"].append(sample["index"])
        completions = list(equal.values())
        group["samples"] = completions[:MAX_COMPLETIONS]
        group["num_more"] = len(completions) - len(group["samples"])
        shown.append({**group, "verdict": record.verdict})
    return shown
