"""Ranks in real processes: rows reach the ranks that call engines, samples come back to their rank
(G2), failures reach all, and each wait has a bound (F2)."""

import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from swift_grpo_ext import ranks
from swift_grpo_ext.ranks import MainRankGroup, RankGroup, TensorParallelGroup, training_ranks

NUM_RANKS = 3
TENSOR_PARALLEL = [1, 2]
"""The ranks that share an engine."""

Seen = dict[str, Any]


def exchange(group: RankGroup, everyone: list[int]) -> Seen:
    """Make each exchange on a rank of this group; return its results. `everyone` has the numbers of
    the group's ranks in the training."""
    own, asks = everyone[group.rank], group.drives_engine
    seen: Seen = {"rank": group.rank, "asks": asks, "gathered": group.all_gather(own)}
    seen["rows"] = group.gather(f"row of {own}")
    seen["share"] = group.scatter([f"samples of {rank}" for rank in everyone] if asks else None)
    try:
        group.scatter(ConnectionError("server 1 is gone") if asks else None)
    except Exception as e:
        seen["failed"] = f"{type(e).__name__}: {e}"
    seen["after"] = group.scatter([10 + rank for rank in everyone] if asks else None)
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
    main = MainRankGroup(dist.new_group())
    seen = {"main": exchange(main, list(range(NUM_RANKS)))}
    if rank in TENSOR_PARALLEL:
        seen["tensor parallel"] = exchange(TensorParallelGroup(group), TENSOR_PARALLEL)
    if rank == 1:  # it lives on until the barrier
        main.end()
    try:
        main.all_gather("after the end of one")
    except RuntimeError as e:
        seen["ended"] = str(e)
    (folder / str(rank)).write_bytes(pickle.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_exchange_over_real_processes(tmp_path: Path) -> None:
    """Rank 0 alone calls servers: it gets all rows, and each rank gets its samples. Ranks 1 and 2
    of the training are ranks 0 and 1 of an engine, and both call it."""
    mp.spawn(run_rank, args=(tmp_path,), nprocs=NUM_RANKS)
    for rank in range(NUM_RANKS):
        seen = pickle.loads((tmp_path / str(rank)).read_bytes())
        # gloo reports "closed by peer", or "reset" if a message was on its way.
        assert ("Connection " in seen.get("ended", "")) is (rank != 1)
        error = "ConnectionError: server 1 is gone"
        assert seen["main"] == {
            **{"rank": rank, "asks": rank == 0, "gathered": [0, 1, 2]},
            "rows": [] if rank else [f"row of {r}" for r in range(NUM_RANKS)],
            "share": f"samples of {rank}",
            "failed": f"RolloutError: The rollout failed on rank 0: {error}" if rank else error,
            "after": 10 + rank,  # in step after a failure
        }
        if rank in TENSOR_PARALLEL:
            assert seen["tensor parallel"] == {
                **{"rank": rank - 1, "asks": True, "gathered": TENSOR_PARALLEL},
                "rows": ["row of 1", "row of 2"],
                **{"share": f"samples of {rank}", "failed": error, "after": 10 + rank},
            }


def test_objects_of_training_ranks_go_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog would end ranks that wait for a long rollout; gloo takes the run's bound. A
    default group of gloo gets a second one too: only that one may be ended. Ranks that do not reach
    one another end within a bound (F2), and the error names the setting."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert type(training_ranks(60)) is RankGroup
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda _group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _group=None: 2)
    monkeypatch.setattr(dist, "new_group", lambda **given: made.append(given))
    group = training_ranks(60)
    assert isinstance(group, MainRankGroup)
    assert (group.rank, group.size, group.drives_engine) == (0, 2, True)
    assert made == [{"backend": "gloo", "timeout": timedelta(seconds=60)}]

    def refused(**_: Any) -> None:
        raise RuntimeError("refused")

    monkeypatch.setattr(ranks, "SECONDS_TO_CONNECT", 0.1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    for new_group, cause in (
        (refused, "refused"),
        (lambda **_: time.sleep(30), "no answer within 0.1 s"),
    ):
        monkeypatch.setattr(dist, "new_group", new_group)
        expected = rf"over gloo \({cause}\)\. .* at eth7\. Set GLOO_SOCKET_IFNAME on each node"
        with pytest.raises(ConnectionError, match=expected):
            training_ranks(60)
