"""The order of prompts: TRL's own in an uninterrupted run, and the same in a resumed one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from swift_grpo_ext.sampling.sampler import EpochSampler, rank_share

EPOCHS = 4


@st.composite
def upstream_settings(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "data_source": range(draw(st.integers(1, 20))),
        "mini_repeat_count": draw(st.integers(1, 4)),
        "batch_size": draw(st.integers(1, 6)),
        "repeat_count": draw(st.integers(1, 3)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


def at_epoch(upstream: dict[str, Any], epoch: int) -> EpochSampler:
    return EpochSampler(RepeatSampler(**upstream), lambda: epoch)


@settings(deadline=None)
@given(upstream_settings())
def test_an_uninterrupted_run_meets_the_order_of_trl(upstream: dict[str, Any]) -> None:
    theirs = RepeatSampler(**upstream)
    epochs = iter(range(EPOCHS))
    ours = EpochSampler(RepeatSampler(**upstream), lambda: next(epochs))
    assert [list(ours) for _ in range(EPOCHS)] == [list(theirs) for _ in range(EPOCHS)]


@settings(deadline=None)
@given(upstream_settings(), st.integers(0, EPOCHS - 1))
def test_a_resumed_run_meets_the_order_of_its_epoch(upstream: dict[str, Any], epoch: int) -> None:
    """S4: TRL's sampler, made anew, would begin with the first epoch's order again."""
    theirs = RepeatSampler(**upstream)
    uninterrupted = [list(theirs) for _ in range(EPOCHS)]
    assert list(at_epoch(upstream, epoch)) == uninterrupted[epoch]


def test_trl_forgets_the_epoch() -> None:
    """What the sampler is for; when this fails, it can go."""
    upstream = {"data_source": range(20), "mini_repeat_count": 1, "seed": 42}
    uninterrupted = RepeatSampler(**upstream)
    first, second = list(uninterrupted), list(uninterrupted)
    assert first != second
    assert list(RepeatSampler(**upstream)) == first


@settings(deadline=None)
@given(upstream_settings(), st.integers(0, EPOCHS - 1))
def test_a_generation_batch_is_a_slice_of_the_order(upstream: dict[str, Any], epoch: int) -> None:
    sampler = at_epoch(upstream, epoch)
    size = upstream["batch_size"] * upstream["mini_repeat_count"]
    order = list(sampler)
    firsts = range(0, len(order), size * upstream["repeat_count"])
    assert sampler.num_batches == len(firsts)
    batches = [sampler.batch(epoch, batch) for batch in range(sampler.num_batches)]
    assert batches == [order[first : first + size] for first in firsts]


EXPECTED = [
    *[[6, 6, 4, 4], [2, 2, 1, 1], [3, 3, 0, 0]],
    *[[1, 1, 5, 5], [0, 0, 2, 2], [4, 4, 3, 3]],
]
"""Generation batches of epochs 1 and 2 of seven rows, as torch draws them from seed 1234."""


def test_the_order_of_an_epoch_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all samplers of one seed, for this epoch and the next."""
    drawn, real = [], torch.randperm

    def randperm(count: int, **kwargs: Any) -> torch.Tensor:
        drawn.append(count)
        return real(count, **kwargs)

    monkeypatch.setattr(torch, "randperm", randperm)
    upstream = {"data_source": range(7), "mini_repeat_count": 2, "batch_size": 2, "seed": 1234}
    batches = [at_epoch(upstream, 0).batch(epoch, batch) for epoch in (1, 2) for batch in range(3)]
    assert batches == EXPECTED
    assert drawn == [7] * (2 + 3)
    batches[0].append(-1)
    assert list(at_epoch(upstream, 1)) == [6, 6, 4, 4, 2, 2, 1, 1, 3, 3, 0, 0]
    assert drawn == [7] * (2 + 3)
    at_epoch({**upstream, "seed": 1235}, 0).batch(0, 0)
    at_epoch({**upstream, "data_source": range(8)}, 0).batch(0, 0)
    assert drawn[5:] == [7, 8]


@settings(deadline=None)
@given(upstream_settings())
def test_its_length_is_what_it_yields(upstream: dict[str, Any]) -> None:
    sampler = at_epoch(upstream, 0)
    assert len(sampler) == len(list(sampler)) == len(RepeatSampler(**upstream))


@pytest.mark.parametrize("epoch", range(3))
def test_without_shuffling_every_epoch_is_in_order(epoch: int) -> None:
    upstream = {
        "data_source": range(5),
        "mini_repeat_count": 2,
        "batch_size": 2,
        "repeat_count": 2,
        "shuffle": False,
        "seed": 42,
    }
    # Row 4 fills no batch of two prompts, and is left out.
    expected = [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert list(at_epoch(upstream, epoch)) == expected


def test_another_seed_is_another_order() -> None:
    orders = [
        tuple(at_epoch({"data_source": range(30), "mini_repeat_count": 1, "seed": seed}, 0))
        for seed in range(5)
    ]
    assert len(set(orders)) == 5
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(30))}


def test_ranks_share_a_batch_in_order() -> None:
    shares = [rank_share(range(8), rank, 4) for rank in range(4)]
    assert shares == [[0, 1], [2, 3], [4, 5], [6, 7]]
