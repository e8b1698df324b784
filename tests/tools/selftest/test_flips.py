"""Rounding, or other noise? By counts, and on draws of real Gumbel noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.tools.selftest.flips import Drawn, Flips, flips

VOCABULARY = 50


def drawn(index: int, ids: list[int], logprobs: list[float]) -> Drawn:
    sample_id = SampleId(phase="train", step=0, number=0, group=0, index=index)
    return Drawn(sample_id=sample_id, token_ids=ids, logprobs=logprobs)


def test_tokens_count_up_to_the_first_difference() -> None:
    one = [drawn(0, [1, 2, 3], [-1.0, -2.0, -0.5]), drawn(1, [1, 2], [-1.0, -1.0])]
    other = [drawn(1, [1, 2], [-1.0, -1.5]), drawn(0, [1, 4, 3], [-1.25, -3.0, -0.5])]
    found = flips(one, other)
    assert (found.num_tokens, found.count) == (4, 1)
    assert (found.drift, found.largest) == (0.75, 0.5)
    assert found.per_thousand == 250.0
    [first] = found.first
    assert first["token"] == 1
    assert first["probabilities apart"] == pytest.approx(np.exp(-2) - np.exp(-3), rel=1e-2)


def test_a_sample_that_ends_sooner_differs_and_one_that_is_missing_does_not_count() -> None:
    one = [drawn(0, [1, 2], [-1.0, -1.0]), drawn(1, [5], [-1.0])]
    found = flips(one, [drawn(0, [1], [-1.0])])
    assert (found.num_tokens, found.count) == (2, 1)
    assert found.first[0]["probabilities apart"] is None


@pytest.mark.parametrize(
    ("found", "is_rounding"),
    [
        (Flips(num_tokens=1000), True),
        (Flips(num_tokens=1000, count=1, drift=1e-3), True),
        (Flips(num_tokens=10, count=3, drift=0.0), False),
        (Flips(num_tokens=1000, count=12, drift=10.0), True),
        (Flips(num_tokens=1000, count=200, drift=10.0), False),
    ],
)
def test_flips_are_held_against_the_differences_of_log_probabilities(
    found: Flips, is_rounding: bool
) -> None:
    assert found.is_rounding is is_rounding


def draw(seed: int, noise_of_logits: float, index: int) -> Drawn:
    """Tokens of one noise, of logits that other noise has moved."""
    logits = np.random.default_rng(index).normal(0, 2, (64, VOCABULARY))
    logits += np.random.default_rng(999 + seed).normal(0, noise_of_logits, logits.shape)
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = (logprobs + np.random.default_rng((seed % 2, index)).gumbel(size=logits.shape)).argmax(1)
    return drawn(index, ids.tolist(), logprobs[np.arange(64), ids].tolist())


@pytest.mark.parametrize("size", [1e-6, 1e-3, 3e-2])
def test_real_noise_on_rounded_logits_is_rounding_and_other_noise_is_not(size: float) -> None:
    samples = range(32)
    exact = [draw(0, 0.0, i) for i in samples]
    assert flips(exact, [draw(2, size, i) for i in samples]).is_rounding
    assert not flips(exact, [draw(1, size, i) for i in samples]).is_rounding


def test_sums_keep_some_of_the_first_flips() -> None:
    one = [drawn(i, [1], [-1.0]) for i in range(9)]
    found = flips(one, [replace(d, token_ids=[2]) for d in one])
    assert found.count == 9
    assert len(found.values()["first flips"]) == 5
