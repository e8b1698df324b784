"""Logits of chosen positions, whole and in chunks, equal those from a pass over all positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scripts.bench.measure import peak_bytes
from scripts.bench.passes import Batch
from swift_grpo_ext.logits.chunked import Logps, in_chunks, token_logps
from swift_grpo_ext.logits.shim import LogitsShim
from tests.gpu.compare import BFLOAT16, FLOAT32, assert_within, compare, difference
from tests.gpu.models import make
from tests.rig.logits.compare import largest

MODELS = ("Qwen2", "Qwen2.5-VL", "InternVL", "Qwen3.5", "Gemma3", "new spelling", "old spelling")


def all_positions(model: Any, batch: Batch) -> Tensor:
    """Return log-probabilities [N] followed by entropies [N]."""
    logits_NV = model(**batch.inputs).logits[batch.predicts_BT].float()
    log_p_NV = logits_NV.log_softmax(-1)
    logps_N = log_p_NV.gather(-1, batch.targets_N[:, None])[:, 0]
    return torch.cat([logps_N, -(log_p_NV.exp() * log_p_NV).sum(-1)])


def chosen_positions(model: Any, batch: Batch, chunk_size: int) -> Tensor:
    """Return the same values, computed by the shim."""
    shim = LogitsShim(model)
    shim.chunk_size = chunk_size
    logps = shim.logps(model, batch.inputs, batch.predicts_BT, batch.targets_N, with_entropy=True)
    assert logps.entropies_N is not None
    return torch.cat([logps.logps_N, logps.entropies_N])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_chosen_positions(model: str, dtype: str, device: str) -> None:
    """The shim passes models of remote code their own keyword for the last positions, old or new,
    and does not chunk their logits."""
    ways = {
        "chosen positions": partial(chosen_positions, chunk_size=1024),
        "chunks of 3": partial(chosen_positions, chunk_size=3),
    }
    assert_within(compare(partial(make, model, device, dtype), all_positions, ways))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 3584])
def test_chunks_of_a_head_need_less_memory(width: int, dtype: str, device: str) -> None:
    is_small = device == "cpu"
    positions, vocabulary = (256, 4096) if is_small else (8192, 151_936)
    width = min(width, 96) if is_small else width
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {"device": device, "dtype": getattr(torch, dtype)}
    head = nn.Linear(width, vocabulary, bias=False, **kwargs)
    hidden = torch.randn(positions, width, requires_grad=True, **kwargs)
    targets = torch.randint(vocabulary, (positions,), device=device)
    head.weight.grad, hidden.grad = torch.zeros_like(head.weight), torch.zeros_like(hidden)

    def whole() -> Logps:
        return token_logps(head(hidden), targets, overwrite=True)

    def chunked() -> Logps:
        return Logps(*in_chunks(head, hidden, [targets], token_logps, chunk_size=positions // 16))

    with torch.no_grad():
        expected = whole().logps_N
        error = difference(chunked().logps_N, expected) / largest(expected)
    assert error <= (BFLOAT16 if dtype == "bfloat16" else FLOAT32)
    whole_peak = peak_bytes(lambda: whole().logps_N.sum().backward())
    chunked_peak = peak_bytes(lambda: chunked().logps_N.sum().backward())
    # Chunking holds three head gradients: the sum so far, the chunk's, and the new sum.
    assert (chunked_peak - 3 * head.weight.nbytes) / whole_peak <= 0.2
