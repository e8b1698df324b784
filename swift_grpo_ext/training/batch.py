"""The training batch: what the rollout saw and generated, held against what training sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from swift.infer_engine.protocol import RequestConfig
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch, encode_sample
from swift.trainers import disable_gradient_checkpointing
from swift.utils import get_logger

from swift_grpo_ext.media.encode import before_collating
from swift_grpo_ext.rollout.placeholders import placeholder_ids
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.training.agreement import (
    DisagreementError,
    Gap,
    check_counts,
    check_prompt,
    gap_limit,
    with_cut_prompt,
    with_text_of,
)
from swift_grpo_ext.upstream.encoding import only_sampled_tokens

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch, GRPOSample
    from swift.template import Template

    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

logger = get_logger()

DROPOUTS = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "dropout_p")
"""Attributes from which transformers' layers call functional dropout."""

WHOLE: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "structured_outputs_regex": (None, ""),
}
"""Values of ms-swift's flags with which rollouts come from the whole distribution, as in training.
None leaves the choice to the model's own generation settings."""


def check_counts_of(samples: Sequence[GRPOSample]) -> None:
    """Raise `DisagreementError` for a sample that lacks a log-probability for a token (M6)."""
    for sample in samples:
        check_counts(_name(sample), trained_ids(sample), logprobs_of(sample))


@contextmanager
def rollouts_own_prompts(template: Template, samples: Sequence[GRPOSample]) -> Iterator[None]:
    """Let what `template` collates have the line breaks of the prompts that rollouts saw, and the
    text that `--max_length` left of them.

    Args:
        template: of ms-swift; changed within the block only. Enter the block before the one in
            which ms-swift takes its `max_length` away.
        samples: those that are encoded and collated there.
    """
    placeholders, max_length = placeholder_ids(template), template.max_length

    def change(batch: list[dict[str, Any]]) -> None:
        prompts = {
            id(sample.encoded): getattr(sample, "rollout_prompt_ids", None)
            for sample in samples
            if _num_turns(sample) == 1
        }
        for encoded in batch:
            prompt = prompts.get(id(encoded))
            if not prompt:
                continue
            if was_cut(prompt, max_length) and (
                cut := with_cut_prompt(prompt, encoded, placeholders)
            ):
                encoded.update(cut)
                continue
            changed = with_text_of(prompt, encoded, placeholders, template.tokenizer.decode)
            encoded.update(changed)
            if changed:
                logger.info_once(
                    "ms-swift's template writes other line breaks beside media for training than "
                    "for vLLM, or vLLM merges them (docs/support.md): training has those that the "
                    "rollout saw.",
                    hash_id="line_breaks",
                )

    with before_collating(template, change):
        yield


def check_training_batch(
    samples: Sequence[GRPOSample], batch: GRPOBatch, args: RolloutGRPOConfig, template: Template
) -> None:
    """Raise `DisagreementError` where training sees other prompts (M3) or tokens (M6).

    `--rollout_mismatch warn` makes a warning of the first, once for each process.

    Args:
        samples: ms-swift's, encoded for training.
        batch: the `GRPOBatch` that was made of them.
        args: of the training.
        template: of the training; its `max_length` is that of rollouts.
    """
    placeholders = placeholder_ids(template)
    for sample in samples:
        prompt_ids = getattr(sample, "rollout_prompt_ids", None) or ()
        try:
            check_prompt_of(sample, template, placeholders, _remedy(args, template, prompt_ids))
        except DisagreementError as e:
            if args.rollout_mismatch == "stop":
                raise
            logger.warning_once(
                f"{e} Training goes on (--rollout_mismatch warn); its log-probabilities are of "
                "its own prompt, and rollout_gap says how far they lie apart. (Said once.)",
                hash_id="rollout_mismatch",
            )
    _check_alignment(samples, batch)


def check_prompt_of(
    sample: GRPOSample, template: Template, placeholders: Sequence[int], remedy: str = ""
) -> None:
    """Check the prompt of an encoded sample that knows what its rollout saw."""
    prompt_ids = getattr(sample, "rollout_prompt_ids", None)
    # A conversation of several turns has its prompt checked by its own scheduler.
    if prompt_ids and _num_turns(sample) == 1:
        training_ids = torch.as_tensor(sample.encoded["input_ids"]).flatten().tolist()
        decode = template.tokenizer.decode
        check_prompt(_name(sample), prompt_ids, training_ids, remedy, placeholders, decode)


