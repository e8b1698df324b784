"""Log-probabilities and entropies from logits and from hidden states (SPEC L4)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from swift_grpo_ext.logits.chunked import Logps, chunked_logps, token_logps
from swift_grpo_ext.logits.shim import find_transform, unchanged

HIDDEN, VOCABULARY = 8, 50


def problem(num: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(num)
    head = nn.Linear(HIDDEN, VOCABULARY, dtype=dtype)
    hidden = (3 * torch.randn(num, HIDDEN, dtype=dtype)).requires_grad_()
    return head, hidden, torch.randint(VOCABULARY, (num,))


def backward(logps: Logps, head: nn.Linear, hidden: Tensor) -> list[Tensor]:
    """Values, and gradients of a mixture of them."""
    assert logps.entropies_N is not None
    mixture = torch.linspace(0.5, 1.5, len(logps.logps_N))
    total = (logps.logps_N * mixture).sum() - 0.3 * (logps.entropies_N * mixture).sum()
    gradients = torch.autograd.grad(total, [hidden, head.weight, head.bias])
    return [logps.logps_N.detach(), logps.entropies_N.detach(), *gradients]


def upstream(logits: Tensor, targets: Tensor, temperature: float) -> Logps:
    """As `_get_logps_via_local_forward` of ms-swift: TRL's functions."""
    logits = logits / temperature
    return Logps(selective_log_softmax(logits, targets), entropy_from_logits(logits))


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 70),
    st.integers(1, 75),
    st.sampled_from([0.3, 1.0, 1.7]),
)
def test_any_chunk_size_is_as_upstream(num: int, chunk_size: int, temperature: float) -> None:
    """Values, and gradients by hidden states and weights, of log-probabilities and entropies."""
    head, hidden, targets = problem(num)
    expected = backward(upstream(head(hidden), targets, temperature), head, hidden)
    at_once = token_logps(head(hidden), targets, temperature=temperature, with_entropy=True)
    in_chunks = chunked_logps(
        head, hidden, targets,
        chunk_size=chunk_size, temperature=temperature, with_entropy=True,
    )  # fmt: skip
    for logps in (at_once, in_chunks):
        for a, b in zip(backward(logps, head, hidden), expected, strict=True):
            assert float((a - b).abs().max()) <= 1e-5 * max(float(b.abs().max()), 1e-2)


def test_gradients_against_differences() -> None:
    head, hidden, targets = problem(5, torch.float64)

    def of(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logps = chunked_logps(
            lambda h: nn.functional.linear(h, weight), hidden, targets,
            chunk_size=2, temperature=0.7, with_entropy=True,
        )  # fmt: skip
        assert logps.entropies_N is not None
        return logps.logps_N, logps.entropies_N

    assert torch.autograd.gradcheck(of, (hidden, head.weight))


def test_half_precision_logits_are_computed_with_in_single() -> None:
    head, hidden, targets = problem(7)
    logits = head(hidden).detach().bfloat16().requires_grad_()
    logps = token_logps(logits, targets, temperature=0.9, with_entropy=True)
    expected = upstream(logits.float(), targets, 0.9)
    assert logps.logps_N.dtype == torch.float32
    torch.testing.assert_close(logps.logps_N, expected.logps_N)
    torch.testing.assert_close(logps.entropies_N, expected.entropies_N)
    (found,) = torch.autograd.grad(logps.logps_N.sum(), logits)
    (wanted,) = torch.autograd.grad(expected.logps_N.sum(), logits)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted)


def test_a_small_entropy_keeps_its_digits() -> None:
    """A policy that is sure of itself: p = 1 - 2e-7, entropy = 3.3e-6."""
    gap = 16.12
    logits = torch.tensor([[30.0, 30.0 - gap, 30.0 - gap]])
    logits_64 = logits.double()
    expected = upstream(logits_64, torch.tensor([0]), 1.0).entropies_N
    found = token_logps(logits, torch.tensor([0]), with_entropy=True).entropies_N
    assert found is not None
    assert expected is not None
    assert float(found) == pytest.approx(float(expected), rel=0.1)
    assert 2e-6 < float(found) < 5e-6


