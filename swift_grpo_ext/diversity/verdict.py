"""What a round looks like: healthy, a collapsed policy, or broken randomness. Pure.

- `broken`: samples share prefixes that independent noise would not give them (`collision`). It says
  nothing about the policy.
- `collapse`: the noise is sound as far as the test can see, and yet the policy gives one
  completion: the same one to nearly all prompts (`common_mode`), or to each prompt its own without
  exception (`copied_ratio`), so that groups have no advantage to learn from. Short answers that are
  right come close to the second; where the reward is high, it is success.
- `unknown`: it looks like a collapse, and the noise could not be tested.
- `healthy`: anything else, duplicates included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from swift_grpo_ext.diversity.collision import CollisionTest
from swift_grpo_ext.diversity.drawn import Group
from swift_grpo_ext.diversity.metrics import common_mode, copied_ratio

Kind = Literal["healthy", "collapse", "broken", "unknown"]

COMMON_MODE = 0.9
"""`common_mode` from which on a round looks collapsed, if also half of the samples are copies."""

COPIED = 0.98
"""`copied_ratio` from which on it does in any case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Of one round."""

    kind: Kind
    test: CollisionTest


def judge(groups: Sequence[Group], test: CollisionTest, alarm_p: float) -> Verdict:
    """The verdict on a round.

    Args:
        groups: of the round.
        test: of the same samples; one that was not made for greedy decoding.
        alarm_p: probability of calling a round of independent samples broken, at most.
    """
    if test.log2_p < np.log2(alarm_p):
        kind: Kind = "broken"
    elif not looks_collapsed(groups):
        kind = "healthy"
    else:
        kind = "collapse" if test.is_tested else "unknown"
    return Verdict(kind=kind, test=test)


def looks_collapsed(groups: Sequence[Group]) -> bool:
    copied = copied_ratio(groups)
    return copied >= COPIED or (copied >= 0.5 and common_mode(groups) >= COMMON_MODE)
