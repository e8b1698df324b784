"""The logits shim and chunks on a GPU against full logits, and their peak memory at Qwen's size.

The same tests run on CPU with small sizes; those of a GPU are skipped, by name, without one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scripts.bench.peak import peak_bytes
from swift_grpo_ext.logits.chunked import chunked_logps, token_logps
from swift_grpo_ext.logits.shared_prompt import pack
from swift_grpo_ext.logits.shim import LogitsShim
from tests.logits.models import build, inputs_of

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)
DEVICES = ["cpu", CUDA]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of the largest value: bfloat16 has 8 digits of 2, which models and heads round to."""

QWEN_VOCABULARY = 151_936
WIDTH_OF_7B = 3584


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    found, expected = found.double(), expected.double()
    limit = TOLERANCES[dtype] * float(expected.abs().max())
    assert float((found - expected).abs().max()) <= limit


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Qwen2", "InternVL"])
def test_a_prompt_that_is_read_once(name: str, device: str, dtype: torch.dtype) -> None:
    """Log-probabilities of a packed batch, and the head's gradient, are those of the whole one."""
    model = build(name).to(device, dtype)
    inputs: dict[str, Any] = {
        key: value[:1].repeat(3, *[1] * (value.ndim - 1)).to(device)
        for key, value in inputs_of(name).items()
    }
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    wanted = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    wanted[0, 9:12] = wanted[1, 9:16] = wanted[2, 9:10] = True
    inputs["input_ids"][:, 10:] = torch.randint(3, 150, (3, 7), device=device)
    targets = inputs["input_ids"].roll(-1, 1)[wanted]
    packed = pack(inputs, wanted, model.config)
    assert packed is not None
    assert packed.predicts_RL.numel() < wanted.numel()

    shim, head = LogitsShim(model, strict=True), model.get_output_embeddings().weight
    found, expected = (
        shim.logps(model, *batch, targets).logps_N for batch in (packed, (inputs, wanted))
    )
    assert_near(found, expected, dtype)
    gradients = [torch.autograd.grad(x.sum(), head)[0] for x in (found, expected)]
    assert_near(*gradients, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Qwen2", "Qwen2.5-VL", "VideoLlama3"])
def test_shim_and_chunks_are_as_full_logits(name: str, device: str, dtype: torch.dtype) -> None:
    """Log-probabilities, entropies, and the head's gradient."""
    model = build(name).to(device, dtype)
    inputs: dict[str, Any] = {
        key: value.to(device, dtype if value.is_floating_point() else None)
        for key, value in inputs_of(name).items()
    }
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    mask[:, 6:10] = True
    targets = inputs["input_ids"][mask]
    head = model.get_output_embeddings().weight

    log_p = model(**inputs).logits[mask].float().log_softmax(-1)
    expected = log_p.gather(-1, targets[:, None])[:, 0]
    (expected_gradient,) = torch.autograd.grad(expected.sum(), head)
    entropies = -(log_p.exp() * log_p).sum(-1)
    for chunk_size in (0, 3):
        logps = LogitsShim(model, strict=True).logps(
            model, inputs, mask, targets, chunk_size=chunk_size, with_entropy=True
        )
        assert logps.entropies_N is not None
        (gradient,) = torch.autograd.grad(logps.logps_N.sum(), head)
        assert logps.logps_N.dtype == torch.float32
        assert_near(logps.logps_N, expected, dtype)
        assert_near(logps.entropies_N, entropies, dtype)
        assert_near(gradient, expected_gradient, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("device", "num_positions", "vocabulary", "width"),
    [
        ("cpu", 256, 4096, 64),
        ("cpu", 256, 4096, 96),
        pytest.param("cuda", 8192, QWEN_VOCABULARY, 64, marks=CUDA.marks),
        pytest.param("cuda", 8192, QWEN_VOCABULARY, WIDTH_OF_7B, marks=CUDA.marks),
    ],
)
def test_peak_memory(
    device: str, num_positions: int, vocabulary: int, width: int, dtype: torch.dtype
) -> None:
    """In chunks of a 16th, less than a 5th of all at once; values and gradients of one kind."""
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device=device, dtype=dtype)
    hidden = torch.randn(num_positions, width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (num_positions,), device=device)
    head.weight.grad = torch.zeros_like(head.weight)
    hidden.grad = torch.zeros_like(hidden)

    def at_once() -> Tensor:
        return token_logps(head(hidden), targets, overwrite=True).logps_N

    def in_chunks() -> Tensor:
        return chunked_logps(head, hidden, targets, chunk_size=num_positions // 16).logps_N

    with torch.no_grad():
        assert_near(in_chunks(), at_once(), dtype)
    whole = peak_bytes(lambda: at_once().sum().backward())
    chunked = peak_bytes(lambda: in_chunks().sum().backward())
    logits = num_positions * vocabulary * dtype.itemsize
    weight = head.weight.numel() * dtype.itemsize
    assert whole > logits
    # The head's gradient: the sum so far, a chunk's, and the sum of both.
    assert chunked - 3 * weight < whole / 5
    print(f"{device}, {dtype}: {whole / 2**30:.2f} GiB at once, {chunked / 2**30:.2f} in chunks")
