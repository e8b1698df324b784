"""Rows to the ranks that ask, samples back to their own rank, failures to all: over real processes.

Three processes of one gloo group do everything once, and write down what each of them saw.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from swift_grpo_ext.rollout.rank_group import (
    MainRankGroup,
    RankGroup,
    SingleRank,
    TensorParallelGroup,
    training_ranks,
)

NUM_RANKS = 3
TENSOR_PARALLEL = [1, 2]
"""Ranks that run one engine together."""

Seen = dict[str, Any]


class Row:
    """A prompt that counts, in each process, how many of its kind arrived there."""

    arrived = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        Row.arrived += 1


def names(rows: list[Row]) -> tuple[list[str], int]:
    """Of these rows, and how many rows arrived here since the last call."""
    arrived, Row.arrived = Row.arrived, 0
    return [row.name for row in rows], arrived


def error_of(call: Callable[[], Any]) -> tuple[str, str] | None:
    try:
        call()
    except Exception as e:
        return type(e).__name__, str(e)
    return None


def through_main(rank: int) -> Seen:
    rank_group: RankGroup = MainRankGroup()
    seen: Seen = {"rank": rank_group.rank, "asks": rank_group.drives_engine}
    seen["told"] = rank_group.all_gather(f"parts of {rank}")
    seen["rows"] = names(rank_group.gather(Row(f"row of {rank}")))
    samples = (
        [Row(f"samples of {r}") for r in range(NUM_RANKS)] if rank_group.drives_engine else None
    )
    seen["share"] = names([rank_group.scatter(samples)])
    failure = ConnectionError("server 1 is gone") if rank_group.drives_engine else None
    seen["failed"] = error_of(lambda: rank_group.scatter(failure))
    seen["after"] = rank_group.scatter([10, 11, 12] if rank_group.drives_engine else None)
    return seen


def tensor_parallel(rank: int, group: Any) -> Seen:
    rank_group: RankGroup = TensorParallelGroup(group)
    seen: Seen = {"rank": rank_group.rank, "asks": rank_group.drives_engine}
    seen["told"] = rank_group.all_gather(f"parts of {rank}")
    seen["rows"] = names(rank_group.gather(Row(f"row of {rank}")))
    # All ask the engine the same, and get the same: nothing travels.
    samples = [Row(f"samples of {r}") for r in TENSOR_PARALLEL]
    seen["share"] = names([rank_group.scatter(samples)])
    seen["failed"] = error_of(lambda: rank_group.scatter(ValueError("too long")))
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
    seen = {"main": through_main(rank)}
    if rank in TENSOR_PARALLEL:
        seen["tensor parallel"] = tensor_parallel(rank, group)
    (folder / str(rank)).write_bytes(pickle.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Seen]]:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("exchange")
    mp.spawn(run_rank, args=(folder,), nprocs=NUM_RANKS)
    return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(NUM_RANKS)]


def test_rank_0_alone_calls_the_servers(seen: list[dict[str, Seen]]) -> None:
    """All ranks know all parts, rows reach rank 0 alone, and each sample its own rank (G2)."""
    told = ("RolloutError", "The rollout failed on rank 0: ConnectionError: server 1 is gone")
    for rank in range(NUM_RANKS):
        rows = [f"row of {r}" for r in range(NUM_RANKS)]
        assert seen[rank]["main"] == {
            "rank": rank,
            "asks": rank == 0,
            "told": ["parts of 0", "parts of 1", "parts of 2"],
            "rows": ([], 0) if rank else (rows, NUM_RANKS),
            "share": ([f"samples of {rank}"], 1),
            "failed": told if rank else ("ConnectionError", "server 1 is gone"),
            "after": 10 + rank,  # in step after a failure
        }


def test_all_ranks_of_a_tensor_parallel_engine_call_it(seen: list[dict[str, Seen]]) -> None:
    """Ranks 1 and 2 of the training are ranks 0 and 1 of the engine; no sample travels."""
    for number, rank in enumerate(TENSOR_PARALLEL):
        assert seen[rank]["tensor parallel"] == {
            "rank": number,
            "asks": True,
            "told": ["parts of 1", "parts of 2"],
            "rows": (["row of 1", "row of 2"], 2),
            "share": ([f"samples of {rank}"], 0),
            "failed": ("ValueError", "too long"),
        }


def test_a_process_with_an_engine_of_its_own_exchanges_with_itself() -> None:
    rank_group: RankGroup = SingleRank()
    row = Row("row")
    assert (rank_group.rank, rank_group.drives_engine) == (0, True)
    assert rank_group.all_gather("parts") == ["parts"]
    assert rank_group.gather(row) == [row]
    assert rank_group.scatter(["samples"]) == "samples"
    with pytest.raises(ValueError, match="too long"):
        rank_group.scatter(ValueError("too long"))


def test_objects_of_training_ranks_go_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog ends ranks that wait through a long rollout; gloo's bound is the run's."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert isinstance(training_ranks(60), SingleRank)
    calls: list[tuple[str, Any]] = []

    def collective(name: str) -> Callable[..., None]:
        def call(*args: Any, group: Any, **_: Any) -> None:
            calls.append((name, group))
            if name == "scatter_object_list":
                args[0][0] = (None, "share")

        return call

    fakes: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_rank": lambda _group: 0,
        "get_world_size": lambda _group: 2,
        "new_group": lambda **settings: settings,
        **{
            name: collective(name)
            for name in ("all_gather_object", "gather_object", "scatter_object_list")
        },
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake)
    for backend, group in (
        ("nccl", {"backend": "gloo", "timeout": timedelta(seconds=60)}),
        ("gloo", None),
    ):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        ranks = training_ranks(60)
        ranks.all_gather(1)
        ranks.gather(1)
        assert ranks.scatter([1, 2]) == "share"
        assert calls == [(name, group) for name in list(fakes)[4:]]
        calls.clear()
