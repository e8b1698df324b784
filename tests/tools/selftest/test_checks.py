"""What checks decide, on plain values; `tests/stack/test_selftest.py` runs them on engines."""

from __future__ import annotations

import numpy as np
import pytest

from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.tools.selftest.costs import recommended
from swift_grpo_ext.tools.selftest.flips import Drawn
from swift_grpo_ext.tools.selftest.seeds import shared_noise

GIB = 2**30


@pytest.mark.parametrize(
    ("ways", "room", "best"),
    [
        ({0: (8 * GIB, 1.0), 512: (1 * GIB, 1.05)}, 10 * GIB, 512),
        ({0: (8 * GIB, 1.0), 512: (1 * GIB, 1.5)}, 10 * GIB, 0),
        ({0: (8 * GIB, 1.0), 512: (1 * GIB, 1.5)}, 4 * GIB, 512),
        ({0: (8 * GIB, 1.0), 512: (2 * GIB, 1.5), 64: (1 * GIB, 3.0)}, 0, 64),
    ],
)
def test_chunks_are_recommended_where_they_cost_no_time_or_nothing_else_fits(
    ways: dict[int, tuple[int, float]], room: float, best: int
) -> None:
    assert recommended(ways, room) == best


def a_round(step: int, seed: int) -> list[Drawn]:
    rng = np.random.default_rng(seed)
    return [
        Drawn(
            sample_id=SampleId(phase="train", step=step, number=0, group=0, index=index),
            token_ids=rng.integers(0, 1024, 8).tolist(),
            logprobs=[-10 * np.log(2)] * 8,
            prompt_ids=[1, 2],
        )
        for index in range(4)
    ]


def test_independent_noise_is_not_shared() -> None:
    log10_p, bits = shared_noise(a_round(0, 1), [a_round(1, 2), a_round(2, 3)], a_round(0, 4))
    assert log10_p == 0
    assert bits == pytest.approx(16 * 80)


@pytest.mark.parametrize(("later", "other"), [(1, 4), (2, 1)])
def test_noise_of_a_later_round_or_another_seed_that_was_there_before_is(
    later: int, other: int
) -> None:
    log10_p, _ = shared_noise(a_round(0, 1), [a_round(1, later)], a_round(0, other))
    assert log10_p < -15


@pytest.mark.parametrize("num_layers", [1, 8, 28, 80])
def test_a_known_change_touches_both_tensors_of_adapters(num_layers: int) -> None:
    """Their B is 0 at first: a change of A alone would change nothing."""
    from swift_grpo_ext.tools.selftest.training import NUM_TENSORS, spread

    trained = [f"{layer}.{module}.{t}" for layer in range(num_layers) for module in range(7)
               for t in "AB"]  # fmt: skip
    found = spread(trained)
    assert {name[-1] for name in found} == {"A", "B"}
    assert min(NUM_TENSORS, len(trained)) / 2 <= len(found) <= 2 * NUM_TENSORS
