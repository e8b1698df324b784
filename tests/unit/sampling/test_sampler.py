"""The order of prompts is TRL's, also in a resumed run (S4)."""

from __future__ import annotations

from typing import Any

from hypothesis import given
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


@given(upstream_settings())
def test_every_epoch_has_the_order_of_trl_also_in_a_resumed_run(upstream: dict[str, Any]) -> None:
    """A new sampler of TRL's would begin with the first epoch's order again."""
    theirs = RepeatSampler(**upstream)
    epochs = iter(range(EPOCHS))
    uninterrupted = EpochSampler(RepeatSampler(**upstream), lambda: next(epochs))
    size = upstream["batch_size"] * upstream["mini_repeat_count"]
    for epoch in range(EPOCHS):
        order = list(theirs)
        assert list(uninterrupted) == order
        resumed = EpochSampler(RepeatSampler(**upstream), lambda epoch=epoch: epoch)
        assert list(resumed) == order
        assert len(resumed) == len(theirs) == len(order)
        firsts = range(0, len(order), size * upstream["repeat_count"])
        batches = [resumed.batch(epoch, batch) for batch in range(resumed.num_batches)]
        assert batches == [order[first : first + size] for first in firsts]
