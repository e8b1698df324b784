"""Compare values and gradients of a model's passes.

In float32, a pass is compared with the plain pass. In bfloat16, both are compared with a float32
pass of the same weights (the exact pass), and the pass may not be much further away than the plain
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.bench.passes import Batch
from tests.rig.logits.compare import Gradients, largest, values_and_gradients

Run = tuple[Tensor, Gradients]
"""Values, and the gradients of a weighted sum of them."""


class Comparison(NamedTuple):
    """An error and its bound."""

    name: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Return whether the error is within its bound; NaN is not."""
        return self.error <= self.bound


Pass = Callable[[Any, Batch], Tensor]
"""Computes values of a model and a batch."""

FLOAT32 = 1e-4
"""Bound in float32, because kernels sum in different orders."""

TIMES_PLAIN, BFLOAT16, MOST = 2.0, 2**-7, 0.35
"""The bound in bfloat16 is twice the plain pass's error plus one step of bfloat16, and at most
`MOST`, which wrong passes exceed."""


def compare(
    make: Callable[[bool], tuple[Any, Batch]], plain: Pass, ways: Mapping[str, Pass]
) -> list[Comparison]:
    """Compare values and gradients of other passes with those of the plain pass.

    Args:
        make: returns the model and its batch. `make(True)` returns the exact model: float32, with
            the weights rounded to the model's precision.
        plain: the plain pass, which runs first.
        ways: the other passes by name.
    """
    model, batch = make(False)
    expected = values_and_gradients(model, partial(plain, model, batch))
    exact = None
    if model.dtype == torch.bfloat16:
        exact_model, exact_batch = make(True)
        exact = values_and_gradients(exact_model, partial(plain, exact_model, exact_batch))
    comparisons = []
    for name, way in ways.items():
        run = values_and_gradients(model, partial(way, model, batch))
        comparisons += compare_runs(name, run, expected, exact)
    return comparisons


def compare_runs(name: str, run: Run, plain: Run, exact: Run | None) -> list[Comparison]:
    """Compare a pass with the exact pass if given, else with the plain pass."""
    comparisons = []
    for kind, error_of in (("values", value_error), ("gradients", gradient_error)):
        error, bound = error_of(run, exact or plain), FLOAT32
        if exact is not None:
            bound = min(TIMES_PLAIN * error_of(plain, exact) + BFLOAT16, MOST)
        comparisons.append(Comparison(f"{name}: {kind}", error, bound))
    return comparisons


def value_error(run: Run, expected: Run) -> float:
    """Return the largest difference of values, as a share of the largest value."""
    return difference(run[0], expected[0]) / largest(expected[0])


def gradient_error(run: Run, expected: Run) -> float:
    """Return the largest relative distance between the gradients of a weight.

    Gradients that cancel are pure rounding (a key's bias does not change a softmax), so the
    denominator is at least a tenth of the longest gradient.
    """
    assert expected[1], "no weight had a gradient"
    if run[1].keys() != expected[1].keys():
        return float("inf")
    lengths = {name: float(gradient.double().norm()) for name, gradient in expected[1].items()}
    least = max(lengths.values()) / 10
    return max(
        float((run[1][name].double() - gradient.double()).norm()) / max(lengths[name], least)
        for name, gradient in expected[1].items()
    )


def difference(tensor: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors; infinity if their shapes differ."""
    if tensor.shape != expected.shape:
        return float("inf")
    return float((tensor.double() - expected.double()).abs().max())


def assert_within(comparisons: list[Comparison]) -> None:
    assert comparisons
    assert [c for c in comparisons if not c.passed] == []
