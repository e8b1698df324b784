"""Log-probabilities in the trainer: completion positions only, in chunks if asked for.

Policy, old-policy, reference and local-teacher passes of ms-swift's GRPO all come through
`_get_per_token_logps_and_entropies_single`; here they go through `swift_grpo_ext.logits`. What is
not ours to change runs as in ms-swift, with a warning: sequence parallelism, and Liger's fused
loss.

Letters in names are shapes: B rows of input ids (one in all with padding-free), T positions of a
row, K of them from the first completion token of any row on (ms-swift's `logits_to_keep`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from swift.utils import get_logger
from torch import Tensor, nn

from swift_grpo_ext.logits import KEYWORDS, LogitsShim, Logps, base_model, token_logps

if TYPE_CHECKING:
    from swift.rlhf_trainers import GRPOTrainer as Upstream
else:
    Upstream = object


logger = get_logger()

SLACK = 0.05
"""Positions without a completion token that are put up with, as a share of those with one. Up to
it, a model that has a keyword computes the last K of each row, as in ms-swift, bit for bit."""


@dataclass(frozen=True)
class WantedLogps:
    """A model together with the positions that are wanted of it.

    It stands where ms-swift expects the model; calling it gives the logits of the last positions.
    """

    model: nn.Module
    shim: LogitsShim
    mask_BK: Tensor
    """Which of the last K input ids are completion tokens."""

    @property
    def is_as_upstream(self) -> bool:
        """Whether ms-swift's own arithmetic on the last positions computes next to no others."""
        num_wanted = int(self.mask_BK.sum())
        is_full = self.mask_BK.numel() <= (1 + SLACK) * num_wanted
        return self.shim.ranks(self.model).all(is_full and self.shim.way in KEYWORDS)

    def __call__(self, **inputs: Any) -> Any:
        # One position more than tokens, as ms-swift asks for: it drops the last one.
        return self.shim.last(self.model, inputs, self.mask_BK.shape[1] + 1)


