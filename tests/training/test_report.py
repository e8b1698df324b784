"""One gather ends a round."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.gap import RoundGap
from swift_grpo_ext.training.report import Round, RoundReport, warn_duplicates

NAME = SampleId(phase="train", step=3, number=0, group=0, index=0)


def test_a_round_is_measured_once_all_its_batches_are() -> None:
    batches: list[Any] = [SimpleNamespace(old_per_token_logps=None) for _ in range(2)]
    round_ = Round([], [([], batch) for batch in batches])
    for batch in batches:
        assert not round_.is_measured
        batch.old_per_token_logps = 0
    assert round_.is_measured


@pytest.mark.parametrize(
    ("hashes", "count"), [([["a", "b"], ["c"]], 0), ([["a", "b"], ["a"]], 1), ([["a"] * 3], 2)]
)
def test_duplicates_are_counted_over_ranks(
    hashes: list[list[str]], count: int, warnings: list[str]
) -> None:
    reports = [RoundReport(RoundGap({}), prompt_hashes=own) for own in hashes]
    for _ in range(2):
        warn_duplicates(reports, NAME)
    total = sum(map(len, hashes))
    assert [text.partition(" prompts")[0] for text in warnings] == [
        f"train round 3.0: {count} of {total}"
    ] * bool(count)
