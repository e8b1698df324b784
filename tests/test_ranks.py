"""Rows to the ranks that ask, samples back to their own rank, failures to all: over real processes.

Three processes of one gloo group do everything once, and write down what each of them saw. Two
nodes are two network namespaces, whose hosts' name stands for 127.0.1.1, as Debian has it.
"""

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
    main = MainRankGroup(dist.new_group())
    seen = {"main": exchange(main, list(range(NUM_RANKS)))}
    if rank in TENSOR_PARALLEL:
        seen["tensor parallel"] = exchange(TensorParallelGroup(group), TENSOR_PARALLEL)
    if rank == 1:  # and it lives on, until the barrier
        main.end()
    try:
        main.all_gather("after the end of one")
    except RuntimeError as e:
        seen["ended"] = str(e)
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
        # gloo says "closed by peer", or "reset" where something was on its way.
        assert ("Connection " in seen.get("ended", "")) is (rank != 1)
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
        """Also beside a default group of gloo's: its own can be ended."""
        assert backend == "gloo"
        made.append(timeout)

    fakes: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_rank": lambda _group=None: 0,
        "get_world_size": lambda _group=None: 2,
        "new_group": new_group,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(dist, name, fake)
    ranks = training_ranks(60)
    assert isinstance(ranks, MainRankGroup)
    assert (ranks.rank, ranks.size, ranks.drives_engine) == (0, 2, True)
    assert made == [timedelta(seconds=60)]


# --- several nodes ---


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces, joined by the interfaces NAMEv of 10.99.73.1 and .2. The
    first is `main`."""
    names = (f"gloo{os.getpid()}a", f"gloo{os.getpid()}b")
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("makes network namespaces, as root with iproute2")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    folders = [Path("/etc/netns", name) for name in names]
    had_folder = folders[0].parent.is_dir()
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            veths = [f"{name}v" for name in names]
            ends = ("netns", names[0], "type", "veth", "peer", "name", veths[1], "netns", names[1])
            ip("link", "add", veths[0], *ends)
        except (subprocess.CalledProcessError, OSError) as e:
            pytest.skip(f"no network namespaces here ({e})")
        for k, (name, veth) in enumerate(zip(names, veths, strict=True)):
            ip("-n", name, "addr", "add", f"10.99.73.{k + 1}/24", "dev", veth)
            for link in ("lo", veth):
                ip("-n", name, "link", "set", link, "up")
            folders[k].mkdir(parents=True)
            main = "10.99.73.1" if k else "127.0.1.1"
            (folders[k] / "hosts").write_text(f"127.0.1.1 {socket.gethostname()}\n{main} main\n")
        yield names
    finally:
        for name, folder in zip(names, folders, strict=True):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
        if not had_folder and folders[0].parent.is_dir():
            folders[0].parent.rmdir()


OF_NODE = """
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
os._exit(0)  # a group that was not made may hold a thread
"""


def run_nodes(nodes: tuple[str, str], *, keeps_interface: bool) -> list[Any]:
    """What the only rank of each node saw, and its seconds."""
    running = []
    for rank, node in enumerate(nodes):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "main",
            "MASTER_PORT": "29573",
            INTERFACE: f"{node}v",
            "KEEPS_INTERFACE": "1" if keeps_interface else "",
        }
        argv = ["ip", "netns", "exec", node, sys.executable, "-c", OF_NODE]
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
    """Each within its bound; the host's name stands for 127.0.1.1 on both."""
    for seen, seconds in run_nodes(nodes, keeps_interface=False):
        assert seen.startswith("ConnectionError: The training's ranks do not reach one another")
        assert f"This one listens at the address of {socket.gethostname()}. Set " in seen
        assert "Set GLOO_SOCKET_IFNAME on each node to the network interface" in seen
        assert seconds < 30
