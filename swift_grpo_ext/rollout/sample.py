"""One sample of a round: ms-swift's, with the fields that we add, from its row to its loss.

ms-swift's trainer makes its samples by `sample_cls` (rlhf_trainers/base_rollout_mixin.py). The
others that a sample meets: `SampleId` names it, `wire.Completion` is what an engine gave,
`record.tables.SampleRow` what is kept of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from swift.rl_core.data import GKDSample, GRPOSample, OnPolicySample
from typing_extensions import Self

from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.upstream.rows import TEACHER_IMAGES


@dataclass
class RolloutFields:
    """These are the fields that we add to a sample. What is not there yet raises AttributeError."""

    upstream: ClassVar[type[OnPolicySample]]

    sample_id: SampleId = field(init=False, repr=False, compare=False)
    """Its name, from its position in the generation batch; before the rollout."""

    prompt_hash: str = field(init=False, repr=False, compare=False)
    """Identifies its prompt, media included; before the rollout."""

    rollout_prompts: list[Prompt] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """The prompt of each turn that was answered, as the engine saw it; with the answers."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the sample of a data row. A column that is called as a field of ours stays a
        column: reward functions ask for it."""
        made = cls.upstream.from_row(dict(row))
        return cls(**{each.name: getattr(made, each.name) for each in fields(made)})

    def to_teacher_template_dict(self) -> dict[str, Any]:
        # Under their own name too: errors name a teacher's images by it (`read_row`).
        view = self.upstream.to_teacher_template_dict(self)
        return {**view, TEACHER_IMAGES: self.teacher_images}  # type: ignore[attr-defined]


@dataclass
class RolloutSample(RolloutFields, GRPOSample):
    """A sample of the trainer, of GRPO's."""

    upstream = GRPOSample


@dataclass
class RolloutGKDSample(RolloutFields, GKDSample):
    """A sample of the trainer that distills."""

    upstream = GKDSample
