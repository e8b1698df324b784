"""Samples that engines generated, held against the trainer's own model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch, encode_sample
from swift.trainers import disable_gradient_checkpointing

from swift_grpo_ext.rollout.placeholders import placeholder_ids
from swift_grpo_ext.training.agreement import DisagreementError, Gap
from swift_grpo_ext.training.batch import check_prompt_of, gap_between, rollouts_own_prompts
from swift_grpo_ext.upstream.encoding import only_sampled_tokens

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

Encoded = tuple[dict[str, Any], "GRPOBatch"]
"""A model's inputs, and the batch that they are of."""


def encoded_batch(trainer: RolloutGRPOTrainer, samples: Sequence[OnPolicySample]) -> Encoded:
    """Encode generated samples as ms-swift does for training.

    It leaves what a template made of each sample in its `encoded`.
    """
    template = trainer.template
    sampled = only_sampled_tokens(template, samples)
    # Before the context, in which the template has no `max_length`.
    own_prompts = rollouts_own_prompts(template, samples)
    with own_prompts, trainer._template_context(template), sampled:
        for sample in samples:
            sample.encoded = encode_sample(sample, template)
            sample.encoded.pop("_extra_kwargs", None)
        inputs, batch = collate_to_grpo_micro_batch(
            list(samples), template, device=trainer.accelerator.device, use_logits_to_keep=True
        )
    inputs.pop("labels", None)
    return inputs, batch


def sample_gaps(
    trainer: RolloutGRPOTrainer, samples: Sequence[OnPolicySample], encoded: Encoded
) -> list[Gap | None]:
    """Compare log-probabilities of generated samples with those of the trainer's model, in one
    forward.

    Args:
        encoded: `encoded_batch` of the samples.

    Returns:
        A gap for each sample; None where training sees another prompt, which the round's own check
        names, or where the engine gave no log-probabilities.
    """
    inputs, batch = encoded
    checkpointing = disable_gradient_checkpointing(
        trainer.model, trainer.args.gradient_checkpointing_kwargs
    )
    with torch.no_grad(), checkpointing:
        logps, _ = trainer._get_per_token_logps_and_entropies(trainer.model, inputs, batch)
    of_rollout = batch.rollout_per_token_logps
    if of_rollout is None:
        return [None] * len(samples)
    placeholders = placeholder_ids(trainer.template)
    gaps: list[Gap | None] = []
    for row, sample in enumerate(samples):
        try:
            check_prompt_of(sample, trainer.template, placeholders)
        except DisagreementError:
            gaps.append(None)
            continue
        mask = batch.completion_mask[row].bool()
        gaps.append(gap_between(of_rollout[row], logps[row], mask))
    return gaps


def mean_gaps(
    trainer: RolloutGRPOTrainer, samples: Sequence[OnPolicySample], encoded: Encoded
) -> list[tuple[float, int] | None]:
    """Return `sample_gaps` as means in nats and numbers of tokens, as the canary judges them."""
    gaps = sample_gaps(trainer, samples, encoded)
    return [None if gap is None else (gap.mean, gap.count) for gap in gaps]


def sample_gap(trainer: RolloutGRPOTrainer, sample: OnPolicySample) -> Gap:
    """Return the gap of one generated sample, without a token where it cannot be compared."""
    return sample_gaps(trainer, [sample], encoded_batch(trainer, [sample]))[0] or Gap()
