"""A reward that favours one answer for every picture, so that the policy collapses."""

from __future__ import annotations

from typing import Any

from swift.rewards import ORM, orms


class Favour(ORM):
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [float("7" in completion) for completion in completions]


orms["favour"] = Favour
