"""Names of rounds are unique in a run; they and the order of prompts are the same in a resumed run
(S1, S4)."""

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import RepeatSampler

from swift_grpo_ext.sampling.rounds import RoundClock, RoundNames, sample_ids_at
from swift_grpo_ext.sampling.sampler import EpochSampler
from swift_grpo_ext.sampling.seeding import RoundId
from tests.rig.arguments import training_arguments

EPOCHS = 3


CLOCKS = st.tuples(*(st.integers(*span) for span in ((1, 8), (1, 8), (1, 6), (0, 3)))).map(
    lambda drawn: RoundClock(
        batches_per_step=drawn[0],
        batches_per_round=drawn[1],
        batches_per_epoch=drawn[1] * drawn[2],
        max_resamples=drawn[3],
    )
)
"""`steps_per_generation` is below, above, equal to `gradient_accumulation_steps`, or coprime."""


def run(clock: RoundClock) -> Iterator[tuple[int, int, int, RoundId]]:
    """Yield number, epoch, optimizer step and round of each training batch of an uninterrupted run.

    This counts as transformers' and TRL's loops do: a step ends with its epoch at the latest, and a
    round is generated whenever `batches_per_round` batches are used up."""
    step = number = 0
    round_ = RoundId("train", 0, 0)
    for epoch in range(EPOCHS):
        left = clock.batches_per_epoch
        while left:
            begun = 0
            for _ in range(min(clock.batches_per_step, left)):
                if number % clock.batches_per_round == 0:
                    round_ = RoundId("train", step, begun)
                    begun += 1
                yield number, epoch, step, round_
                number += 1
                left -= 1
            step += 1


def names_from(clock: RoundClock, first_batch: int) -> list[list[tuple[RoundId, int | None]]]:
    """Return, for each batch from `first_batch` on, its regular round, then its resample rounds
    with their positions."""
    names, found = RoundNames(clock), []
    for batch in range(first_batch, EPOCHS * clock.batches_per_epoch):
        names.begin_training(batch)
        rounds: list[tuple[RoundId, int | None]] = [(names.current, None)]
        rounds += [names.added(number) for number in range(clock.max_resamples)]
        found.append(rounds)
    return found


@given(CLOCKS, st.data())
def test_names_tell_where_rounds_begin_and_are_unique(
    clock: RoundClock, data: st.DataObject
) -> None:
    """A resumed run has the names of the uninterrupted one, also from the middle of a round, and of
    the rounds that dynamic sampling adds."""
    names, first_batches = RoundNames(clock), dict[int, int]()
    for batch, epoch, step, round_ in run(clock):
        assert clock.round_at(batch) == round_
        assert clock.epoch_of_step(step) == epoch
        names.begin_training(batch - clock.batches_per_round, ahead=True)  # `--async_generate`
        assert names.current == round_
        first_batches.setdefault(step, batch)
    assert {step: clock.batches_at(step) for step in first_batches} == first_batches
    assert clock.batches_at(len(first_batches)) == EPOCHS * clock.batches_per_epoch
    all_names = names_from(clock, 0)
    rounds = all_names[:: clock.batches_per_round]
    unique = {round_ for of_one in rounds for round_, _ in of_one}
    assert len(unique) == len(rounds) * (1 + clock.max_resamples)
    positions = [position for of_one in rounds for _, position in of_one[1:]]
    assert len(set(positions)) == len(positions)
    assert all(position is not None and position >= 0 for position in positions)
    first_batch = data.draw(st.sampled_from([*first_batches.values()]), label="first batch")
    assert names_from(clock, first_batch) == all_names[first_batch:]


def test_evaluations_are_counted_within_their_step() -> None:
    """Several validation sets of one step have different noise; the next step counts from 0. Groups
    count on over ranks and batches."""
    sample_ids = sample_ids_at(RoundId("eval", 7, 1), [3, 4, 5], 2, first_group=10)
    request_ids = [sample_id.request_id for sample_id in sample_ids]
    assert request_ids == ["eval-7.1-11-1", "eval-7.1-12-0", "eval-7.1-12-1"]
    names = RoundNames(RoundClock(batches_per_step=1, batches_per_round=1, batches_per_epoch=9))
    names.begin_training(3)
    rounds = []
    for step in (0, 5, 5, 5, 9):
        names.begin_evaluation(step)
        rounds += [names.take_batch(groups, training=False) for groups in (2, 3)]
    assert names.upcoming(training=False) == (RoundId("eval", 9, 0), 5)
    assert names.take_batch(2, training=True) == (RoundId("train", 3, 0), 0)
    assert names.upcoming(training=True) == (RoundId("train", 3, 0), 0)
    numbered = [(0, 0), (5, 0), (5, 1), (5, 2), (9, 0)]
    assert rounds == [(RoundId("eval", *name), first) for name in numbered for first in (0, 2)]


SETTINGS = {
    **{"steps_per_generation": 4, "gradient_accumulation_steps": 2, "num_iterations": 1},
    **{"generation_batch_size": 12, "num_generations": 4},
    **{"max_resample_times": 5, "dynamic_sample": False},
}


def test_the_clock_of_a_run() -> None:
    for changes, num_rows, parallel, expected in (
        ({"num_iterations": 3}, 7, 1, (12, 24, 0)),
        ({}, 7, 2, (8, 16, 0)),
        ({"dynamic_sample": True}, 6, 1, (4, 8, 5)),
        ({}, 2, 1, (4, 4, 0)),  # fewer rows than a batch: an epoch is one round
    ):
        clock = RoundClock.of(training_arguments(**(SETTINGS | changes)), num_rows, parallel)
        found = clock.batches_per_round, clock.batches_per_epoch, clock.max_resamples
        assert (clock.batches_per_step, *found) == (2, *expected)
        assert isinstance(clock.batches_per_epoch, int)
    small = RoundClock(batches_per_step=2, batches_per_round=2, batches_per_epoch=4)
    before = [small.generation_batch_before(batch) for batch in range(0, 10, 2)]
    assert before == [(0, 1), (0, 0), (0, 1), (1, 0), (1, 1)]


UPSTREAM = st.fixed_dictionaries(
    {
        "data_source": st.integers(1, 20).map(range),
        "mini_repeat_count": st.integers(1, 4),
        "batch_size": st.integers(1, 6),
        "repeat_count": st.integers(1, 3),
        "shuffle": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


@given(UPSTREAM)
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
