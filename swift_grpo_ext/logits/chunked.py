"""Values of logits, some positions at a time: log-probabilities and entropies of tokens
(docs/promises.md, L4), or whatever a loss needs.

Letters in names are shapes: B rows, T positions of a row, N chosen positions, n of a chunk and R of
a block of them, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

NUM_BLOCKS = 16  # parts of a tensor of logits: forward and backward need one part more


class Logps(NamedTuple):
    """Log-probabilities and entropies of N positions."""

    logps_N: Tensor  # in nats; float32, or float64 where the logits are
    entropies_N: Tensor | None  # Shannon's, in nats; None unless `with_entropy`


Outputs = tuple[Tensor | None, ...]
"""Values of N positions: tensors that begin with N, or with a value for each chunk."""

FromLogits = Callable[..., Outputs]
"""Takes logits [n, V] and the same n positions of each column, and `overwrite` by name: whether
gradients may take the memory of the logits."""


def in_chunks(
    head: Callable[[Tensor], Tensor],
    hidden_NH: Tensor,
    columns: Sequence[Tensor],
    function: FromLogits,
    *,
    chunk_size: int,
    num_chunks: int = 0,
) -> Outputs:
    """Return the outputs of `function` for the logits of hidden states, a chunk at a time, joined.

    Logits of a chunk are dropped after its forward and made again in its backward: peak memory
    grows with chunk_size x V and not with N x V.

    Args:
        head: maps hidden states [n, H] to logits [n, V]. The backward may write over the logits:
            the head's own backward must not need them.
        columns: tensors [N, ...] for `function`.
        num_chunks: empty chunks are added up to this number: all ranks must call a shared head
            equally often, in forward and backward.
    """

    def chunk(hidden_CH: Tensor, *columns_of_chunk: Tensor) -> Outputs:
        logits_CV = head(hidden_CH)
        if not len(hidden_CH):
            # Saves a tensor, so that the backward makes this chunk again, as on other ranks, before
            # it comes to the head.
            logits_CV = logits_CV.exp()
        return function(logits_CV, *columns_of_chunk, overwrite=True)

    # An empty tensor splits into one empty part, so that a rank without a token calls the head too.
    rows = (hidden_NH, *columns)
    parts = list(zip(*(row.split(chunk_size) for row in rows), strict=True))
    parts += [tuple(row[:0] for row in rows)] * (num_chunks - len(parts))
    run: Callable[..., Outputs] = chunk
    if torch.is_grad_enabled():
        # With ZeRO-3 a frozen weight has no shape any more when checkpoint would compare the
        # tensors that both forwards saved.
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
    """Compute log-probabilities of tokens, and entropies, from the logits of their positions.

    With x = logits / temperature and p = softmax(x): log p[target] and -sum(p * log p), both
    differentiable, in float32 or wider. With `overwrite` the backward writes gradients over the
    logits; autograd raises an error where these are needed elsewhere.
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
        # Nothing else of the size N x V is kept: the backward makes softmax again from each row's
        # sum.
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        logps_N = logits_NV.new_empty(len(targets_N), dtype=dtype)
        entropies_N = torch.zeros_like(logps_N)
        log_sums_N = torch.empty_like(logps_N)
        for rows in _blocks(len(targets_N)):
            x_RV = _scaled(logits_NV[rows], temperature)
            log_sums_N[rows] = x_RV.logsumexp(-1)
            logps_N[rows] = x_RV.gather(-1, targets_N[rows, None])[:, 0] - log_sums_N[rows]
            if with_entropy:
                # Not as logsumexp - sum(p x), which loses the digits of a small entropy.
                log_p_RV = x_RV - log_sums_N[rows, None]
                entropies_N[rows] = -log_p_RV.exp().mul_(log_p_RV).sum(-1)
        ctx.save_for_backward(logits_NV, targets_N, log_sums_N, entropies_N)
        ctx.temperature, ctx.overwrite = temperature, overwrite
        ctx.set_materialize_grads(False)  # an output outside of the loss has the gradient None
        return logps_N, entropies_N

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logps_N: Tensor | None, grad_entropies_N: Tensor | None
    ) -> tuple[Tensor, None, None, None, None]:
        """d log p[t] / dx = onehot(t) - p; d entropy / dx = -p (log p + entropy)."""
        logits_NV, targets_N, log_sums_N, entropies_N = ctx.saved_tensors
        if grad_logps_N is None:  # only entropies are in the loss
            grad_logps_N = torch.zeros_like(log_sums_N)
        # A block of logits is read before its gradient takes its place. The gradient of 16 bits is
        # computed in 32, beside the logits, and rounded once.
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
                grad_RV.div_(ctx.temperature)  # last, as autograd would: the same bits
            if is_half:
                grad_NV[rows] = grad_RV
        return grad_NV, None, None, None, None


def _scaled(logits_RV: Tensor, temperature: float) -> Tensor:
    x_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
    return x_RV if temperature == 1 else x_RV / temperature


def _blocks(num_rows: int) -> Iterator[slice]:
    size = -(-num_rows // NUM_BLOCKS) or 1
    return (slice(start, start + size) for start in range(0, num_rows, size))
