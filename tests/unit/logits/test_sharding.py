"""Ranks that share weights agree; `two_ranks.py` has real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swift_grpo_ext.logits.sharding import ShardRanks


def test_what_ranks_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mesh has two dimensions; in each, another rank has other numbers."""
    alone = ShardRanks()
    assert (alone.all(True), alone.all(False)) == (True, False)

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.clamp_(min=group.highest)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ranks: Any = ShardRanks((SimpleNamespace(highest=0), SimpleNamespace(highest=1)))
    assert not ranks.all(True)
    own = torch.tensor([0.5, 2.0])
    assert ranks.highest(own).tolist() == [1.0, 2.0]
    assert own.tolist() == [0.5, 2.0]
    agreeing: Any = ShardRanks((SimpleNamespace(highest=0),))
    assert (agreeing.all(True), agreeing.all(False)) == (True, False)
