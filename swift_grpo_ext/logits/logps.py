"""Log-probabilities in the trainer: completion positions only, in chunks if asked for.

Policy, old-policy, reference and local-teacher passes of ms-swift's GRPO all call
`_get_per_token_logps_and_entropies_single`; the trainer hands them to `CompletionLogps`. Sequence
parallelism and Liger's fused loss run as in ms-swift, with a warning.

Letters in names are shapes: B rows of input ids (one in all with padding-free), T positions of a
row, K of them from the first completion token of any row on (ms-swift's `logits_to_keep`), N
completion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from swift.utils import get_logger
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swift_grpo_ext import memory
from swift_grpo_ext.flags import chunk_size
from swift_grpo_ext.logits.chunked import FromLogits, Logps, Outputs
from swift_grpo_ext.logits.joined_passes import (
    JoinedPasses,
    Waiting,
    parts_within_memory,
)
from swift_grpo_ext.logits.shared_prompt import PackedBatch, SharedPrompt
from swift_grpo_ext.logits.shim import LogitsShim, base_model, output_embedding
from swift_grpo_ext.ranks import RankGroup

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch, GRPOSample
    from swift.rlhf_trainers import GRPOConfig
    from swift.template import Template

logger = get_logger()


@dataclass(frozen=True)
class CompletionModel:
    """A model together with the positions of its completion tokens, where ms-swift expects the
    model."""

    model: nn.Module
    shim: LogitsShim
    mask_BK: Tensor
    """Which of the last K input ids are completion tokens."""


class CompletionLogps:
    """`--logits_shim` and `--logps_chunk_size`: which logits the training passes compute."""

    def __init__(
        self,
        config: GRPOConfig,
        template: Template,
        model: nn.Module | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        """
        Args:
            config: the training arguments, with our flags.
            template: ms-swift's, of the policy.
            model: the policy, for whose logits `--logps_chunk_size auto` finds room.
            ranks: all training ranks, which make these calls together; None stands for one.
        """
        self._is_strict = config.logits_shim == "strict"
        self._ranks = ranks or RankGroup()
        size = chunk_size(config.logps_chunk_size)
        if size is None:  # `auto`
            assert model is not None
            size = agreed_chunk_size(model, self._ranks)
        self.chunk_size = size
        self._is_padding_free = bool(template.padding_free)
        # By the model: policy, reference and teacher each find out by themselves what works. Weak
        # keys, as one that was replaced must not be kept in memory.
        self._shims: WeakKeyDictionary[nn.Module, LogitsShim] = WeakKeyDictionary()
        self._shared_prompts: WeakKeyDictionary[nn.Module, SharedPrompt] = WeakKeyDictionary()
        # Chunks that are asked for need the shim, whatever its own flag says.
        self.is_off = config.logits_shim == "off" and not self.chunk_size
        """Logits are ms-swift's."""

        self._config = config
        self._flag = config.logps_shared_prompt
        reason = self._reason_against_sharing()
        self.shares_prompts = self._flag != "false" and not reason
        if self._flag == "true" and reason:
            logger.warning(f"--logps_shared_prompt true has no effect with {reason}.")
        size = config.per_device_train_batch_size
        self._num_joined = -(-config.num_generations // size)
        """How many micro-batches a group takes up."""

        self._is_too_much = False
        """It is True once that many have not fitted into this rank's memory together."""

        if self.is_off:
            return
        flags = "--logits_shim, --logps_chunk_size and --logps_shared_prompt have no effect"
        if template.sequence_parallel_size > 1:
            self.is_off, self.shares_prompts = True, False
            logger.warning(
                f"{flags} with --sequence_parallel_size {template.sequence_parallel_size}: "
                "ms-swift splits positions over ranks, and computes the logits of all of them."
            )
        elif config.use_liger_kernel:
            # ms-swift's `compute_liger_loss` calls the model's body and asks for no logits.
            logger.warning(
                f"{flags} on the loss with --use_liger_kernel true, which computes it from "
                "hidden states; old-policy and reference passes follow them."
            )

    def _reason_against_sharing(self) -> str:
        """Return which setting keeps a group's prompt from being read once, and why; '' if none."""
        config = self._config
        if self.is_off or self._is_padding_free:
            flag = "--logits_shim off" if self.is_off else "--padding_free true"
            return f"{flag}, where batches stay as ms-swift makes them"
        if config.per_device_train_batch_size * config.steps_per_generation == 1:
            return "--per_device_train_batch_size 1, with which a rank has one sample of a round"
        if config.router_replay_mode != "disabled":
            return "--router_replay_mode R3, whose experts are those of a batch's own rows"
        if config.torch_compile and self._flag == "auto":
            return "--torch_compile true, which would compile the packed form as well"
        return ""

    @property
    def can_join(self) -> bool:
        """Whether passes without gradients may take several micro-batches together."""
        return self.shares_prompts and self._num_joined > 1

    def restrict(self, model: nn.Module, grpo_batch: GRPOBatch) -> CompletionModel | nn.Module:
        """Return the model with the positions of a batch; the model itself where ms-swift
        computes."""
        if self.is_off:
            return model
        mask_BK = grpo_batch.completion_mask
        if self._is_padding_free:
            # ms-swift has cut its one row at the borders of sequences and right-aligned the pieces
            # (rlhf_trainers/utils.py, `build_completion_mask_and_seq_lengths`). The model gets one
            # row, so they are put together again.
            pieces = zip(mask_BK, grpo_batch.seq_lengths.tolist(), strict=True)
            mask_BK = torch.cat([row[len(row) - length :] for row, length in pieces])[None]
        return CompletionModel(model, self.shim(model), mask_BK)

    def shim(self, model: nn.Module) -> LogitsShim:
        base = base_model(model)
        if base not in self._shims:
            # When the trainer was made, `mask_models` warned of a model that names no head.
            tell = logger.info if output_embedding(base) is None else logger.warning
            self._shims[base] = LogitsShim(base, strict=self._is_strict, warn=tell)
        return self._shims[base]

    def compute(
        self,
        model: CompletionModel | nn.Module,
        inputs: dict[str, Any],
        input_ids_BT: Tensor,
        upstream: Callable[[nn.Module], tuple[Tensor, Tensor | None]],
        *,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities [B, K] in nats, 0 where there is no completion token; and
        entropies [B, K] likewise, or None.

        Args:
            model: what `restrict` gave.
            inputs: the arguments of its forward.
            input_ids_BT: the token ids.
            upstream: ms-swift's own arithmetic on a model's logits.
            temperature: the number by which logits are divided.
            with_entropy: whether entropies are wanted too.
        """
        if not isinstance(model, CompletionModel):  # `restrict` has left it as it was
            return upstream(model)
        mask_BT, logps = self._frame(model, input_ids_BT, temperature)
        packed = self._pack(model.model, inputs, mask_BT, logps)
        logps_N, entropies_N = logps(
            model.model, *(packed or (inputs, mask_BT)), with_entropy=with_entropy
        )
        logps_BK = scattered(logps_N, model.mask_BK)
        return logps_BK, None if entropies_N is None else scattered(entropies_N, model.mask_BK)

    def _frame(
        self, model: CompletionModel, input_ids_BT: Tensor, temperature: float
    ) -> tuple[Tensor, Callable[..., Logps]]:
        """Return which positions of a batch predict a completion token, and a function that takes
        a model, its inputs and such positions, and returns log-probabilities."""
        before = input_ids_BT.shape[1] - model.mask_BK.shape[1]
        # The logits that predict a token are those of the position before it.
        mask_BT = nn.functional.pad(model.mask_BK, (before - 1, 1))
        # The packed row has the same targets in the same order, so that both forms can share this.
        targets_N = input_ids_BT[:, before:][model.mask_BK]
        return mask_BT, partial(
            model.shim.logps,
            targets_N=targets_N,
            chunk_size=self.chunk_size,
            temperature=temperature,
        )

    def from_logits(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        mask_BT: Tensor,
        targets_N: Tensor,
        function: FromLogits,
        columns: Sequence[Tensor] = (),
    ) -> Outputs:
        """Return what `function` makes of the logits of N positions, in the order of the mask.

        Args:
            model: the policy, a teacher ..., or any wrapping of it.
            inputs: the arguments of its forward.
            mask_BT: the positions that predict a token, before the tokens.
            targets_N: those tokens.
            function, columns: as of `LogitsShim.compute`.
        """
        shim = self.shim(model)
        logps = partial(shim.logps, targets_N=targets_N, chunk_size=self.chunk_size)
        batch = self._pack(model, inputs, mask_BT, logps) or (inputs, mask_BT)
        return shim.compute(model, *batch, function, columns, self.chunk_size)

    def _pack(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        mask_BT: Tensor,
        logps: Callable[..., Logps],
        plain_logps: Callable[[], Tensor] | None = None,
    ) -> PackedBatch | None:
        if not self.shares_prompts:
            return None
        base = base_model(model)
        if base not in self._shared_prompts:
            self._shared_prompts[base] = SharedPrompt(base, self._flag)
        # The proof of the first batch makes passes that other ranks may not make. DDP's forward has
        # collectives of its own (buffers), which would wait for them: go around it.
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        return self._shared_prompts[base].pack(
            inputs,
            mask_BT,
            lambda *batch: logps(plain, *batch).logps_N,
            self.shim(model).ranks(model),
            plain_logps,
        )

    # --- several micro-batches in a pass without gradients ---

    def joined_passes(
        self,
        micro_batches: Sequence[Sequence[GRPOSample]],
        collate: Callable[[list[GRPOSample]], tuple[dict[str, Any], GRPOBatch]],
        temperature: float,
        policy: nn.Module,
    ) -> JoinedPasses | None:
        """Return what takes a round's micro-batches together; None where each has to be alone.

        All ranks call it together where they `can_join`.

        Args:
            micro_batches: the samples of each.
            collate: makes one batch of some, once they are encoded.
            temperature: the number by which logits are divided.
            policy: the model that is trained.
        """
        # A local teacher with views of its own has rows of its own, which ms-swift encodes in the
        # place of the sample's (4.6, rl_core/data.py, `build_teacher_view`): what waits here would
        # be collated with the wrong ones. All samples of all ranks have a view, or none
        # (`complete_teacher_views`).
        if any(sample.teacher_messages for samples in micro_batches for sample in samples):
            return None

        # Gradients that the pass with gradients will make beside its activations are room that
        # passes without have now. Where weights are sharded, or DeepSpeed keeps gradients in
        # buffers of its own, their number is not known: count none, which joins less.
        num_gradients = 0
        if not self._config.deepspeed and not self.shim(policy).ranks(policy).groups:
            trained = (p for p in policy.parameters() if p.requires_grad and p.grad is None)
            num_gradients = sum(parameter.numel() for parameter in trained)
        compute = partial(self._logps_of_several, collate, temperature)
        num_parts = partial(self._num_parts, num_gradients)
        return JoinedPasses(micro_batches, self._num_joined, compute, num_parts)

    def _logps_of_several(
        self,
        collate: Callable[[list[GRPOSample]], tuple[dict[str, Any], GRPOBatch]],
        temperature: float,
        model: nn.Module,
        waiting: Sequence[Waiting],
    ) -> Tensor | None:
        """Return log-probabilities [N] of some micro-batches as one packed row; None where they are
        not packed, and each has to be computed alone."""
        if self._is_too_much:
            return None
        inputs, batch = collate([sample for each in waiting for sample in each.samples])
        restricted = self.restrict(model, batch)
        assert isinstance(restricted, CompletionModel)
        mask_BT, logps = self._frame(restricted, inputs["input_ids"], temperature)

        def alone() -> Tensor:  # what the first packed row is held against
            return torch.cat([each.alone()[each.mask_BK] for each in waiting])

        try:
            packed = self._pack(model, inputs, mask_BT, logps, alone)
            values_N = None if packed is None else logps(model, *packed).logps_N
        except torch.OutOfMemoryError:
            # Ranks that share weights are in the same pass, and would wait in its next gather.
            if restricted.shim.ranks(model).groups:
                raise
            self._is_too_much = True
            logger.warning(
                "Micro-batches of a group do not fit into memory together: from here on, passes "
                "without gradients take one at a time. (Said once.)"
            )
            return None
        return values_N

    def _num_parts(self, num_gradients: int, model: nn.Module, waiting: Sequence[Waiting]) -> int:
        base: Any = base_model(model)
        number = parts_within_memory(
            waiting,
            base.config.get_text_config(),
            recomputes=self._config.gradient_checkpointing,
            chunk_size=self.chunk_size,
            num_gradients=num_gradients,
        )
        return self.shim(model).ranks(model).most(number)

    def end_round(self) -> None:
        """Stop sharing prompts on all ranks where that changed log-probabilities on one of them.

        All ranks call this together, once a round: passes are no place for it, as their number may
        depend on a rank's own rows.
        """
        if self.is_off or not self.shares_prompts:
            return
        has_failed = any(shared.has_failed for shared in self._shared_prompts.values())
        if self._ranks.agree(not has_failed):
            return
        self.shares_prompts = False
        if not has_failed:  # a rank where it failed has said so itself, with its figures
            logger.warning(
                f"--logps_shared_prompt {self._flag} leaves batches as they are from here on: on "
                "another rank, log-probabilities of a batch lie further apart than rounding "
                "explains."
            )


def scattered(values_N: Tensor, mask_BK: Tensor) -> Tensor:
    """Return [B, K]: the values where the mask is true, 0 elsewhere."""
    return values_N.new_zeros(mask_BK.shape).masked_scatter(mask_BK, values_N)


def agreed_chunk_size(model: nn.Module, ranks: RankGroup) -> int:
    """Decide `--logps_chunk_size auto`: positions whose logits take a 16th of the free memory at
    most.

    A power of two from 64 to 4096, the same on all ranks, which call this together.
    """
    base: Any = base_model(model)
    free = min(ranks.all_gather(free_bytes(base.device)))
    vocabulary = int(base.config.get_text_config().vocab_size)
    # A position has its logits, over which the backward writes, and its part of the blocks in
    # float32 that `token_logps` works on: together 2 bytes more for each token of the vocabulary.
    position_bytes = vocabulary * (base.dtype.itemsize + 2)
    # A 16th, as this is asked before the first forward: gradients, the optimizer's state and
    # activations take the memory that is free now. The bounds are chosen, not measured: a product
    # of fewer than 64 rows uses no device well, and one of 4096 gains nothing from more.
    size = 2 ** int(math.log2(max(free // 16 // position_bytes, 64)))
    size = min(size, 4096)
    logger.info(
        f"--logps_chunk_size auto: {size} positions at a time, whose logits take "
        f"{size * position_bytes / 2**30:.2f} GiB (vocabulary {vocabulary}; the rank with the "
        f"least has {free / 2**30:.1f} GiB free)."
    )
    return size


def free_bytes(device: torch.device) -> int:
    """Return the memory that this rank's device has left, what its allocator keeps in reserve
    included."""
    if device.type == "cpu":
        return memory.free_bytes()
    module = torch.get_device_module(device)
    kept = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + kept)
