"""Takes micro-batches together in passes without gradients, so that a group's prompt is read once.

ms-swift asks for the log-probabilities of the old policy, of the reference and of a local teacher
one micro-batch at a time, before a round is trained on (4.6, grpo_trainer.py,
`_prepare_batch_inputs`). Where a micro-batch holds less than a group, as with
`--per_device_train_batch_size 1`, nothing could be shared in it. Here micro-batches wait until the
last one of their group is there, and become one packed row (`shared_prompt.py`): as many of them as
need no more memory than the pass with gradients over one. Those that cannot be packed are computed
one by one, as in ms-swift.

Letters in names are shapes: B rows of a micro-batch, K positions from the first completion token of
any row on, N completion tokens of all that are taken together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swift_grpo_ext.logits.shared_prompt import WORTH, GroupLengths, pass_cost

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch, GRPOSample
    from torch import nn
    from transformers import PretrainedConfig

    from swift_grpo_ext.config import RolloutGRPOConfig


@dataclass(frozen=True)
class Waiting:
    """A micro-batch whose log-probabilities have been asked for."""

    samples: Sequence[GRPOSample]
    mask_BK: Tensor
    """Which positions hold completion tokens."""

    result_BK: Tensor
    """The log-probabilities are written here."""

    alone: Callable[[], Tensor]
    """Computes them [B, K] by a pass over this micro-batch."""

    @property
    def groups(self) -> list[GroupLengths]:
        """Return the lengths of its samples, each with the longest completion: an upper bound."""
        suffix = self.mask_BK.shape[1]  # from the prompt's last token on to the last but one
        groups = []
        for _, same in groupby(self.samples, key=lambda sample: sample.prompt_id):
            lengths = [len(sample.encoded["input_ids"]) for sample in same]
            groups.append(GroupLengths(max(lengths) - suffix - 1, [suffix] * len(lengths)))
        return groups


class JoinedPasses:
    """The passes without gradients over one rank's micro-batches of a round.

    Ranks that share weights all have as many micro-batches, and take as many of them together.
    """

    def __init__(
        self,
        micro_batches: Sequence[Sequence[GRPOSample]],
        num_joined: int,
        compute: Callable[[nn.Module, Sequence[Waiting]], Tensor | None],
        num_parts: Callable[[nn.Module, Sequence[Waiting]], int],
    ) -> None:
        """
        Args:
            micro_batches: the samples of each, in the order in which they are asked for.
            num_joined: how many follow one another that may hold one group.
            compute: computes the log-probabilities [N] of some micro-batches as one packed row;
                None where they are not packed.
            num_parts: says into how many such rows some micro-batches have to be divided.
        """
        self._micro_batches, self._num_joined = micro_batches, num_joined
        self._compute, self._num_parts = compute, num_parts
        self._waiting: dict[int, list[Waiting]] = {}
        """By the pass: the old policy's is 0, and others follow."""

        self._batch: GRPOBatch | None = None
        self._number = -1
        """It counts micro-batches; this one is being asked about."""
        self._pass = 0

    def add(self, model: nn.Module, batch: GRPOBatch, alone: Callable[[], Tensor]) -> Tensor:
        """Return log-probabilities [B, K] of the next micro-batch. They are zeros until the last
        one is added that is computed with it.

        Args:
            model: makes the pass.
            batch: of ms-swift; each pass over a micro-batch comes with the same one.
            alone: computes them by a pass over this micro-batch.
        """
        # ms-swift makes all passes over one micro-batch before it goes on to the next: the same
        # batch again is the next pass (of the reference, of a teacher), another one the first.
        is_next = batch is not self._batch
        self._batch, self._pass = batch, 0 if is_next else self._pass + 1
        self._number += is_next
        samples, mask_BK = self._micro_batches[self._number], batch.completion_mask
        result_BK = torch.zeros(mask_BK.shape, device=mask_BK.device)
        waiting = self._waiting.setdefault(self._pass, [])
        waiting.append(Waiting(samples, mask_BK, result_BK, alone))
        num_seen = self._number + 1
        if num_seen % self._num_joined and num_seen < len(self._micro_batches):
            return result_BK

        # The last one of a group: fill what the callers of all of them hold.
        del self._waiting[self._pass]
        size = -(-len(waiting) // self._num_parts(model, waiting))
        for start in range(0, len(waiting), size):
            part = waiting[start : start + size]
            values_N = self._compute(model, part) if len(part) > 1 else None
            if values_N is None:
                for each in part:
                    each.result_BK.copy_(each.alone())
                continue
            counts = [int(each.mask_BK.sum()) for each in part]
            for each, values in zip(part, values_N.split(counts), strict=True):
                each.result_BK.masked_scatter_(each.mask_BK, values.to(each.result_BK.dtype))
        return result_BK


# --- memory ---


def parts_within_memory(
    waiting: Sequence[Waiting],
    text: PretrainedConfig,
    *,
    recomputes: bool,
    chunk_size: int,
    num_gradients: int = 0,
) -> int:
    """Return into how many packed rows micro-batches have to be divided, so that none needs more
    memory than the pass with gradients over the largest of them.

    Counted are numbers of the model's precision, in estimates that are coarse on purpose: what does
    not fit is computed one by one (`logps.py`).

    Args:
        waiting: the micro-batches.
        text: the configuration of the model's text.
        recomputes: whether the pass with gradients does (`--gradient_checkpointing`).
        chunk_size: positions whose logits exist at a time; 0: all.
        num_gradients: numbers that the pass with gradients makes of weights, and frees.
    """
    width, num_layers = text.hidden_size, text.num_hidden_layers
    wide = getattr(text, "intermediate_size", None) or 4 * width
    # For the backward a layer keeps about 8 widths of its norms, attention and projections, and 5
    # sizes of its MLP. Where layers are recomputed, one at a time does so, and of each other one
    # there is its input. Without gradients one layer is there at a time, with about 3 of both.
    one_layer = 8 * width + 5 * wide
    other_layers = num_layers * width if recomputes else (num_layers - 1) * one_layer
    with_gradients, without = other_layers + one_layer, 3 * (width + wide)

    def need(num_positions: int, num_tokens: int, per_position: int) -> int:
        num_logits = int(text.vocab_size) * min(num_tokens, chunk_size or num_tokens)
        return num_positions * per_position + num_logits

    tokens = [int(each.mask_BK.sum()) for each in waiting]
    longest = [max(len(s.encoded["input_ids"]) for s in each.samples) for each in waiting]
    bound = num_gradients + max(map(need, longest, tokens, [with_gradients] * len(waiting)))
    for num_parts in range(1, len(waiting)):
        size = -(-len(waiting) // num_parts)
        needs = []
        for start in range(0, len(waiting), size):
            part = slice(start, start + size)
            num_positions = packed_positions(waiting[part])
            needs.append(need(num_positions, sum(tokens[part]), without))
        if max(needs) <= bound:
            return num_parts
    return len(waiting)  # each by itself


def packed_positions(waiting: Sequence[Waiting]) -> int:
    """Return how many positions one packed row of some micro-batches has at most."""
    num_positions, prompt_id = 0, ""
    for each in waiting:
        num_positions += sum(group.num_positions for group in each.groups)
        if each.samples[0].prompt_id == prompt_id:  # its prompt stands there already
            num_positions -= each.groups[0].prompt
        prompt_id = each.samples[-1].prompt_id
    return num_positions


# --- what larger micro-batches would save ---


def larger_micro_batches(
    group: GroupLengths, text: PretrainedConfig, config: RolloutGRPOConfig | SimpleNamespace
) -> str:
    """Say what larger micro-batches would save of passes with gradients, with the settings to set;
    '' where it is too little.

    Args:
        group: lengths of a group as the training has them.
        text: the configuration of the model's text.
        config: the training arguments.
    """
    size, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    # The largest that makes the same steps: it divides the accumulation, and holds no more than a
    # group, as only samples of one prompt share anything.
    most = min(config.num_generations, size * steps)
    factor = max(n for n in range(1, steps + 1) if steps % n == 0 and n * size <= max(most, size))
    # The group's lengths, again and again until there are enough.
    suffixes = [*group.suffixes] * -(-factor * size // len(group.suffixes))
    larger = GroupLengths(group.prompt, suffixes[: factor * size])
    smaller = [
        GroupLengths(group.prompt, larger.suffixes[start : start + size])
        for start in range(0, factor * size, size)
    ]
    saved = 1 - pass_cost([larger], text) / sum(pass_cost([each], text) for each in smaller)
    if saved <= WORTH:
        return ""
    flags = f"--per_device_train_batch_size {factor * size} "
    flags += f"--gradient_accumulation_steps {steps // factor}"
    if config.steps_per_generation != steps:
        flags += f" --steps_per_generation {config.steps_per_generation // factor}"
    before = max(each.num_positions for each in smaller)
    return (
        f"{flags} in the place of {size} and {steps} makes the same steps, is expected to save "
        f"{saved:.0%} of the passes with gradients, in which a prompt is read once for each "
        f"micro-batch, and has {larger.num_positions} positions in memory at a time, not {before}."
    )
