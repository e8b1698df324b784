"""Compares passes of a model.

A run in float32 is held against another one in float32. Runs in bfloat16 are held against the same
weights in float32: rounding may take a pass as far from there as it takes the plain pass, and
hardly further.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.bench.passes import Batch
from tests.logits.compare import Gradients, largest, values_and_gradients

Run = tuple[Tensor, Gradients]
"""Values, and the gradient of a mixture of them by each weight."""


class Comparison(NamedTuple):
    """A number that must not be larger than its bound."""

    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Return whether it is within its bound, which what is not a number never is."""
        return self.error <= self.bound


Pass = Callable[[Any, Batch], Tensor]
"""Computes values of a model and a batch."""

FLOAT32 = 1e-4
"""Bound of a difference in float32: kernels sum in other orders."""

TIMES_PLAIN, BFLOAT16, MOST = 2.0, 2**-7, 0.35
"""A pass in bfloat16 may lie twice as far from float32 as the plain pass does, and one step of
bfloat16 more; but never so far that a wrong pass might."""


def compare(
    make: Callable[[bool], tuple[Any, Batch]], plain: Pass, ways: Mapping[str, Pass]
) -> list[Comparison]:
    """Compare values and gradients of some ways with those of the plain pass.

    Args:
        make: returns the model and its batch; if asked to be exact, in float32 with the weights
            that the model has in bfloat16.
        plain: the plain pass. It runs before the others.
        ways: other passes by their names.
    """
    model, batch = make(False)
    expected = values_and_gradients(model, partial(plain, model, batch))
    exact = None
    if model.dtype == torch.bfloat16:
        other, its_batch = make(True)
        exact = values_and_gradients(other, partial(plain, other, its_batch))
    comparisons = []
    for name, way in ways.items():
        found = values_and_gradients(model, partial(way, model, batch))
        comparisons += held_against(name, found, expected, exact)
    return comparisons


def held_against(what: str, found: Run, plain: Run, exact: Run | None) -> list[Comparison]:
    """Compare a pass with the plain one in float32, or in bfloat16 with the exact one."""
    comparisons = []
    for kind, error_of in (("values", value_error), ("gradients", gradient_error)):
        error, bound = error_of(found, exact or plain), FLOAT32
        if exact is not None:
            bound = min(TIMES_PLAIN * error_of(plain, exact) + BFLOAT16, MOST)
        comparisons.append(Comparison(f"{what}: {kind}", error, bound))
    return comparisons


def value_error(found: Run, expected: Run) -> float:
    """Return the largest difference of values, as a share of the largest value."""
    return difference(found[0], expected[0]) / largest(expected[0])


def gradient_error(found: Run, expected: Run) -> float:
    """Return the largest distance of a weight's gradients, as a share of their length.

    Gradients that cancel (a key's bias moves no softmax) are nothing but rounding: a tenth of the
    longest gradient counts as a weight's length at the least.
    """
    assert expected[1], "no weight had a gradient"
    if found[1].keys() != expected[1].keys():
        return float("inf")
    lengths = {name: float(gradient.double().norm()) for name, gradient in expected[1].items()}
    least = max(lengths.values()) / 10
    return max(
        float((found[1][name].double() - gradient.double()).norm()) / max(lengths[name], least)
        for name, gradient in expected[1].items()
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors; infinite where they have other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found.double() - expected.double()).abs().max())


def assert_within(comparisons: list[Comparison]) -> None:
    assert comparisons
    assert [c for c in comparisons if not c.passed] == []
