"""Values and gradients of a model, and comparisons of two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from swift_grpo_ext.logits.shim import base_model, output_embedding

Gradients = dict[str, Tensor]


def values_and_gradients(model: Any, values_of: Callable[[], Tensor]) -> tuple[Tensor, Gradients]:
    """Return the values, and the gradients of a fixed mixture of them by all trained weights."""
    model.zero_grad(set_to_none=True)
    values = values_of()
    mixture = torch.linspace(-1, 1, values.numel(), device=values.device).reshape(values.shape)
    (values * mixture).sum().backward()
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return values.detach(), {n: p.grad.clone() for n, p in learning.items() if p.grad is not None}


def assert_close(
    found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients], tolerance: float = 1e-5
) -> None:
    """Assert that both are equal within `tolerance` of a tensor's largest value."""
    assert found[0].shape == expected[0].shape
    assert found[1].keys() == expected[1].keys()
    assert expected[1], "no weight had a gradient"
    pairs = [("values", found[0], expected[0])]
    pairs += [(name, found[1][name], expected[1][name]) for name in expected[1]]
    # If terms of a gradient cancel, its size is less than their rounding: use one scale for all.
    scale = max(map(largest, expected[1].values()))
    for name, a, b in pairs:
        measure = largest(b) if name == "values" else scale
        apart = largest(a - b)
        assert apart <= tolerance * measure, f"{name}: {apart:.1e} of {measure:.1e}"


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


@contextmanager
def counted_positions(model: Any) -> Iterator[list[int]]:
    """Count the positions that the head computes within the block, one number for each call."""
    counts: list[int] = []
    head = output_embedding(base_model(model))
    assert head is not None
    # `forward` and not a hook: a chunked pass calls the head within the head's own call.
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
