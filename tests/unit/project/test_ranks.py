"""Ranks in real processes: rows reach the ranks that call engines, samples come back to their rank
(G2), failures reach all, and each wait has a bound (F2)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from swift_grpo_ext.ranks import (
    INTERFACE,
    MainRankGroup,
    RankGroup,
    TensorParallelGroup,
    training_ranks,
)

NUM_RANKS = 3
TENSOR_PARALLEL = [1, 2]
"""The ranks that share an engine."""

Seen = dict[str, Any]


def exchange(ranks: RankGroup, everyone: list[int]) -> Seen:
    """Make each exchange on a rank of this group; return its results. `everyone` has the numbers of
    the group's ranks in the training."""
    own, asks = everyone[ranks.rank], ranks.drives_engine
    seen: Seen = {"rank": ranks.rank, "asks": asks}
    seen["gathered"] = ranks.all_gather(f"parts of {own}")
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
            "rank": rank,
            "asks": rank == 0,
            "gathered": ["parts of 0", "parts of 1", "parts of 2"],
            "rows": [] if rank else [f"row of {r}" for r in range(NUM_RANKS)],
            "share": f"samples of {rank}",
            "failed": f"RolloutError: The rollout failed on rank 0: {error}" if rank else error,
            "after": 10 + rank,  # in step after a failure
        }
        if rank in TENSOR_PARALLEL:
            assert seen["tensor parallel"] == {
                "rank": rank - 1,
                "asks": True,
                "gathered": ["parts of 1", "parts of 2"],
                "rows": ["row of 1", "row of 2"],
                "share": f"samples of {rank}",
                "failed": error,
                "after": 9 + rank,
            }


def test_objects_of_training_ranks_go_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog would end ranks that wait for a long rollout; gloo takes the run's bound. A
    default group of gloo gets a second one too: only that one may be ended."""
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert type(training_ranks(60)) is RankGroup
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda _group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _group=None: 2)
    monkeypatch.setattr(dist, "new_group", lambda **given: made.append(given))
    ranks = training_ranks(60)
    assert isinstance(ranks, MainRankGroup)
    assert (ranks.rank, ranks.size, ranks.drives_engine) == (0, 2, True)
    assert made == [{"backend": "gloo", "timeout": timedelta(seconds=60)}]


# --- several nodes ---


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces. Interfaces NAMEv join them, with the addresses
    10.99.73.1 (the host `main`) and 10.99.73.2."""
    names = (f"gloo{os.getpid()}a", f"gloo{os.getpid()}b")
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("makes network namespaces, as root with iproute2")

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)

    parent = Path("/etc/netns")
    had_folder = parent.is_dir()
    one, other = names
    try:
        try:
            ip(f"netns add {one}")
            ip(f"netns add {other}")
            ip(f"link add {one}v netns {one} type veth peer name {other}v netns {other}")
        except (subprocess.CalledProcessError, OSError) as e:
            pytest.skip(f"no network namespaces here ({e})")
        for k, name in enumerate(names):
            ip(f"-n {name} addr add 10.99.73.{k + 1}/24 dev {name}v")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set {name}v up")
            (parent / name).mkdir(parents=True)
            main = "10.99.73.1" if k else "127.0.1.1"
            hosts = f"127.0.1.1 {socket.gethostname()}\n{main} main\n"
            (parent / name / "hosts").write_text(hosts)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(parent / name, ignore_errors=True)
        if not had_folder and parent.is_dir():
            parent.rmdir()


NODE_PROGRAM = """
import json, os, time
import torch.distributed as dist
from datetime import timedelta
from swift_grpo_ext import ranks as ranks_module

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
keeps_interface = bool(os.environ["KEEPS_INTERFACE"])
if not keeps_interface:
    del os.environ["GLOO_SOCKET_IFNAME"]
ranks_module.SECONDS_TO_CONNECT = 60.0 if keeps_interface else 5.0
start = time.monotonic()
try:
    seen = ranks_module.training_ranks(60.0).all_gather(os.environ.get("GLOO_SOCKET_IFNAME"))
except Exception as e:
    seen = f"{type(e).__name__}: {e}"
print(json.dumps([seen, time.monotonic() - start]), flush=True)
os._exit(0)  # a thread may still wait for a group
"""


def run_nodes(nodes: tuple[str, str], *, keeps_interface: bool) -> list[Any]:
    """Return the result and the seconds of each node's only rank."""
    running = []
    for rank, node in enumerate(nodes):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": "main", "MASTER_PORT": "29573", INTERFACE: f"{node}v"}
        env = os.environ | place | {"KEEPS_INTERFACE": "1" if keeps_interface else ""}
        argv = ["ip", "netns", "exec", node, sys.executable, "-c", NODE_PROGRAM]
        running.append(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_nodes_reach_one_another_by_the_interface_that_is_set(nodes: tuple[str, str]) -> None:
    interfaces = [f"{node}v" for node in nodes]
    for seen, _ in run_nodes(nodes, keeps_interface=True):
        assert seen == interfaces


def test_nodes_that_do_not_reach_one_another_name_the_setting(nodes: tuple[str, str]) -> None:
    """Each ends within its bound (F2). Both hosts' names are 127.0.1.1."""
    for seen, seconds in run_nodes(nodes, keeps_interface=False):
        assert seen.startswith("ConnectionError: The training's ranks do not reach one another")
        assert "Set GLOO_SOCKET_IFNAME on each node" in seen
        assert seconds < 30
