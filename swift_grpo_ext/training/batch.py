"""Builds micro-batches and compares them with the rollout (docs/promises.md, M3, M6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from swift.rlhf_trainers.utils import collate_to_grpo_micro_batch
from swift.utils import to_device
from torch.nn.utils.rnn import pad_sequence

from swift_grpo_ext.logits.packed import SharedPromptInputs
from swift_grpo_ext.rollout.positions import Positions
from swift_grpo_ext.training.encode import warn_of_mismatch
from swift_grpo_ext.training.group import (
    DisagreementError,
    groups_of,
    kind_of_row,
    logprobs_of,
    rollout_prompts,
    trained_ids,
)

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch
    from swift.template import Template

    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.ranks import RankGroup
    from swift_grpo_ext.rollout.sample import RolloutGKDSample, RolloutSample

# Attributes that transformers' layers pass to functional dropout.
DROPOUTS = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "dropout_p")

POSITIONS_REMEDY = (
    "vLLM's model and transformers' count positions of media differently. Install releases that "
    "agree (docs/support.md); --rollout_mismatch warn trains anyway."
)


def complete_teacher_views(
    samples: Sequence[RolloutSample | RolloutGKDSample], ranks: RankGroup
) -> bool:
    """Return whether any sample of the round has a `teacher_prompt` or `teacher_images`. If so,
    give all other samples their own prompt as the teacher's view. Every rank calls it."""
    # If one sample has a view, ms-swift 4.6 encodes views for the whole micro-batch
    # (gkd_helpers.py, `encode_gkd_samples`; grpo_trainer.py, `_collate_teacher_opsd_batch`). It
    # raises TypeError for samples without one, and ranks without one skip the teacher's pass.
    views = [sample.build_teacher_view() for sample in samples]
    if not any(ranks.all_gather(any(views))):
        return False
    for sample in samples:
        if sample.teacher_messages is None:
            sample.teacher_messages = [dict(message) for message in sample.messages]
    return True


# --- micro-batches that read a prompt once ---


def collate_groups(
    samples: Sequence[RolloutSample], template: Template, *, device: torch.device, **settings: Any
) -> tuple[dict[str, Any], GRPOBatch]:
    """Return a micro-batch of encoded samples; replaces `collate_to_grpo_micro_batch`. Media are
    collated for one row of each group; all rows are collated only if a pass is not packed."""
    groups = groups_of(samples)
    if len(groups) == len(samples):
        return collate_to_grpo_micro_batch(list(samples), template, device=device, **settings)

    def collated(rows: Sequence[RolloutSample]) -> dict[str, Any]:
        # Copies: collators pop entries from the rows (4.6, template/base.py, `concat_tensor`).
        made = template.data_collator([dict(sample.encoded) for sample in rows])
        unused = ("labels", "loss_scale")  # given labels, a model computes its own loss
        inputs = {name: value for name, value in made.items() if name not in unused}
        return dict(to_device(inputs, device))

    heads = collated([group.longest for group in groups])
    # ms-swift only needs the texts for its masks and log-probabilities.
    texts: Any = SimpleNamespace(data_collator=partial(pad_texts, template), padding_free=False)
    inputs, batch = collate_to_grpo_micro_batch(list(samples), texts, device=device, **settings)
    rows = [group.rows for group in groups]
    return SharedPromptInputs(inputs, rows, heads, cache(partial(collated, samples))), batch


def pad_texts(template: Template, rows: Sequence[Mapping[str, Any]], **_: Any) -> dict[str, Any]:
    """Return `input_ids`, `labels` and `attention_mask` [rows, tokens], as `template` pads them."""
    pad = partial(pad_sequence, batch_first=True, padding_side=template.padding_side)
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad(ids, padding_value=template.tokenizer.pad_token_id),
        "labels": pad(labels, padding_value=-100),
        "attention_mask": pad([torch.ones_like(row) for row in ids]),
    }


# --- differences between rollout and training ---


def check_batches(
    micro_batches: Sequence[tuple[Sequence[RolloutSample], GRPOBatch, Mapping[str, Any]]],
    args: RolloutGRPOConfig,
    ranks: RankGroup,
    fault: str = "",
) -> None:
    """Raise `DisagreementError` on all ranks if any rank trains on other prompts or tokens than its
    rollouts had (M3, M6). Every rank calls it once a round, with its `GroupEncoder.fault`."""
    try:
        for samples, batch, inputs in micro_batches:
            check_tokens(samples, batch)
            check_positions(samples, inputs, args)
    except DisagreementError as e:  # raised below: the other ranks wait for this one in a gather
        fault = fault or str(e)
    if faults := [*filter(None, ranks.all_gather(fault))]:
        raise DisagreementError(faults[0])


