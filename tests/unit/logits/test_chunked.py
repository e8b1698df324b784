"""Chunks of any size have the log-probabilities, entropies and gradients of ms-swift's own way, and
call the head as often as other ranks do [L1, L4]. `test_memory.py` measures their memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from swift_grpo_ext.logits.chunked import Logps, in_chunks, token_logps

HIDDEN, VOCABULARY = 8, 50


def problem(num: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(num)
    head = nn.Linear(HIDDEN, VOCABULARY)
    hidden = (3 * torch.randn(num, HIDDEN)).requires_grad_()
    return head, hidden, torch.randint(VOCABULARY, (num,))


def backward(logps: Logps, head: nn.Linear, hidden: Tensor) -> list[Tensor]:
    """Return values, and gradients of a mixture of them."""
    assert logps.entropies_N is not None
    mixture = torch.linspace(0.5, 1.5, len(logps.logps_N))
    total = (logps.logps_N * mixture).sum() - 0.3 * (logps.entropies_N * mixture).sum()
    gradients = torch.autograd.grad(total, [hidden, head.weight, head.bias])
    return [logps.logps_N.detach(), logps.entropies_N.detach(), *gradients]


def upstream(logits: Tensor, targets: Tensor, temperature: float) -> Logps:
    """Compute as in ms-swift's `_get_logps_via_local_forward`, with TRL's functions."""
    logits = logits / temperature
    return Logps(selective_log_softmax(logits, targets), entropy_from_logits(logits))


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 75), st.integers(0, 9), st.sampled_from([0.3, 1.0, 1.7]))
def test_any_chunk_size_is_as_upstream(
    num: int, chunk_size: int, num_chunks: int, temperature: float
) -> None:
    """Values, and gradients by hidden states and weights, of log-probabilities and entropies."""
    head, hidden, targets = problem(num)
    expected = backward(upstream(head(hidden), targets, temperature), head, hidden)
    function = partial(token_logps, temperature=temperature, with_entropy=True)
    at_once = function(head(hidden), targets)
    numbers = {"chunk_size": chunk_size, "num_chunks": num_chunks}
    parted = Logps(*in_chunks(head, hidden, [targets], function, **numbers))
    for logps in (at_once, parted):
        for a, b in zip(backward(logps, head, hidden), expected, strict=True):
            assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), 1e-2)


def test_half_precision_logits_are_computed_with_in_single() -> None:
    head, hidden, targets = problem(7)
    logits = head(hidden).detach().bfloat16().requires_grad_()
    options = {"temperature": 0.9, "with_entropy": True}
    expected = upstream(logits.float(), targets, 0.9)
    for found, wanted in zip(token_logps(logits, targets, **options), expected, strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted)
    (found,) = torch.autograd.grad(token_logps(logits, targets, **options).logps_N.sum(), logits)
    (wanted,) = torch.autograd.grad(expected.logps_N.sum(), logits)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


SURE = torch.tensor([[30.0, 30.0 - 16.12, 30.0 - 16.12]])
"""Logits of a nearly certain policy: p = 1 - 2e-7, entropy 3.3e-6."""

LARGE = 2 * torch.randn(8, 151_936, generator=torch.Generator().manual_seed(0))
"""Logits of Qwen's vocabulary: on some machines torch's own log-softmax is off there."""
LARGE[:, 5] = 22.0

CERTAIN = torch.full((1, VOCABULARY), -1e4).index_fill(1, torch.tensor([3]), 0.0)


@pytest.mark.parametrize(
    ("logits", "target", "tolerance"),
    [(SURE, 0, 3e-7), (LARGE, 5, 3e-6), (CERTAIN, 3, 0.0), (CERTAIN, 4, 0.0)],
)
def test_values_against_double_precision(logits: Tensor, target: int, tolerance: float) -> None:
    targets = torch.full((len(logits),), target)
    exact = upstream(logits.double(), targets, 1.0)
    logps = token_logps(logits, targets, with_entropy=True)
    for found, expected in zip(logps, exact, strict=True):
        assert (found - expected).abs().max() <= tolerance
    assert token_logps(logits, targets).entropies_N is None


def test_chunks_without_tokens_come_to_the_head_as_others_do() -> None:
    """The head's forward is repeated before its backward, so ranks that share its weight gather it
    in one order, also if a loss drops empty chunks (ms-swift's `jsd_loss`)."""
    events: list[str] = []
    head, hidden, _ = problem(4)
    head.register_forward_hook(lambda *_: events.append("forward"))
    head.register_full_backward_pre_hook(lambda *_: events.append("backward"))

    def loss(logits: Tensor, *, overwrite: bool) -> tuple[Tensor]:
        return ((logits.exp() if len(logits) else logits).sum()[None],)

    [totals] = in_chunks(head, hidden, [], loss, chunk_size=3, num_chunks=4)
    assert events == ["forward"] * 4
    events.clear()
    assert totals is not None
    totals.sum().backward()
    assert events == ["forward", "backward"] * 4
