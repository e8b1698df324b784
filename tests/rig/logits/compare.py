"""Values and gradients of a model's passes, and the comparison of two passes.

In float32, a pass is compared with the plain pass. In bfloat16, both are compared with a float32
pass of the same weights (the exact pass), and the pass may not be much further away than the plain
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from swift_grpo_ext.logits.shim import base_model, output_embedding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Run = tuple[Tensor, dict[str, Tensor]]
"""Values, and the gradient of a weighted sum of them by each trained weight."""

TIMES_PLAIN, BFLOAT16, MOST = 2.0, 2**-7, 0.35
"""The bound in bfloat16 is twice the plain pass's error plus one step of bfloat16, and at most
`MOST`, which wrong passes exceed."""


def values_and_gradients(model: Any, values_of: Callable[[], Tensor]) -> Run:
    """Return the values, and the gradients of a fixed mixture of them by all trained weights."""
    model.zero_grad(set_to_none=True)
    values = values_of()
    mixture = torch.linspace(-1, 1, values.numel(), device=values.device).reshape(values.shape)
    (values * mixture).sum().backward()
    learning = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return values.detach(), {n: p.grad.clone() for n, p in learning.items() if p.grad is not None}


def assert_close(found: Run, expected: Run, tolerance: float = 1e-5) -> None:
    """Assert that all errors are at most `tolerance`."""
    errors = errors_of(found, expected)
    assert {name: e for name, e in errors.items() if not e <= tolerance} == {}


def wrong_parts(run: Run, plain: Run, exact: Run | None, tolerance: float) -> dict[str, float]:
    """Return the errors beyond their bounds (`errors_of`). `exact` is given in bfloat16."""
    errors = errors_of(run, exact or plain)
    limits = dict.fromkeys(errors, tolerance)
    if exact is not None:
        rounding = errors_of(plain, exact)
        of_values = rounding.pop("values")
        of_gradients = max(rounding.values())
        for name in limits:
            error = of_values if name == "values" else of_gradients
            limits[name] = min(TIMES_PLAIN * error + BFLOAT16, MOST)
    return {name: error for name, error in errors.items() if not error <= limits[name]}  # also NaN


def errors_of(run: Run, expected: Run) -> dict[str, float]:
    """Return the relative errors of the values, and of the gradient of each weight.

    Gradients that cancel are pure rounding (a key's bias does not change a softmax), so the
    denominator is at least a tenth of the longest gradient.
    """
    assert expected[1], "no weight had a gradient"
    errors = {"values": share(difference(run[0], expected[0]), largest(expected[0]))}
    lengths = {name: float(gradient.double().norm()) for name, gradient in expected[1].items()}
    least = max(lengths.values()) / 10
    for name in expected[1].keys() | run[1].keys():
        errors[name] = float("inf")
        if name in expected[1] and name in run[1]:
            apart = (run[1][name].double() - expected[1][name].double()).norm()
            errors[name] = share(float(apart), max(lengths[name], least))
    return errors


def share(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return float("inf") if part else 0.0


def difference(tensor: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors; infinity if their shapes differ."""
    if tensor.shape != expected.shape:
        return float("inf")
    return largest(tensor.double() - expected.double())


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