def check_tokens(samples: Sequence[RolloutSample], batch: GRPOBatch) -> None:
    """Raise `DisagreementError` if a sample lacks log-probabilities, or if training has another
    number of tokens than were sampled."""
    # Even with `--rollout_mismatch warn`: log-probabilities cannot be assigned to tokens then.
    numbers = [len(logprobs_of(sample)) for sample in samples]
    # If one sample's count differs, ms-swift drops the log-probabilities of the whole batch and
    # trains without importance sampling (4.6, utils.py, `build_rollout_logps`).
    are_dropped = batch.rollout_per_token_logps is None and all(numbers)
    for sample, mask, number in zip(samples, batch.completion_mask, numbers, strict=True):
        num_tokens, num_trained = len(trained_ids(sample)), int(mask.sum())
        if number not in (0, num_tokens):  # ms-swift asks for none with `--use_vllm false`
            raise DisagreementError(
                f"{sample.sample_id}: {num_tokens} sampled tokens and {number} log-probabilities "
                "came back from the engine."
            )
        # ms-swift drops the last log-probability of a sample that has one too many.
        if are_dropped and number not in (num_trained, num_trained + 1):
            raise DisagreementError(
                f"{sample.sample_id}: {number} tokens were sampled, and {num_trained} would be "
                "trained on. The template has to keep a completion's tokens as they are. A "
                "scheduler has to leave each answer in the messages, and to return "
                "`response_token_ids` and `response_loss_mask` if it changes one."
            )


def check_positions(
    samples: Sequence[RolloutSample], model_inputs: Mapping[str, Any], args: RolloutGRPOConfig
) -> None:
    """Raise `DisagreementError` if a prompt's position ids differ between rollout and training;
    only warn with `--rollout_mismatch warn`."""
    if isinstance(model_inputs, SharedPromptInputs):  # one row a group
        samples = [group.longest for group in groups_of(samples)]
        model_inputs = model_inputs.heads
    positions = positions_in_training(samples, model_inputs)
    for sample, placed in zip(samples, positions, strict=True):
        for prompt in rollout_prompts(sample):
            if misplaced := first_misplaced(prompt.positions, placed):
                error = DisagreementError(
                    f"{sample.sample_id}, a row of {kind_of_row(sample)}: the rollout and training "
                    f"give the same tokens different positions, {misplaced}. {POSITIONS_REMEDY}"
                )
                if args.rollout_mismatch == "stop":
                    raise error
                warn_of_mismatch(error)


def positions_in_training(
    samples: Sequence[RolloutSample], model_inputs: Mapping[str, Any]
) -> list[torch.Tensor | None]:
    """Return each sample's positions [3, tokens] in time, height and width; None if the model
    counts positions itself."""
    positions = model_inputs.get("position_ids")  # [3, rows, tokens] with M-RoPE
    if positions is None or positions.ndim != 3 or len(positions) != 3:
        return [None] * len(samples)
    positions = positions.cpu()
    mask = model_inputs.get("attention_mask")
    if mask is not None and mask.shape == positions.shape[1:]:
        return [positions[:, row, kept] for row, kept in enumerate(mask.cpu().bool())]
    if positions.shape[1] == len(samples):
        return list(positions.unbind(1))
    # `--padding_free true` packs all samples into one row.
    sizes = [len(sample.encoded["input_ids"]) for sample in samples]
    return list(positions[:, 0, : sum(sizes)].split(sizes, dim=1))


def first_misplaced(rollout: Positions | None, placed: torch.Tensor | None) -> str:
    """Describe the first differing position; "" if none differs or one side is unknown."""
    if rollout is None or placed is None or placed.shape[1] < rollout.shape[1]:
        return ""
    differs = (placed[:, : rollout.shape[1]].numpy() != rollout).any(0).nonzero()[0]
    if not len(differs):
        return ""
    at = int(differs[0])
    values = f"{rollout[:, at].tolist()} against {placed[:, at].tolist()}"
    return f"from token {at} of {rollout.shape[1]} on ({values} in time, height and width)"


# --- dropout ---


def switch_off_dropout(model: torch.nn.Module) -> int:
    """Set every dropout of a model to 0, and return their number."""
    # Dropout draws another mask in each pass, so that PPO's ratio (arXiv:1707.06347) would not be 1
    # at equal weights.
    count = 0
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        # Attention and some MLPs call `functional.dropout` with an attribute of their own.
        for name in ("p",) if is_dropout else DROPOUTS:
            value = getattr(module, name, None)
            if isinstance(value, float) and value > 0:
                count += 1
                setattr(module, name, 0.0)
    return count