def was_cut(prompt_ids: Sequence[int], max_length: int | None) -> bool:
    """Return whether `--max_length`, for which a medium is one token, may have cut a prompt."""
    return max_length is not None and 0 < max_length <= len(prompt_ids)


def _remedy(args: RolloutGRPOConfig, template: Template, prompt_ids: Sequence[int]) -> str:
    if was_cut(prompt_ids, template.max_length):
        return (
            f"Rollouts cut prompts to --max_length {template.max_length} (--truncation_strategy "
            f"{template.truncation_strategy}), and training cannot be given what was left of this "
            "one: no text is left between two media, or vLLM writes them otherwise than training "
            "does. Raise the first, or have such prompts replaced with --truncation_strategy "
            "delete."
        )
    settings = (
        "Give `swift rollout` the settings of the training: --template, --system, --max_length, "
        "MAX_PIXELS and the like. "
        if args.vllm_mode == "server"
        else ""
    )
    return (
        f"{settings}Where ms-swift's template writes another prompt for vLLM than for training "
        "(docs/support.md), --rollout_mismatch warn trains on its prompt all the same."
    )


class RolloutGap:
    """The gap between log-probabilities at rollout and in training over all ranks (M5).

    Args:
        args: of the training.
    """

    def __init__(self, args: RolloutGRPOConfig, ranks: RankGroup) -> None:
        # ms-swift 4.4 has no `min_p`, though TRL's arguments below its own do.
        asked = [name for name in WHOLE if hasattr(RequestConfig(), name)]
        shifted = [name for name in asked if getattr(args, name) not in WHOLE[name]]
        # Rollouts come from another distribution, or from the weights of a step before.
        self._is_expected = bool(shifted or args.async_generate)
        self._is_mixed = bool(args.bf16 or args.fp16)
        self._temperature = args.temperature
        self._ranks = ranks
        self._has_warned = False

    def measure(self, batches: Sequence[Any], dtype: torch.dtype, step: int) -> dict[str, float]:
        """Return metrics by name; none where there were no log-probabilities of rollouts.

        Args:
            batches: this rank's `GRPOBatch`es of a round.
            dtype: of the model that is trained.
            step: the optimizer step, for the warning.
        """
        gap = sum(self._ranks.all_gather(sum(map(gap_of, batches), Gap())), Gap())
        if not gap.count:
            return {}
        # Under autocast, models of 32 bits compute in 16.
        bits = 16 if self._is_mixed else torch.finfo(dtype).bits
        limit = gap_limit(bits, self._temperature)
        is_wide = isnan(gap.mean) or (gap.mean > limit and not self._is_expected)
        if is_wide and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"Step {step}: log-probabilities of the rollout and of training lie "
                f"{gap.mean:.3g} nats apart in the mean ({gap.largest:.3g} at most, {gap.count} "
                f"tokens), above the {limit:g} that rounding explains: rollouts and training do "
                "not see the same weights or prompts, or use numbers of other precision "
                "(quantization, --vllm_engine_kwargs). (Said once.)"
            )
        return {"rollout_gap/mean": gap.mean, "rollout_gap/max": gap.largest}


class ZeroGradientWarning:
    """Warns once where rewards differ within groups, and yet no gradient flows.

    Where rewards differ, advantages are not 0, and neither is their gradient. Broken weights or a
    cut graph may show in nothing else.

    Args:
        args: of the training.
    """

    def __init__(self, args: RolloutGRPOConfig) -> None:
        masks = (
            args.overlong_filter
            or args.off_policy_sequence_mask_delta is not None
            or "mask" in (args.rollout_importance_sampling_mode or "")
        )
        # Masks and clipped ratios may leave nothing to learn from; so may a part of a round.
        is_whole = args.gradient_accumulation_steps % args.steps_per_generation == 0
        self._is_certain = is_whole and args.num_iterations == 1 and not masks
        self._has_warned = False

    def check(self, grad_norm: float | None, zero_std: Sequence[float], step: int) -> None:
        """Look at the last step.

        Args:
            grad_norm: its gradient norm; None where it was not computed.
            zero_std: of each round since the last call, the share of groups with equal rewards.
            step: its number, for the warning.
        """
        if grad_norm != 0 or not self._is_certain or self._has_warned:
            return
        if zero_std and zero_std[-1] < 1:
            self._has_warned = True
            logger.warning(
                f"Step {step}: the gradient norm is 0, though rewards differ in "
                f"{1 - zero_std[-1]:.0%} of the groups: the model does not learn. Expected: above "
                "0. Look at the model's weights, at what is frozen (--freeze_parameters, "
                "--target_modules), and at the sharding (--deepspeed, --fsdp). (Said once.)"
            )


