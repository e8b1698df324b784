"""One sample of a round: ms-swift's, with the fields that we add, from its row to its loss.

ms-swift's trainer makes its samples by `sample_cls` (rlhf_trainers/base_rollout_mixin.py). The
others that a sample meets: `SampleId` names it, `wire.Completion` is what an engine gave,
`record.tables.SampleRow` what is kept of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from swift.rl_core.data import GRPOSample

from swift_grpo_ext.rollout.wire import Prompt
from swift_grpo_ext.sampling.seeding import SampleId


@dataclass
class RolloutSample(GRPOSample):
    """A sample of the trainer. What is not there yet raises AttributeError."""

    sample_id: SampleId = field(init=False, repr=False, compare=False)
    """Its name, from its position in the generation batch; before the rollout."""

    prompt_hash: str = field(init=False, repr=False, compare=False)
    """Identifies its prompt, media included; before the rollout."""

    rollout_prompts: list[Prompt] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    """The prompt of each turn that was answered, as the engine saw it; with the answers."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> RolloutSample:
        """Return the sample of a data row. A column that is called as a field of ours stays a
        column: reward functions ask for it."""
        upstream = GRPOSample.from_row(dict(row))
        return cls(**{each.name: getattr(upstream, each.name) for each in fields(upstream)})