class LogpsMixin(Upstream):
    """`--logits_shim` and `--logps_chunk_size` for ms-swift's `GRPOTrainer`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._logits_shims: WeakKeyDictionary[nn.Module, LogitsShim] = WeakKeyDictionary()
        self._has_warned_of_other_logits = False
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies_single(
        self, model: Any, model_inputs: Any, grpo_batch: Any, compute_entropy: bool = False
    ) -> Any:
        if self._changes_logits():
            mask_BK = completion_mask(grpo_batch, packed=self.template.padding_free)
            model = WantedLogps(model, self._logits_shim(model), mask_BK)
        return super()._get_per_token_logps_and_entropies_single(
            model, model_inputs, grpo_batch, compute_entropy
        )

    def _get_logps_via_local_forward(
        self,
        model: Any,
        model_inputs: dict[str, Any],
        logits_to_keep: int,
        input_ids: Tensor,
        compute_entropy: bool = False,
    ) -> Any:
        chunk_size = self.args.logps_chunk_size
        arguments = (model_inputs, logits_to_keep, input_ids, compute_entropy)
        if not isinstance(model, WantedLogps):
            return super()._get_logps_via_local_forward(model, *arguments)
        if "use_cache" in self.model_kwarg_keys:
            model_inputs["use_cache"] = False
        if not chunk_size and model.is_as_upstream:
            if compute_entropy or self.template.padding_free:
                return super()._get_logps_via_local_forward(model, *arguments)
            output = model(**model_inputs)
            if output.logits.dtype not in (torch.float32, torch.float64):
                return super()._get_logps_via_local_forward(lambda **_: output, *arguments)
            logits = output.logits
            del output
            return last_logps(logits, input_ids[:, -logits_to_keep:], self.temperature), None
        logps = wanted_logps(
            model,
            model_inputs,
            input_ids,
            chunk_size=chunk_size,
            temperature=self.temperature,
            with_entropy=compute_entropy,
        )
        logps_BK = spread(logps.logps_N, model.mask_BK)
        if logps.entropies_N is None:
            return logps_BK, None
        return logps_BK, spread(logps.entropies_N, model.mask_BK)

    def _changes_logits(self) -> bool:
        """Whether logits are ours to compute; warns once where flags of ours have no effect."""
        if self.args.logits_shim == "off" and not self.args.logps_chunk_size:
            return False
        is_parallel = self.template.sequence_parallel_size > 1
        if not self._has_warned_of_other_logits and (is_parallel or self.use_liger_loss):
            self._has_warned_of_other_logits = True
            flags = "--logits_shim and --logps_chunk_size have no effect"
            logger.warning(
                f"{flags} with --sequence_parallel_size {self.template.sequence_parallel_size}: "
                "ms-swift splits positions over ranks, and computes the logits of all of them."
                if is_parallel
                else f"{flags} on the loss with --use_liger_kernel true, which computes it from "
                "hidden states; old-policy and reference passes follow them."
            )
        return not is_parallel

    def _logits_shim(self, model: nn.Module) -> LogitsShim:
        """One for each model: policy, reference, teacher."""
        base = base_model(model)
        if base not in self._logits_shims:
            strict = self.args.logits_shim == "strict"
            self._logits_shims[base] = LogitsShim(base, strict=strict, warn=logger.warning)
        return self._logits_shims[base]


def completion_mask(grpo_batch: Any, *, packed: bool) -> Tensor:
    """[B, K]: which of the last K input ids are completion tokens.

    With padding-free, ms-swift has cut its one row at the borders of sequences and right-aligned
    the pieces; they are put together again.
    """
    mask = grpo_batch.completion_mask
    if not packed:
        return mask
    pieces = zip(mask, grpo_batch.seq_lengths.tolist(), strict=True)
    return torch.cat([row[len(row) - length :] for row, length in pieces])[None]


def wanted_logps(
    wanted: WantedLogps, inputs: Mapping[str, Any], input_ids_BT: Tensor, **options: Any
) -> Logps:
    """Log-probabilities of the wanted tokens, row by row; `options` are those of `logps`."""
    mask_BK = wanted.mask_BK
    num_kept = mask_BK.shape[1]
    before = input_ids_BT.shape[1] - num_kept
    # The logits that predict a token are those of the position before it.
    mask_BT = nn.functional.pad(mask_BK, (before - 1, 1))
    targets_N = input_ids_BT[:, before:][mask_BK]
    return wanted.shim.logps(wanted.model, inputs, mask_BT, targets_N, **options)


def last_logps(logits_BLV: Tensor, targets_BK: Tensor, temperature: float) -> Tensor:
    """[B, K]: log-probabilities of the last K tokens, with ms-swift's bits, forward and backward.

    ms-swift's own arithmetic (`selective_log_softmax` of TRL) makes five more tensors of the size
    of the logits in its backward; here the gradient takes the place of the logits.

    Args:
        logits_BLV: logits of the last K + 1 positions, in float32 or float64. As in ms-swift, which
            divides them in place, the model's last operation must not need them for its backward.
        targets_BK: the tokens' ids.
        temperature: by which logits are divided.
    """
    # The last position predicts no token: its log-probability gets no gradient.
    targets_BL = nn.functional.pad(targets_BK, (0, 1))
    logps = token_logps(
        logits_BLV.flatten(0, 1), targets_BL.flatten(), temperature=temperature, overwrite=True
    )
    return logps.logps_N.view_as(targets_BL)[:, :-1]


def spread(values_N: Tensor, mask_BK: Tensor) -> Tensor:
    """[B, K]: the values where the mask is true, 0 elsewhere."""
    zeros_BK = values_N.new_zeros(mask_BK.shape)
    return zeros_BK.masked_scatter(mask_BK, values_N)
