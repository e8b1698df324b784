"""A plugin for tests: rewards that depend on a sample's place in its group, or on its end."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms
from swift.rewards.orm import CosineReward

from swift_grpo_ext.sampling.seeding import SampleId


class Position(ORM):
    """Rewards differ within a group, whatever the policy answers."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float(i) for i in range(len(completions))]


class Name(ORM):
    """Depends on a sample's name; each group has its own mean and spread."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        ids = map(SampleId.parse, request_id)
        return [float(i.index**2 * (1 + i.group) + i.step) for i in ids]


class OddGroups(ORM):
    """Rewards differ in odd groups; dynamic sampling drops the even ones."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        return [float(i.group % 2 * i.index) for i in map(SampleId.parse, request_id)]


class Silent(ORM):
    """Gives even groups no reward."""

    def __call__(
        self, completions: list[str], request_id: list[str], **_: Any
    ) -> list[float | None]:
        return [0.25 if i.group % 2 else None for i in map(SampleId.parse, request_id)]


class Stopped(ORM):
    """1 where a stop ended the completion; records the arguments that it gets."""

    def __call__(
        self,
        completions: list[str],
        rollout_infos: list[dict[str, Any]],
        response_token_ids: list[Any],
        is_truncated: list[bool],
        **_: Any,
    ) -> list[float]:
        reasons = [infos["stop_reason"] for infos in rollout_infos]
        lines = zip(completions, reasons, response_token_ids, is_truncated, strict=True)
        with (Path(os.environ["RECORD_DIR"]) / "rewards.jsonl").open("a", encoding="utf-8") as f:
            f.writelines(json.dumps(one, ensure_ascii=False) + "\n" for one in lines)
        return [float(reason is not None) for reason in reasons]


class CosineOfDigits(CosineReward):
    """ms-swift's, with the digit's accuracy: its judge of mathematics is not installed here."""

    def __init__(self, args: Any = None) -> None:
        super().__init__(args, accuracy_orm=orms["digit_accuracy"]())


orms.update(position=Position, name=Name, odd_groups=OddGroups, silent=Silent, stopped=Stopped)
orms["cosine"] = CosineOfDigits
