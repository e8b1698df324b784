"""Computes the trainer's log-probabilities at completion positions only, in chunks.

`CompletionLogps` makes the passes of policy, old policy, reference and local teacher. Sequence
parallelism and Liger's fused loss run as in ms-swift, with a warning.

Letters in names are shapes: B rows of input ids (one in all with padding-free), T positions of a
row, K positions from the first completion token of any row on (ms-swift's `logits_to_keep`), N
completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from swift.utils import get_logger
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swift_grpo_ext.logits.packed import plain_inputs
from swift_grpo_ext.logits.proof import SharedPrompt
from swift_grpo_ext.logits.shim import LogitsShim, base_model

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch
    from swift.rlhf_trainers import GRPOConfig
    from swift.template import Template

logger = get_logger()


@dataclass(frozen=True)
class CompletionModel:
    """A model and the positions of its completion tokens; passed through ms-swift as the model."""

    model: nn.Module
    shim: LogitsShim
    mask_BK: Tensor  # which of the last K input ids are completion tokens


class CompletionLogps:
    """Computes log-probabilities by `--logits_shim` and `--logps_shared_prompt`."""

    def __init__(self, config: GRPOConfig, template: Template) -> None:
        self._is_strict = config.logits_shim == "strict"
        self._is_padding_free = bool(template.padding_free)
        # One for each of policy, reference and teacher: each may support other methods.
        self._shims = dict[nn.Module, LogitsShim]()
        self._shared_prompts = dict[nn.Module, SharedPrompt]()
        self.is_off = config.logits_shim == "off"  # ms-swift computes the logits
        self.shares_prompts = not (  # whether micro-batches may be packed
            config.logps_shared_prompt == "false"
            or self.is_off
            or self._is_padding_free
            or config.per_device_train_batch_size == 1
            or config.router_replay_mode != "disabled"  # it replays the experts of whole rows
            or config.torch_compile  # the packed form would be compiled too
        )
        if self.is_off:
            return
        reason = ""
        if template.sequence_parallel_size > 1:
            self.is_off, self.shares_prompts = True, False
            reason = f"with --sequence_parallel_size {template.sequence_parallel_size}"
        elif config.use_liger_kernel:
            # ms-swift's `compute_liger_loss` calls the model's body, which has no logits.
            reason = "on the loss with --use_liger_kernel true"
        if reason:
            logger.warning(f"--logits_shim and --logps_shared_prompt have no effect {reason}.")

    def restrict(self, model: nn.Module, grpo_batch: GRPOBatch) -> CompletionModel | nn.Module:
        """Return the model with a batch's completion positions; the bare model if `is_off`."""
        if self.is_off:
            return model
        mask_BK = grpo_batch.completion_mask
        if self._is_padding_free:
            # The mask has a right-aligned row for each sequence of the one row of input ids
            # (rlhf_trainers/utils.py, `build_completion_mask_and_seq_lengths`).
            sequences = zip(mask_BK, grpo_batch.seq_lengths.tolist(), strict=True)
            mask_BK = torch.cat([row[len(row) - length :] for row, length in sequences])[None]
        return CompletionModel(model, self.shim(model), mask_BK)

    def shim(self, model: nn.Module) -> LogitsShim:
        base = base_model(model)
        if base not in self._shims:
            self._shims[base] = LogitsShim(base, strict=self._is_strict)
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
        """Return log-probabilities [B, K] in nats, and entropies [B, K] or None. Both are 0 where
        there is no completion token.

        Args:
            model: the result of `restrict`.
            inputs: the arguments of its forward, or a micro-batch that may be packed.
            upstream: ms-swift's own computation.
        """
        if not isinstance(model, CompletionModel):
            return upstream(model)
        before = input_ids_BT.shape[1] - model.mask_BK.shape[1]
        # The position before a token predicts it.
        mask_BT = nn.functional.pad(model.mask_BK, (before - 1, 1))
        # The packed row has the same targets in the same order: this works for both forms.
        targets_N = input_ids_BT[:, before:][model.mask_BK]
        logps = partial(model.shim.logps, targets_N=targets_N, temperature=temperature)
        if self.shares_prompts:
            base = base_model(model.model)
            shared = self._shared_prompts.setdefault(base, SharedPrompt(base))
            # Verification makes additional passes on this rank only. They bypass DDP: its forward
            # broadcasts buffers, and would wait for the other ranks.
            is_ddp = isinstance(model.model, DistributedDataParallel)
            inner = model.model.module if is_ddp else model.model
            form = shared.form(
                inputs,
                mask_BT,
                lambda *form: logps(inner, *form).logps_N,
                model.shim.ranks(model.model),
            )
        else:
            form = plain_inputs(inputs), mask_BT
        logps_N, entropies_N = logps(model.model, *form, with_entropy=with_entropy)
        logps_BK = scattered(logps_N, model.mask_BK)
        return logps_BK, None if entropies_N is None else scattered(entropies_N, model.mask_BK)

    @property
    def sharing_failed(self) -> bool:
        """Whether a packed pass has changed log-probabilities on this rank."""
        return any(shared.has_failed for shared in self._shared_prompts.values())

    def end_round(self, sharing_failed: bool) -> None:
        """Stop sharing prompts if it failed on any rank. All ranks call this once a round, not once
        a pass: their numbers of passes may differ."""
        if not sharing_failed or not self.shares_prompts:
            return
        self.shares_prompts = False
        if not self.sharing_failed:  # a rank where it failed has logged the figures
            logger.warning(
                "--logps_shared_prompt auto leaves micro-batches as they are from here on: on "
                "another rank, packing changed log-probabilities by more than rounding explains."
            )


def scattered(values_N: Tensor, mask_BK: Tensor) -> Tensor:
    """Return [B, K]: the values where the mask is true, 0 elsewhere."""
    return values_N.new_zeros(mask_BK.shape).masked_scatter(mask_BK, values_N)
