"""Sharded weights have the tokens, losses, KL terms and gradient norms of plain data
parallelism, within float error (R2), with logits in chunks of 16 positions (L4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.sharded import (
    COLOCATED,
    STRICT,
    TUNINGS,
    assert_same,
    plain_training,
    training,
)

CUT = ("--max_length", "45", "--truncation_strategy", "left")
"""A rank with cut rows alone has none to compare. The other one may not wait for it."""


@pytest.mark.parametrize("shards", ["fsdp2", "zero3"])
def test_numbers_are_those_of_plain_ranks(
    shards: str, assets: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ranks have completions of unequal length. Updates reach vLLM in parts of the weights."""
    argv = (*TUNINGS["full"], *COLOCATED, *CUT)
    plain = plain_training(assets, tmp_path_factory, "cut", *argv)
    argv += (*STRICT, "--move_model_batches", "2")
    sharded = training(assets, tmp_path / "run", *argv, shards=shards)
    assert all("rollout_gap/max" in step for step in sharded.steps)
    assert_same(sharded, plain)
