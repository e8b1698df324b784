"""Extends ms-swift's sample classes with fields.

ms-swift's trainer creates its samples as `sample_cls` (rlhf_trainers/base_rollout_mixin.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.rl_core.data import GKDSample, GRPOSample, OnPolicySample

from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.upstream.rows import TEACHER_IMAGES


class RolloutFields(OnPolicySample):
    """Adds attributes to ms-swift's sample; reading one before it is set raises AttributeError.
    They are not dataclass fields: ms-swift would withhold columns of these names from rewards."""

    sample_id: SampleId  # from its position in the generation batch; set before the rollout
    prompt_hash: str  # includes media; set before the rollout
    rollout_prompts: Sequence[Prompt] = ()  # one for each answered turn, as the engine saw it

    def to_teacher_template_dict(self) -> dict[str, Any]:
        # `read_row` names this column in errors about a teacher's images.
        return {**super().to_teacher_template_dict(), TEACHER_IMAGES: self.teacher_images}


class RolloutSample(RolloutFields, GRPOSample):
    """A sample of the GRPO trainer."""


class RolloutGKDSample(RolloutFields, GKDSample):
    """A sample of the GKD trainer."""
