"""What of a model is sharded, and among whom: in a group of one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

from swift_grpo_ext.logits.sharding import ShardRanks, shard_ranks
from swift_grpo_ext.logits.shim import LogitsShim
from tests.logits.models import build, inputs_of


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_ranks_that_share_weights(group: dist.ProcessGroup) -> None:
    def fsdp1(strategy: ShardingStrategy) -> nn.Module:
        device = torch.device("cpu")
        return FullyShardedDataParallel(
            nn.Linear(2, 2), sharding_strategy=strategy, device_id=device
        )

    fsdp2 = nn.Linear(2, 2)
    fully_shard(fsdp2)
    zero3: Any = nn.Linear(2, 2)
    zero3.weight.ds_id, zero3.weight.ds_process_group = 0, group
    mesh = fsdp2.weight.device_mesh

    assert shard_ranks(nn.Linear(2, 2)) == ShardRanks((), "cpu")
    assert shard_ranks(fsdp1(ShardingStrategy.NO_SHARD)) == ShardRanks((), "cpu")
    full = shard_ranks(fsdp1(ShardingStrategy.FULL_SHARD))
    assert full == ShardRanks((group,), torch.device("cpu"))
    assert shard_ranks(fsdp2) == ShardRanks(tuple(mesh.get_all_groups()), "cpu")
    assert shard_ranks(zero3) == ShardRanks((group,), torch.device("cpu"))


def test_what_ranks_agree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two dimensions of a mesh, in each of which another rank has other numbers."""
    alone = ShardRanks()
    assert (alone.all(True), alone.all(False), alone.most(3)) == (True, False, 3)

    def all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MAX
        tensor.clamp_(min=group.highest)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    ranks: Any = ShardRanks((SimpleNamespace(highest=0), SimpleNamespace(highest=1)))
    assert (ranks.all(True), ranks.most(0), ranks.most(3)) == (False, 1, 3)
    own = torch.tensor([0.5, 2.0])
    assert ranks.highest(own).tolist() == [1.0, 2.0]
    assert own.tolist() == [0.5, 2.0]
    agreeing: Any = ShardRanks((SimpleNamespace(highest=0),))
    assert (agreeing.all(True), agreeing.all(False)) == (True, False)


@pytest.mark.parametrize(
    ("release", "is_alone", "is_refused"),
    [("2.10.0", True, True), ("2.10.0", False, False), ("2.11.0", True, False)],
)
def test_a_head_that_fsdp2_shards_alone(
    release: str,
    is_alone: bool,
    is_refused: bool,
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 2.11 the backward of its second chunk ended the training (`mixed torch.Tensor and
    DTensor`)."""
    model, inputs = build("Qwen2"), inputs_of("Qwen2")
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    mask[:, 4:10] = True
    targets = inputs["input_ids"][mask]
    monkeypatch.setattr(torch, "__version__", release)
    expected = LogitsShim(model).logps(model, inputs, mask, targets).logps_N.detach()
    fully_shard([model.lm_head] if is_alone else [model.model.norm, model.lm_head])
    fully_shard(model)
    warned: list[str] = []
    shim = LogitsShim(model, warn=warned.append)
    for _ in range(2):
        found = shim.logps(model, inputs, mask, targets, chunk_size=4).logps_N
        torch.testing.assert_close(found.detach(), expected)
    told = "works from torch 2.11 on. --logps_chunk_size has no effect"
    assert [told in text for text in warned] == [True] * is_refused
