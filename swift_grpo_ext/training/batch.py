"""The training batch: media encoded once, and what the rollout saw held against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer
from swift.utils import get_logger

from swift_grpo_ext.sampling.groups import describe, parse_request_id
from swift_grpo_ext.stops.templates import tell_stop_reason
from swift_grpo_ext.training.agreement import (
    DisagreementError,
    Gap,
    check_counts,
    check_prompt,
    gap_limit,
)
from swift_grpo_ext.training.shared_media import shared_media
from swift_grpo_ext.upstream.contract import Pin, verify
from swift_grpo_ext.upstream.dynamic_eos import only_sampled_tokens

PINS = (
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_batch_inputs", ("self", "samples")),
    Pin("swift.rlhf_trainers", "GRPOTrainer._postprocess_rollout_outputs",
        ("self", "samples", "outputs")),
    Pin("swift.rlhf_trainers", "GRPOTrainer.split_by_mini_batches", ("self", "samples")),
    Pin("swift.rl_core.data", "GRPOBatch.completion_mask"),
    Pin("swift.rl_core.data", "GRPOBatch.old_per_token_logps"),
    Pin("swift.rl_core.data", "GRPOBatch.rollout_per_token_logps"),
)  # fmt: skip
verify(PINS)

logger = get_logger()

DROPOUTS = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "dropout_p")
"""Attributes from which transformers' layers call functional dropout."""


class RolloutBatch(GRPOTrainer):
    """The hooks through which ms-swift's trainer makes its training batch."""

    _has_warned_of_gap = False

    def _postprocess_rollout_outputs(self, samples: list[Any], outputs: list[Any]) -> list[Any]:
        for output in outputs:
            tell_stop_reason(output)
        results = super()._postprocess_rollout_outputs(samples, outputs)
        for sample, output in zip(results, outputs, strict=True):
            sample.rollout_prompt_ids = output.response.prompt_token_ids
        return results

    def _prepare_batch_inputs(self, samples: list[Any]) -> Any:
        for sample in samples:
            check_counts(_name(sample), _trained_ids(sample), _logprobs(sample))
        with shared_media(self.template), only_sampled_tokens(self.template, samples):
            batches = super()._prepare_batch_inputs(samples)
        if self.template.sequence_parallel_size == 1:
            for chunk, batch in zip(self.split_by_mini_batches(samples), batches, strict=True):
                self._check_prompts(chunk)
                _check_alignment(chunk, batch["grpo_batch"])
        self._log_gap([batch["grpo_batch"] for batch in batches])
        return batches

    def _check_prompts(self, samples: Sequence[Any]) -> None:
        """SPEC M3. A conversation of several turns has its prompt checked by its own scheduler."""
        args = self.args
        for sample in samples:
            rollout = getattr(sample, "rollout_prompt_ids", None)
            if not rollout or _num_turns(sample) > 1:
                continue
            remedy = (
                f"Training encodes prompts whole, rollouts with --max_length {args.max_length} and "
                f"--truncation_strategy {args.truncation_strategy}: raise the first, or delete "
                "such prompts with the second."
                if self.template.max_length and len(rollout) >= self.template.max_length
                else "Give `swift rollout` the settings of the training: --template, --system, "
                "--max_length, MAX_PIXELS and the like."
            )
            check_prompt(_name(sample), rollout, _flat(sample.encoded["input_ids"]), remedy)

    def _log_gap(self, batches: Sequence[Any]) -> None:
        """SPEC M5: of log-probabilities at rollout and in training, over all ranks."""
        gaps = gather_object([sum(map(_gap, batches), Gap())])
        gap = sum(gaps, Gap())
        if not gap.count:
            return
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["rollout_gap/mean"].append(gap.mean)
        self._metrics[mode]["rollout_gap/max"].append(gap.largest)
        limit = gap_limit(torch.finfo(self.model.dtype).bits)
        if gap.mean <= limit or self._has_warned_of_gap or self._gap_is_expected:
            return
        self._has_warned_of_gap = True
        logger.warning(
            f"Step {self.state.global_step}: log-probabilities of the rollout and of training lie "
            f"{gap.mean:.3g} nats apart in the mean ({gap.largest:.3g} at most, {gap.count} "
            f"tokens), above the {limit:g} that rounding explains: rollouts and training do not "
            "see the same weights or prompts, or use numbers of other precision (quantization, "
            "--vllm_engine_kwargs). (Said once.)"
        )

    @property
    def _gap_is_expected(self) -> bool:
        """Rollouts from a part of the vocabulary, or with the weights of a step before."""
        args = self.args
        cut = (args.top_p or 1) < 1 or (args.top_k or 0) > 0 or (args.repetition_penalty or 1) != 1
        return bool(cut or args.async_generate)


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


def _gap(batch: Any) -> Gap:
    rollout, training = batch.rollout_per_token_logps, batch.old_per_token_logps
    if rollout is None or training is None:
        return Gap()
    mask = batch.completion_mask.bool()
    difference = (training - rollout).abs()[mask].float()
    if not difference.numel():
        return Gap()
    return Gap(float(difference.sum()), difference.numel(), float(difference.max()))


def _check_alignment(samples: Sequence[Any], batch: Any) -> None:
    """SPEC M6: ms-swift leaves out all of a batch's log-probabilities where one count disagrees."""
    if batch.rollout_per_token_logps is not None or not all(map(_logprobs, samples)):
        return
    for sample, mask in zip(samples, batch.completion_mask, strict=True):
        count = int(mask.sum())
        if len(_logprobs(sample)) not in (count, count + 1):
            raise DisagreementError(
                f"{_name(sample)}: {len(_logprobs(sample))} tokens were sampled, and {count} would "
                "be trained on. The template has to keep a completion's tokens as they are."
            )


def _name(sample: Any) -> str:
    return describe(parse_request_id(sample.request_id))


def _logprobs(sample: Any) -> list[float]:
    return list(_flatten(sample.rollout_logprobs))


def _trained_ids(sample: Any) -> list[int]:
    """The tokens that have a log-probability: not those that an environment put in between."""
    ids = list(_flatten(sample.response_token_ids))
    mask = list(_flatten(sample.response_loss_mask))
    return [i for i, is_own in zip(ids, mask, strict=True) if is_own] if mask else ids


def _num_turns(sample: Any) -> int:
    ids = sample.response_token_ids
    return len(ids) if ids and isinstance(ids[0], (list, tuple)) else 1


def _flatten(values: Any) -> Iterator[Any]:
    """Of ms-swift's lists for each turn, and of single turns that have none."""
    return chain.from_iterable(v if isinstance(v, (list, tuple)) else [v] for v in values or ())


def _flat(ids: Any) -> list[int]:
    return list(ids.flatten().tolist()) if isinstance(ids, torch.Tensor) else list(ids)
