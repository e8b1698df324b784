"""Rows to the ranks that ask, samples back to their own rank, failures to all: over real processes.

Three processes of one gloo group do everything once, and write down what each of them saw.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from swift_grpo_ext.rollout.rank_group import (
    MainRankGroup,
    RankGroup,
    TensorParallelGroup,
    training_ranks,
)

NUM_RANKS = 3
TENSOR_PARALLEL = [1, 2]
"""Ranks that run one engine together."""

Seen = dict[str, Any]


def exchange(ranks: RankGroup, everyone: list[int]) -> Seen:
    """What a rank of these ranks of the training sees of each exchange."""
    own, asks = everyone[ranks.rank], ranks.drives_engine
    seen: Seen = {"rank": ranks.rank, "asks": asks}
    seen["told"] = ranks.all_gather(f"parts of {own}")
    seen["rows"] = ranks.gather(f"row of {own}")
    seen["share"] = ranks.scatter([f"samples of {rank}" for rank in everyone] if asks else None)
    try:
        ranks.scatter(ConnectionError("server 1 is gone") if asks else None)
    except Exception as e:
        seen["failed"] = f"{type(e).__name__}: {e}"
    seen["after"] = ranks.scatter(list(range(10, 10 + len(everyone))) if asks else None)
    return seen


def run_rank(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=300),  # ranks import one after the other on a busy machine
    )
    group = dist.new_group(TENSOR_PARALLEL)
    seen = {"main": exchange(MainRankGroup(), list(range(NUM_RANKS)))}
    if rank in TENSOR_PARALLEL:
        seen["tensor parallel"] = exchange(TensorParallelGroup(group), TENSOR_PARALLEL)
    (folder / str(rank)).write_bytes(pickle.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_exchange_over_real_processes(tmp_path: Path) -> None:
    """Rank 0 alone calls the servers: all ranks know all parts, rows reach rank 0 alone, and each
    sample its own rank (G2). Ranks 1 and 2 of the training are ranks 0 and 1 of an engine: both
    call it."""
    mp.spawn(run_rank, args=(tmp_path,), nprocs=NUM_RANKS)
    for rank in range(NUM_RANKS):
        seen = pickle.loads((tmp_path / str(rank)).read_bytes())
        error = "ConnectionError: server 1 is gone"
        assert seen["main"] == {
            "rank": rank,
            "asks": rank == 0,
            "told": ["parts of 0", "parts of 1", "parts of 2"],
            "rows": [] if rank else [f"row of {r}" for r in range(NUM_RANKS)],
            "share": f"samples of {rank}",
            "failed": f"RolloutError: The rollout failed on rank 0: {error}" if rank else error,
            "after": 10 + rank,  # in step after a failure
        }
        if rank in TENSOR_PARALLEL:
            assert seen["tensor parallel"] == {
                "rank": rank - 1,
                "asks": True,
                "told": ["parts of 1", "parts of 2"],
                "rows": ["row of 1", "row of 2"],
                "share": f"samples of {rank}",
                "failed": error,
                "after": 9 + rank,
            }


def test_objects_of_training_ranks_go_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog ends ranks that wait through a long rollout; gloo's bound is the run's."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert type(training_ranks(60)) is RankGroup
    made: list[timedelta] = []

    def new_group(*, backend: str, timeout: timedelta) -> None:
        assert backend == "gloo"
        made.append(timeout)

    fakes: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_rank": lambda _group: 0,
        "get_world_size": lambda _group: 2,
        "new_group": new_group,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake)
    for backend, timeouts in (("gloo", []), ("nccl", [timedelta(seconds=60)])):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        ranks = training_ranks(60)
        assert isinstance(ranks, MainRankGroup)
        assert (ranks.rank, ranks.size, ranks.drives_engine) == (0, 2, True)
        assert made == timeouts
