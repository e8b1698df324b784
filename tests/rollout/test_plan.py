"""Samples into requests: each is asked for once, a group at a time (docs/promises.md, G1 to G3)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_grpo_ext.rollout.generate import plan_requests
from swift_grpo_ext.sampling.rounds import Round, sample_ids_at
from swift_grpo_ext.sampling.seeding import SampleId

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
    """For any ranks, rows and groups (S2 and S6: vLLM counts a request's seeds up)."""
    size = batch.group_size
    starts = range(0, len(batch.rows), size)
    requests, uneven = plan_requests(batch.samples_of_ranks)
    assert uneven == [batch.sample_ids[i] for i in starts if len(set(batch.rows[i : i + size])) > 1]
    found: dict[tuple[int, int], SampleId] = {}
    for request in requests:
        count = len(request.owners)
        assert count == (1 if request.first.group_id in uneven else size)
        for k, owner in enumerate(request.owners):
            assert owner not in found
            found[owner] = replace(request.first, index=request.first.index + k)
    assert found == {
        (rank, position): sample_id
        for rank, samples in enumerate(batch.samples_of_ranks)
        for position, (sample_id, _) in enumerate(samples)
    }


@pytest.mark.parametrize(
    "changes",
    [{"turn": 1}, {"step": 1}, {"number": 1}, {"phase": "eval"}, {"group": 1}, {"index": 2}],
)
def test_samples_of_other_rounds_and_turns_stay_apart(changes: dict[str, Any]) -> None:
    """Also those of a group between which a conversation has ended."""
    second = replace(FIRST, **{"index": 1, **changes})
    requests, uneven = plan_requests([[(FIRST, "a"), (second, "a")]])
    assert [r.first for r in requests] == [FIRST, second]
    assert uneven == []
