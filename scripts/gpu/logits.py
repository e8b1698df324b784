"""Logits of chosen positions, at once and in chunks, against the logits of all positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scripts.bench.measure import peak_bytes
from scripts.gpu.compare import BFLOAT16, FLOAT32, compare, difference
from scripts.gpu.found import Comparison, Found
from scripts.gpu.models import Batch, made, why_missing
from swift_grpo_ext.logits.chunked import Logps, chunked_logps, token_logps
from swift_grpo_ext.logits.shim import LogitsShim
from tests.logits.compare import largest


def run(device: str, model: str, dtype: str) -> Found:
    """Compare a tiny model's log-probabilities and entropies.

    Those of remote code are asked for their last positions by their own keyword, old or new, and
    their chunks are left alone.
    """
    if reason := why_missing(model):
        return Found(not_tried=reason)
    ways = {
        "chosen positions": partial(chosen_positions, chunk_size=0),
        "chunks of 3": partial(chosen_positions, chunk_size=3),
    }
    return Found(compare(partial(made, model, device, dtype), all_positions, ways))


def all_positions(model: Any, batch: Batch) -> Tensor:
    """Return log-probabilities [N] and, behind them, entropies [N]."""
    logits_NV = model(**batch.inputs).logits[batch.predicts_BT].float()
    log_p_NV = logits_NV.log_softmax(-1)
    logps_N = log_p_NV.gather(-1, batch.targets_N[:, None])[:, 0]
    return torch.cat([logps_N, -(log_p_NV.exp() * log_p_NV).sum(-1)])


def chosen_positions(model: Any, batch: Batch, chunk_size: int) -> Tensor:
    """Return the same through the shim."""
    logps = LogitsShim(model, warn=lambda _: None).logps(
        model, batch.inputs, batch.predicts_BT, batch.targets_N,
        chunk_size=chunk_size, with_entropy=True,
    )  # fmt: skip
    assert logps.entropies_N is not None
    return torch.cat([logps.logps_N, logps.entropies_N])


def run_head(device: str, positions: int, vocabulary: int, width: int, dtype: str) -> Found:
    """Compare a head's chunks of a 16th with all positions at once: values, and peak memory."""
    torch.manual_seed(0)
    how: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    head = nn.Linear(width, vocabulary, bias=False, **how)
    hidden = torch.randn(positions, width, requires_grad=True, **how)
    targets = torch.randint(vocabulary, (positions,), device=device)
    head.weight.grad, hidden.grad = torch.zeros_like(head.weight), torch.zeros_like(hidden)

    def at_once() -> Logps:
        return token_logps(head(hidden), targets, overwrite=True)

    def in_chunks() -> Logps:
        return chunked_logps(head, hidden, targets, chunk_size=positions // 16)

    with torch.no_grad():
        expected = at_once().logps_N
        error = difference(in_chunks().logps_N, expected) / largest(expected)
    whole = peak_bytes(lambda: at_once().logps_N.sum().backward())
    chunked = peak_bytes(lambda: in_chunks().logps_N.sum().backward())
    # The head's gradient: the sum so far, a chunk's, and the sum of both.
    less = chunked - 3 * head.weight.nbytes
    return Found(
        [
            Comparison("values", error, BFLOAT16 if dtype == "bfloat16" else FLOAT32),
            Comparison("peak in chunks, of that at once", less / whole, 0.2),
        ],
        [
            {
                "positions": positions,
                "vocabulary": vocabulary,
                "width": width,
                "dtype": dtype,
                "at once, GiB": whole / 2**30,
                "in chunks, GiB": chunked / 2**30,
            }
        ],
    )
