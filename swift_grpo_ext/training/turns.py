"""Conversations in the training keep their turns here, from each rollout to the last output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from swift.infer_engine.protocol import RolloutInferRequest

from swift_grpo_ext.rollout.conversation import (
    Conversation,
    Turn,
    first_prompt,
    take_packed,
    turn_of,
)
from swift_grpo_ext.rollout.generate import give_to_scheduler
from swift_grpo_ext.rollout.scheduler import between_turns
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.stops.templates import record_stop_reason

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutOutput
    from swift.rl_core.data import OnPolicySample
    from swift.template import Template

    from swift_grpo_ext.rollout.sample import RolloutSample


class Conversations:
    """Holds those of the round that is being generated, by their samples.

    Args:
        template: the training's.
        has_scheduler: reads the outputs, in the training.
    """

    def __init__(self, template: Template, *, has_scheduler: bool) -> None:
        self._template, self._has_scheduler = template, has_scheduler
        self._by_sample = defaultdict[SampleId, Conversation](Conversation)

    def note(
        self,
        samples: Sequence[OnPolicySample | RolloutInferRequest],
        outputs: Sequence[RolloutOutput],
        sample_ids: Sequence[SampleId],
        prompts: Sequence[str],
        seconds: float,
    ) -> None:
        """Note a turn of each sample, which the scheduler is about to read.

        Args:
            samples: ms-swift's, or the requests of a later turn.
            prompts: hashes of the prompts.
            seconds: that the engine took.
        """
        named = zip(samples, outputs, sample_ids, prompts, strict=True)
        for sample, output, sample_id, prompt in named:
            record_stop_reason(output)
            turn = turn_of(output, sample_id, prompt, engine_seconds=seconds)
            if self._has_scheduler:
                give_to_scheduler(output, self._template, sample.tools)
            if isinstance(sample, RolloutInferRequest):
                turn = replace(turn, tool_seconds=between_turns(sample).tool_seconds)
            self._by_sample[replace(sample_id, turn=0)].note(sample, turn)

    def take(
        self, samples: Sequence[RolloutSample], outputs: Sequence[RolloutOutput]
    ) -> list[list[Turn]]:
        """Return the turns behind each output, and forget them."""
        for output in outputs:
            record_stop_reason(output)  # a conversation's last
        pairs = zip(samples, outputs, strict=False)  # none come with --async_generate
        return [self._by_sample.pop(sample.sample_id).turns for sample, _ in pairs]


def servers_turns(
    samples: Sequence[RolloutSample], outputs: Sequence[RolloutOutput], run_seed: int | None
) -> list[list[Turn]]:
    """Return the turns behind each output of a server that leads conversations, as far as they are
    known: it may have led them without us, and made several outputs of one."""
    turns = [take_packed(record_stop_reason(output), run_seed) for output in outputs]
    if len(samples) == len(outputs):
        for own, sample, output in zip(turns, samples, outputs, strict=True):
            if not own:  # a server without us
                own.append(turn_of(output, sample.sample_id, sample.prompt_hash))
            # The server has images by their content, the training by name.
            messages, media = first_prompt(sample)
            is_asked = messages == own[0].messages  # an environment asks its own
            fingerprint = sample.prompt_hash if is_asked else own[0].fingerprint
            own[0] = replace(own[0], media=media, fingerprint=fingerprint)
    return turns


def give_turns(sample: RolloutSample, turns: Sequence[Turn], *, is_conversation: bool) -> None:
    """Give a sample the prompts of its turns that were answered and, of a conversation, the last
    one's seed and replica."""
    answered = [turn for turn in turns if turn.is_answered]
    sample.rollout_prompts = [turn.prompt for turn in answered]
    if is_conversation and answered:
        last = answered[-1].completion
        own = {"seed": last.seed, "replica": last.replica}
        sample.rollout_infos = {**(sample.rollout_infos or {}), **own}
