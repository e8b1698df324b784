"""One sample of a round: ms-swift's, with the fields that we add, from its row to its loss.

ms-swift's trainer makes its samples with `sample_cls` (rlhf_trainers/base_rollout_mixin.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.rl_core.data import GKDSample, GRPOSample, OnPolicySample

from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.upstream.rows import TEACHER_IMAGES


class RolloutFields(OnPolicySample):
    """Adds fields to ms-swift's sample; one without a value yet raises AttributeError. They are no
    fields of the dataclass: ms-swift would take columns of these names from reward functions."""

    sample_id: SampleId  # from its position in the generation batch; known before the rollout
    prompt_hash: str  # of its prompt, media included; known before the rollout
    rollout_prompts: Sequence[Prompt] = ()  # of each turn that was answered, as the engine saw it

    def set_id(self, sample_id: SampleId) -> None:
        """Name the sample; ms-swift's names follow."""
        self.sample_id = sample_id
        self.request_id, self.prompt_id = sample_id.request_id, sample_id.prompt_id

    def to_teacher_template_dict(self) -> dict[str, Any]:
        # Under their own name too: errors name a teacher's images by it (`read_row`).
        return {**super().to_teacher_template_dict(), TEACHER_IMAGES: self.teacher_images}


class RolloutSample(RolloutFields, GRPOSample):
    """A sample of GRPO's trainer."""


class RolloutGKDSample(RolloutFields, GKDSample):
    """A sample of the trainer that distills."""
