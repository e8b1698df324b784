"""Runs of a model, and what two runs of it must have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from swift_grpo_ext.logits.shim import base_model, output_embedding

Gradients = dict[str, Tensor]


def values_and_gradients(model: Any, values_of: Callable[[], Tensor]) -> tuple[Tensor, Gradients]:
    """The values, and the gradient of a fixed mixture of them by every weight that learns."""
    model.zero_grad(set_to_none=True)
    values = values_of()
    mixture = torch.linspace(-1, 1, values.numel(), device=values.device).reshape(values.shape)
    (values * mixture).sum().backward()
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return values.detach(), {n: p.grad.clone() for n, p in learning.items() if p.grad is not None}


def assert_close(
    found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients], tolerance: float = 1e-5
) -> None:
    """Equal up to rounding: `tolerance` of the largest value of a tensor."""
    assert found[0].shape == expected[0].shape
    assert found[1].keys() == expected[1].keys()
    assert expected[1], "no weight had a gradient"
    pairs = [("values", found[0], expected[0])]
    pairs += [(name, found[1][name], expected[1][name]) for name in expected[1]]
    # A sum of terms that cancel is no measure of its own rounding: all weights have one scale.
    scale = max(map(largest, expected[1].values()))
    for name, a, b in pairs:
        measure = largest(b) if name == "values" else scale
        apart = largest(a - b)
        assert apart <= tolerance * measure, f"{name}: {apart:.1e} of {measure:.1e}"


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


@contextmanager
def counted_positions(model: Any) -> Iterator[list[int]]:
    """Positions whose logits the head computes within the block, one number for each call."""
    counts: list[int] = []
    head = output_embedding(base_model(model))
    assert head is not None
    # `forward` and not a hook: the head of a chunked pass is called within its own call.
    own = type(head).forward

    def forward(hidden: Tensor) -> Tensor:
        logits = own(head, hidden)
        counts.append(logits[..., 0].numel())
        return logits

    head.forward = forward
    try:
        yield counts
    finally:
        del head.forward
