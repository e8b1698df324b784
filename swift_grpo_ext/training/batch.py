"""The training batch: what the rollout saw and generated, held against what training sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import isnan
from typing import TYPE_CHECKING, Any, TypeAlias

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
    check_prompt,
    gap_limit,
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


def check_counts(samples: Sequence[GRPOSample]) -> None:
    """Raise `DisagreementError` for a sample that lacks a log-probability for a token (M6)."""
    for sample in samples:
        num_tokens, num_logprobs = len(trained_ids(sample)), len(logprobs_of(sample))
        if num_logprobs not in (0, num_tokens):
            raise DisagreementError(
                f"{sample.sample_id}: {num_tokens} sampled tokens and {num_logprobs} "
                "log-probabilities came back from the engine."
            )


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
        prompts = {id(sample.encoded): _checked_prompt(sample) for sample in samples}
        for encoded in batch:
            prompt = prompts.get(id(encoded), ())
            was_cut = is_cut(prompt, max_length)
            changed = with_text_of(
                prompt, encoded, placeholders, template.tokenizer.decode, was_cut=was_cut
            )
            encoded.update(changed)
            if changed and not was_cut:
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
        template: of the training.
    """
    placeholders = placeholder_ids(template)
    remedy = (
        "Where ms-swift's template writes another prompt for vLLM than for training "
        "(docs/support.md), --rollout_mismatch warn trains on its prompt all the same."
    )
    if args.vllm_mode == "server":
        remedy = (
            "Give `swift rollout` the settings of the training: --template, --system, "
            f"--max_length, MAX_PIXELS and the like. {remedy}"
        )
    for sample in samples:
        cause = remedy
        if is_cut(_checked_prompt(sample), template.max_length):
            cause = (
                f"Rollouts cut prompts to --max_length {template.max_length} "
                "(--truncation_strategy left), and training cannot be given what was left of this "
                "one: no text is left between two media, or vLLM writes them otherwise than "
                "training does. Raise the first, or have such prompts replaced with "
                "--truncation_strategy delete."
            )
        try:
            check_prompt_of(sample, template, placeholders, cause)
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
    if prompt_ids := _checked_prompt(sample):
        training_ids = torch.as_tensor(sample.encoded["input_ids"]).flatten().tolist()
        decode = template.tokenizer.decode
        check_prompt(str(sample.sample_id), prompt_ids, training_ids, remedy, placeholders, decode)


def _checked_prompt(sample: GRPOSample) -> Sequence[int]:
    """Return the prompt that a sample's rollout saw; none of a conversation of several turns, whose
    scheduler makes it."""
    turns = sample.response_token_ids
    is_conversation = turns and isinstance(turns[0], (list, tuple)) and len(turns) > 1
    return () if is_conversation else getattr(sample, "rollout_prompt_ids", None) or ()


def is_cut(prompt_ids: Sequence[int], max_length: int | None) -> bool:
    """Return whether `--max_length`, for which a medium is one token, may have cut a prompt."""
    return max_length is not None and 0 < max_length <= len(prompt_ids)


def gap_limit_of(args: RolloutGRPOConfig, dtype: torch.dtype) -> float:
    """Return `gap_limit` of a training with a model of this type."""
    # Under autocast, models of 32 bits compute in 16.
    bits = 16 if args.bf16 or args.fp16 else torch.finfo(dtype).bits
    return gap_limit(bits, args.temperature)


def measure_rollout_gap(
    batches: Sequence[GRPOBatch], args: RolloutGRPOConfig, ranks: RankGroup, limit: float, step: int
) -> dict[str, float]:
    """Measure the gap between log-probabilities at rollout and in training over all ranks (M5).

    Args:
        batches: this rank's of a round.
        limit: the mean gap, in nats, above which is warned once.
        step: the optimizer step, for the warning.

    Returns:
        Metrics by name; none where there were no log-probabilities of rollouts.
    """
    own = Gap()
    for batch in batches:
        rollout, training = batch.rollout_per_token_logps, batch.old_per_token_logps
        if rollout is not None and training is not None:
            own += gap_between(rollout, training, batch.completion_mask.bool())
    gap = sum(ranks.all_gather(own), Gap())
    if not gap.count:
        return {}
    # ms-swift 4.4 has no `min_p`, though TRL's arguments below its own do.
    asked = [name for name in WHOLE if hasattr(RequestConfig(), name)]
    is_shifted = any(getattr(args, name) not in WHOLE[name] for name in asked)
    # Rollouts come from another distribution, or from the weights of a step before.
    is_expected = is_shifted or args.async_generate
    if isnan(gap.mean) or (gap.mean > limit and not is_expected):
        logger.warning_once(
            f"Step {step}: log-probabilities of the rollout and of training lie {gap.mean:.3g} "
            f"nats apart in the mean ({gap.largest:.3g} at most, {gap.count} tokens), above the "
            f"{limit:g} that rounding explains: rollouts and training do not see the same weights "
            "or prompts, or use numbers of other precision (quantization, --vllm_engine_kwargs). "
            "(Said once.)",
            hash_id="rollout_gap",
        )
    return {"rollout_gap/mean": gap.mean, "rollout_gap/max": gap.largest}


def switch_off_dropout(model: torch.nn.Module) -> int:
    """Set every dropout of a model to 0; returns how many there were.

    Ratios of importance sampling compare two passes over the same tokens. Dropout draws a mask for
    each, so that they differ at equal weights (PPO's ratio, arXiv:1707.06347, is 1 there).
    """
    count = 0
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        for name in ("p",) if is_dropout else DROPOUTS:
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                count += 1
                setattr(module, name, 0.0)
    return count


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
                f"{sample.sample_id}: {num_sampled} tokens were sampled, and {count} would "
                "be trained on. The template has to keep a completion's tokens as they are."
            )


def logprobs_of(sample: GRPOSample) -> list[float]:
    return list(_flatten(sample.rollout_logprobs))


def trained_ids(sample: GRPOSample) -> list[int]:
    """Return the tokens that were sampled, without those that an environment put in between."""
    ids = list(_flatten(sample.response_token_ids))
    mask = list(_flatten(sample.response_loss_mask))
    return [i for i, is_own in zip(ids, mask, strict=True) if is_own] if mask else ids


def _flatten(values: Any) -> Iterator[Any]:
    """Yield the values of ms-swift's lists for each turn, and of single turns without lists."""
    return chain.from_iterable(v if isinstance(v, (list, tuple)) else [v] for v in values or ())


# --- generated samples against the trainer's own model ---

Encoded: TypeAlias = "tuple[dict[str, Any], GRPOBatch]"
"""A model's inputs, and their batch."""


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


def sample_gap(trainer: RolloutGRPOTrainer, sample: GRPOSample) -> Gap:
    """Return the gap of one generated sample, without a token where it cannot be compared."""
    return sample_gaps(trainer, [sample], encoded_batch(trainer, [sample]))[0] or Gap()
