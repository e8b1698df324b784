"""Samples into requests: each is asked for once, a group at a time (docs/promises.md, G1 to G3)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.groups import plan_requests, sample_ids_at
from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed

ROUND = Round(phase="train", step=0, number=0)
FIRST = SampleId(phase="train", step=0, number=0, group=0, index=0)


class Batch(NamedTuple):
    """A generation batch, cut over ranks."""

    group_size: int
    rows: str
    """One letter for each sample's prompt."""

    borders: list[int]
    """Where ranks begin and end; ranks may be empty, and cut groups anywhere."""

    @property
    def sample_ids(self) -> list[SampleId]:
        return sample_ids_at(ROUND, range(len(self.rows)), self.group_size)

    @property
    def samples_of_ranks(self) -> list[list[tuple[SampleId, str]]]:
        samples = list(zip(self.sample_ids, self.rows, strict=True))
        return [samples[a:b] for a, b in itertools.pairwise(self.borders)]

    @property
    def uneven(self) -> list[SampleId]:
        size = self.group_size
        groups = [self.rows[i : i + size] for i in range(0, len(self.rows), size)]
        pairs = zip(self.sample_ids[::size], groups, strict=True)
        return [sample_id for sample_id, rows in pairs if len(set(rows)) > 1]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    group_size, num_groups = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    total = group_size * num_groups
    rows_of_groups = st.lists(st.sampled_from("ab"), min_size=num_groups, max_size=num_groups)
    rows = [row for row in draw(rows_of_groups) for _ in range(group_size)]
    for i in draw(st.sets(st.integers(0, total - 1), max_size=3)):
        rows[i] = draw(st.sampled_from("abc"))
    inner = draw(st.lists(st.integers(0, total), max_size=5))
    return Batch(group_size, "".join(rows), [0, *sorted(inner), total])


@settings(deadline=None, max_examples=200)
@given(batches())
def test_every_sample_is_asked_for_once_by_its_group(batch: Batch) -> None:
    """For any ranks, rows and groups; with the seed of its own place (S2 and S6)."""
    requests, uneven = plan_requests(batch.samples_of_ranks)
    assert uneven == batch.uneven
    seeds: dict[tuple[int, int], int | None] = {}
    for request in requests:
        is_uneven = request.first.group_id in batch.uneven
        assert request.count == (1 if is_uneven else batch.group_size)
        metadata = RequestMetadata(
            sample_id=request.first, count=request.count, run_seed=42, packed=True
        )
        for k, owner in enumerate(request.owners):
            rank, position = owner
            sample_id, row = batch.samples_of_ranks[rank][position]
            assert sample_id == request.first.following(k)
            assert row == batch.rows[batch.sample_ids.index(request.first)]
            assert owner not in seeds
            seeds[owner] = metadata.seed_of(k)
    assert seeds == {
        (rank, position): sample_seed(42, sample_id)
        for rank, samples in enumerate(batch.samples_of_ranks)
        for position, (sample_id, _) in enumerate(samples)
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_the_same_requests_for_every_number_of_ranks(num_ranks: int) -> None:
    """12 samples in groups of 4: with 6 ranks a group stands on two, with 2 one is cut in half.
    Neighbouring groups with equal rows stay two."""
    share = 12 // num_ranks
    batch = Batch(4, "aaaabbbbbbbb", [share * rank for rank in range(num_ranks + 1)])
    requests, uneven = plan_requests(batch.samples_of_ranks)
    groups = [replace(FIRST, group=group) for group in range(3)]
    assert [(r.first, r.count) for r in requests] == [(group, 4) for group in groups]
    assert uneven == []


def test_a_rank_with_its_own_engine_asks_for_its_part() -> None:
    """In colocation, a group of 4 on two ranks is one request on each."""
    for index, samples in zip((0, 2), Batch(4, "aaaa", [0, 2, 4]).samples_of_ranks, strict=True):
        [request] = plan_requests([samples])[0]
        assert (request.first, request.owners) == (FIRST.following(index), [(0, 0), (0, 1)])


def test_requests_name_the_owners_of_samples_in_order() -> None:
    requests, uneven = plan_requests(Batch(4, "aaaabbcb", [0, 3, 6, 8]).samples_of_ranks)
    together = [(0, 0), (0, 1), (0, 2), (1, 0)]
    single = [[(1, 1)], [(1, 2)], [(2, 0)], [(2, 1)]]
    assert [r.owners for r in requests] == [together, *single]
    assert uneven == [replace(FIRST, group=1)]


@pytest.mark.parametrize(
    "changes", [{"turn": 1}, {"step": 1}, {"number": 1}, {"phase": "eval"}, {"group": 1}]
)
def test_samples_of_other_rounds_and_turns_stay_apart(changes: dict[str, Any]) -> None:
    second = replace(FIRST, index=1, **changes)
    requests, uneven = plan_requests([[(FIRST, "a"), (second, "a")]])
    assert [r.first for r in requests] == [FIRST, second]
    assert uneven == []


def test_conversations_that_ended_leave_a_gap() -> None:
    """In a later turn, samples 0, 1 and 3 of a group of 4 go on, with equal rows."""
    turn = [(replace(FIRST, index=index, turn=1), "a") for index in (0, 1, 3)]
    assert [(r.first.index, r.count) for r in plan_requests([turn])[0]] == [(0, 2), (3, 1)]


def test_places_count_on_over_ranks_and_eval_batches() -> None:
    round_ = Round(phase="eval", step=7, number=1, first_group=10)
    assert [i.request_id for i in sample_ids_at(round_, [3, 4, 5], 2)] == [
        "eval-7.1-11-1",
        "eval-7.1-12-0",
        "eval-7.1-12-1",
    ]
