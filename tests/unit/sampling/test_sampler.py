"""The order of prompts is TRL's, also in a resumed run."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from swift_grpo_ext.sampling.sampler import EpochSampler

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
def test_every_epoch_has_the_order_of_trl_also_in_a_resumed_run(upstream: dict[str, Any]) -> None:
    """S4: a new sampler of TRL's would begin with the first epoch's order again."""
    theirs = RepeatSampler(**upstream)
    uninterrupted = [list(theirs) for _ in range(EPOCHS)]
    epochs = iter(range(EPOCHS))
    ours = EpochSampler(RepeatSampler(**upstream), lambda: next(epochs))
    assert [list(ours) for _ in range(EPOCHS)] == uninterrupted
    assert [list(at_epoch(upstream, epoch)) for epoch in range(EPOCHS)] == uninterrupted
    assert len(ours) == len(theirs) == len(uninterrupted[0])


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
