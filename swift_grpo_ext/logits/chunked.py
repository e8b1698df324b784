"""Computes functions of logits in chunks: log-probabilities and entropies of tokens
(docs/promises.md, L4), or the terms of a loss.

Letters in names are shapes: B rows, T positions of a row, N chosen positions, n (or C) positions of
a chunk, R positions of a block, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

NUM_BLOCKS = 16  # blocks of a logits tensor; forward and backward need memory for one more


class Logps(NamedTuple):
    """Log-probabilities and entropies of N positions."""

    logps_N: Tensor  # in nats; float64 if the logits are float64, else float32
    entropies_N: Tensor | None  # Shannon's, in nats; None unless `with_entropy`


Outputs = tuple[Tensor | None, ...]
"""Outputs for N positions: tensors with leading dimension N, or one value per chunk."""

FromLogits = Callable[..., Outputs]
"""Takes logits [n, V], the same n positions of each column, and the keyword `overwrite`: whether
gradients may reuse the memory of the logits."""


def in_chunks(
    head: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    columns: Sequence[Tensor],
    function: FromLogits,
    *,
    chunk_size: int,
    num_chunks: int = 0,
) -> Outputs:
    """Return the outputs of `function` for the logits of hidden states, computed in chunks.

    A chunk's logits are dropped after its forward and recomputed in its backward: peak memory grows
    with chunk_size x V, not with N x V.

    Args:
        head: maps hidden states [n, H] to logits [n, V]. The backward may overwrite the logits: the
            head's own backward must not need them.
        columns: tensors [N, ...] for `function`.
        num_chunks: the least number of chunks, filled up with empty ones: all ranks must call a
            shared head equally often, in forward and backward.
    """

    def chunk(hidden_CH: Tensor, *columns_of_chunk: Tensor) -> Outputs:
        logits_CV = head(hidden_CH)
        if not len(hidden_CH):
            # `exp` saves a tensor for the backward, which makes checkpoint recompute this chunk, as
            # on other ranks, before the backward reaches the head.
            logits_CV = logits_CV.exp()
        return function(logits_CV, *columns_of_chunk, overwrite=True)

    # An empty tensor splits into one empty part: a rank without tokens calls the head too.
    rows = (hidden_NH, *columns)
    parts = list(zip(*(row.split(chunk_size) for row in rows), strict=True))
    parts += [tuple(row[:0] for row in rows)] * (num_chunks - len(parts))
    run: Callable[..., Outputs] = chunk
    if torch.is_grad_enabled():
        # No determinism check: it compares the saved tensors of both forwards, but ZeRO-3 has freed
        # frozen weights by then.
        run = partial(checkpoint, chunk, use_reentrant=False, determinism_check="none")
    outputs = zip(*(run(*part) for part in parts), strict=True)
    return tuple(None if made[0] is None else torch.cat(made) for made in outputs)


def token_logps(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    overwrite: bool = False,
) -> Logps:
    """Return log-probabilities of tokens, and entropies, from the logits of their positions.

    With x = logits / temperature and p = softmax(x): log p[target] and -sum(p * log p), both
    differentiable, in float32 or wider. With `overwrite` the backward writes gradients over the
    logits; autograd raises an error if these are needed elsewhere.
    """
    logps_N, entropies_N = _TokenLogps.apply(
        logits_NV, targets_N, temperature, with_entropy, overwrite
    )
    return Logps(logps_N, entropies_N if with_entropy else None)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits_NV: Tensor,
        targets_N: Tensor,
        temperature: float,
        with_entropy: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor]:
        # The logits are the only tensor [N, V] that is kept: the backward recomputes softmax from
        # each row's log-sum.
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        logps_N = logits_NV.new_empty(len(targets_N), dtype=dtype)
        entropies_N = torch.zeros_like(logps_N)
        log_sums_N = torch.empty_like(logps_N)
        for rows in _blocks(len(targets_N)):
            x_RV = _scaled(logits_NV[rows], temperature)
            log_sums_N[rows] = x_RV.logsumexp(-1)
            logps_N[rows] = x_RV.gather(-1, targets_N[rows, None])[:, 0] - log_sums_N[rows]
            if with_entropy:
                # Not `logsumexp - sum(p x)`: cancellation loses the digits of a small entropy.
                log_p_RV = x_RV - log_sums_N[rows, None]
                entropies_N[rows] = -log_p_RV.exp().mul_(log_p_RV).sum(-1)
        ctx.save_for_backward(logits_NV, targets_N, log_sums_N, entropies_N)
        ctx.temperature, ctx.overwrite = temperature, overwrite
        ctx.set_materialize_grads(False)  # an output that the loss does not use gets None
        return logps_N, entropies_N

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logps_N: Tensor | None, grad_entropies_N: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        """d log p[t] / dx = onehot(t) - p; d entropy / dx = -p (log p + entropy)."""
        logits_NV, targets_N, log_sums_N, entropies_N = ctx.saved_tensors
        if grad_logps_N is None:  # the loss only uses entropies
            grad_logps_N = torch.zeros_like(log_sums_N)
        # A block of logits is read before its gradient overwrites it. For 16-bit logits, a block's
        # gradient is computed in 32 bits, in its own memory, and rounded once.
        grad_NV = logits_NV.detach() if ctx.overwrite else torch.empty_like(logits_NV)
        is_half = grad_NV.dtype != log_sums_N.dtype
        for rows in _blocks(len(targets_N)):
            x_RV = _scaled(logits_NV[rows], ctx.temperature)
            log_p_RV = torch.empty_like(x_RV) if is_half else grad_NV[rows]
            torch.sub(x_RV, log_sums_N[rows, None], out=log_p_RV)
            grad_R = grad_logps_N[rows, None]
            if grad_entropies_N is None:
                grad_RV = log_p_RV.exp_().mul_(-grad_R)
            else:
                factor_R = grad_entropies_N[rows, None]
                surplus_RV = (log_p_RV + entropies_N[rows, None]).mul_(factor_R).add_(grad_R)
                grad_RV = log_p_RV.exp_().mul_(surplus_RV).neg_()
            grad_RV.scatter_add_(-1, targets_N[rows, None], grad_R)
            if ctx.temperature != 1:
                grad_RV.div_(ctx.temperature)  # last, for the same bits as in autograd
            if is_half:
                grad_NV[rows] = grad_RV
        return grad_NV, None, None, None, None


def _scaled(logits_RV: Tensor, temperature: float) -> Tensor:
    x_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    return x_RV if temperature == 1 else x_RV / temperature


def _blocks(num_rows: int) -> Iterator[slice]:
    size = -(-num_rows // NUM_BLOCKS) or 1
    return (slice(start, start + size) for start in range(0, num_rows, size))