def test_entropies_at_the_size_of_a_vocabulary() -> None:
    """Nearer to float64 than torch's own log-softmax, whose sum over 151,936 tokens drifts."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(8, 151_936)
    logits[:, 5] = 22.0
    targets = torch.full((8,), 5)
    exact, theirs = upstream(logits.double(), targets, 1.0), upstream(logits, targets, 1.0)
    ours = token_logps(logits, targets, with_entropy=True)
    assert exact.entropies_N is not None
    assert theirs.entropies_N is not None
    assert ours.entropies_N is not None
    error = (ours.entropies_N - exact.entropies_N).abs().max()
    assert error < 3e-6
    assert error < (theirs.entropies_N - exact.entropies_N).abs().max()
    torch.testing.assert_close(ours.logps_N, exact.logps_N.float(), rtol=1e-5, atol=3e-6)


def test_certain_and_impossible_tokens() -> None:
    logits = torch.full((2, VOCABULARY), -1e4)
    logits[:, 3] = 0.0
    logps = token_logps(logits, torch.tensor([3, 4]), with_entropy=True)
    assert logps.logps_N.tolist() == [0.0, -1e4]
    assert logps.entropies_N is not None
    assert logps.entropies_N.abs().max() == 0


def test_entropy_of_no_preference() -> None:
    logps = token_logps(torch.zeros(1, VOCABULARY), torch.tensor([0]), with_entropy=True)
    assert logps.entropies_N is not None
    assert float(logps.entropies_N) == pytest.approx(math.log(VOCABULARY))
    assert token_logps(torch.zeros(1, VOCABULARY), torch.tensor([0])).entropies_N is None


def test_logits_of_a_chunk_are_dropped() -> None:
    """Between forward and backward nothing of size V is kept."""
    head, hidden, targets = problem(20)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_logps(head, hidden, targets, chunk_size=4)
    assert not [t for t in kept if t.shape[-1:] == (VOCABULARY,) and t.ndim == 2]


@pytest.mark.parametrize(("num_chunks", "calls"), [(0, [2, 2, 1]), (3, [2, 2, 1]),
                                                   (5, [2, 2, 1, 0, 0])])  # fmt: skip
def test_empty_chunks_are_added(num_chunks: int, calls: list[int]) -> None:
    """The head is called for each, in the backward too, and nothing changes."""
    head, hidden, targets = problem(5)
    options = {"chunk_size": 2, "with_entropy": True}
    expected = backward(chunked_logps(head, hidden, targets, **options), head, hidden)
    found: list[int] = []
    head.register_forward_hook(lambda _, args, __: found.append(len(args[0])))
    logps = chunked_logps(head, hidden, targets, num_chunks=num_chunks, **options)
    assert found == calls
    for a, b in zip(backward(logps, head, hidden), expected, strict=True):
        assert torch.equal(a, b)
    assert found == [*calls, *reversed(calls)]


class ReleasedHead(nn.Module):
    """A frozen head whose weight is there during its own passes only, as ZeRO-3 has it."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.whole = head.weight.detach()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.weight.data = self.whole
        logits = _Gathering.apply(_SavingLinear.apply(hidden, self.weight), self)
        self.weight.data = torch.empty(0)
        return logits


class _SavingLinear(torch.autograd.Function):
    """As DeepSpeed's (zero/linear.py), which saves the weight itself, and no view of it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[0], None


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, head: ReleasedHead) -> Tensor:
        ctx.head = head
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.head.weight.data = ctx.head.whole
        return gradient, None


def test_a_frozen_weight_that_is_released_between_passes() -> None:
    """LoRA with ZeRO-3: autograd holds a frozen weight itself, not its value."""
    head, hidden, targets = problem(11)
    head.bias = None
    (expected,) = torch.autograd.grad(token_logps(head(hidden), targets).logps_N.sum(), hidden)
    in_chunks = chunked_logps(ReleasedHead(head), hidden, targets, chunk_size=4)
    (found,) = torch.autograd.grad(in_chunks.logps_N.sum(), hidden)
    torch.testing.assert_close(found, expected)


def test_chunk_size_of_nothing() -> None:
    head, hidden, targets = problem(2)
    with pytest.raises(ValueError, match=r"chunk_size 0: expected 1 or more"):
        chunked_logps(head, hidden, targets, chunk_size=0)


class Config:
    def __init__(self, **settings: float) -> None:
        vars(self).update(settings)

    def get_text_config(self) -> Config:
        return self


RAW = torch.linspace(-8, 8, VOCABULARY)
CAP = Config(final_logit_softcapping=30.0)


@pytest.mark.parametrize(
    ("config", "final"),
    [
        (Config(), RAW),
        (CAP, 30 * (RAW / 30).tanh()),
        (CAP, RAW),  # a setting that the model does not follow
        (Config(logit_scale=0.0625), RAW * 0.0625),
        (Config(logits_scaling=8.0), RAW / 8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transform_is_found(config: Config, final: Tensor, dtype: torch.dtype) -> None:
    transform = find_transform(config, RAW.to(dtype), final.to(dtype))
    assert transform is not None
    torch.testing.assert_close(transform(RAW), final)


def test_ranks_find_one_transform() -> None:
    """Here both transforms would do; on another rank, capping alone does."""
    small = RAW / 1e5
    elsewhere = torch.tensor([0.0, 1.0])
    transform = find_transform(CAP, small, small, lambda errors: torch.maximum(errors, elsewhere))
    assert transform is not None
    torch.testing.assert_close(transform(RAW), 30 * (RAW / 30).tanh())
    assert find_transform(CAP, small, small, lambda errors: errors + 1) is None


@pytest.mark.parametrize("final", [RAW + 1, 2 * RAW, RAW.tanh(), RAW[:-1]])
def test_an_unknown_transform_is_not_guessed(final: Tensor) -> None:
    assert find_transform(CAP, RAW, final) is None
    assert find_transform(CAP, RAW, RAW) is unchanged