def switch_off_dropout(model: torch.nn.Module) -> int:
    """Set every dropout of a model to 0; returns how many there were.

    Ratios of importance sampling compare two passes over the same tokens. Dropout draws a mask for
    each, so that they differ at equal weights (PPO's ratio, arXiv:1707.06347, is 1 there).
    """
    count = 0
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            count += module.p > 0
            module.p = 0.0
            continue
        for name in DROPOUTS:
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                count += 1
                setattr(module, name, 0.0)
    return count


def gap_of(batch: GRPOBatch) -> Gap:
    """Compare a `GRPOBatch`'s log-probabilities at rollout and in training, if it has both."""
    rollout, training = batch.rollout_per_token_logps, batch.old_per_token_logps
    if rollout is None or training is None:
        return Gap()
    return gap_between(rollout, training, batch.completion_mask.bool())


def gap_between(rollout: torch.Tensor, training: torch.Tensor, mask: torch.Tensor) -> Gap:
    """Compare log-probabilities, in nats, where `mask` is true; all three have one shape."""
    difference = (training - rollout).abs()[mask].float()
    if not difference.numel():
        return Gap()
    return Gap(float(difference.sum()), difference.numel(), float(difference.max()))


def _check_alignment(samples: Sequence[GRPOSample], batch: GRPOBatch) -> None:
    """Refuse counts that disagree, where ms-swift drops all log-probabilities of a batch (M6)."""
    if batch.rollout_per_token_logps is not None or not all(map(logprobs_of, samples)):
        return
    for sample, mask in zip(samples, batch.completion_mask, strict=True):
        count, num_sampled = int(mask.sum()), len(logprobs_of(sample))
        if num_sampled not in (count, count + 1):
            raise DisagreementError(
                f"{_name(sample)}: {num_sampled} tokens were sampled, and {count} would "
                "be trained on. The template has to keep a completion's tokens as they are."
            )


def _name(sample: GRPOSample) -> str:
    return str(sample.sample_id)


def logprobs_of(sample: GRPOSample) -> list[float]:
    return list(_flatten(sample.rollout_logprobs))


def trained_ids(sample: GRPOSample) -> list[int]:
    """Return the tokens that were sampled, without those that an environment put in between."""
    ids = list(_flatten(sample.response_token_ids))
    mask = list(_flatten(sample.response_loss_mask))
    return [i for i, is_own in zip(ids, mask, strict=True) if is_own] if mask else ids


def _num_turns(sample: GRPOSample) -> int:
    ids = sample.response_token_ids
    return len(ids) if ids and isinstance(ids[0], (list, tuple)) else 1


def _flatten(values: Any) -> Iterator[Any]:
    """Yield the values of ms-swift's lists for each turn, and of single turns without lists."""
    return chain.from_iterable(v if isinstance(v, (list, tuple)) else [v] for v in values or ())


# --- generated samples against the trainer's own model ---

Encoded = tuple[dict[str, Any], "GRPOBatch"]
"""A model's inputs, and the batch that they are of."""


def encoded_batch(trainer: RolloutGRPOTrainer, samples: Sequence[GRPOSample]) -> Encoded:
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
    trainer: RolloutGRPOTrainer, samples: Sequence[GRPOSample], encoded: Encoded
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
    trainer: RolloutGRPOTrainer, samples: Sequence[GRPOSample], encoded: Encoded
) -> list[tuple[float, int] | None]:
    """Return `sample_gaps` as means in nats and numbers of tokens, as the canary judges them."""
    gaps = sample_gaps(trainer, samples, encoded)
    return [None if gap is None else (gap.mean, gap.count) for gap in gaps]


def sample_gap(trainer: RolloutGRPOTrainer, sample: GRPOSample) -> Gap:
    """Return the gap of one generated sample, without a token where it cannot be compared."""
    return sample_gaps(trainer, [sample], encoded_batch(trainer, [sample]))[0] or Gap()
