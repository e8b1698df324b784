"""Settings for CPUs apply without an accelerator, and never override the user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swift_grpo_ext.cpu import settings as cpu
from swift_grpo_ext.upstream.patches import make


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_accelerator", lambda: False)
    monkeypatch.setenv("RANK", "0")
    for name in (*cpu.CPU_ENVIRONMENT, *cpu.KEEP_FREED_MEMORY):
        monkeypatch.setenv(name, "to be removed")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    # pytest's own allocator and exit functions are left alone.
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *_: 1))
    monkeypatch.setattr(cpu.weakref, "finalize", lambda *_: None)


def arguments() -> SimpleNamespace:
    return SimpleNamespace(use_cpu=False, fp16=None, bf16=None, ddp_backend=None)


@pytest.mark.usefixtures("no_accelerator")
def test_defaults_without_an_accelerator() -> None:
    args = arguments()
    cpu.apply_cpu_settings(args, given=[])
    assert vars(args) == {
        **{"use_cpu": True, "fp16": False, "bf16": False},
        "ddp_backend": "gloo",
    }
    assert {name: os.environ[name] for name in cpu.CPU_ENVIRONMENT} == cpu.CPU_ENVIRONMENT


@pytest.mark.usefixtures("no_accelerator")
def test_what_was_saved_is_loaded_onto_a_rank(tmp_path: Path) -> None:
    """transformers before 5.19 loads so to resume."""
    cpu.apply_cpu_settings(arguments(), given=[])
    make(cpu.load_onto_ranks)
    torch.save(torch.arange(3), tmp_path / "optimizer.pt")
    for only in (True, False):
        saved = torch.load(tmp_path / "optimizer.pt", map_location="cpu:0", weights_only=only)
        assert saved.tolist() == [0, 1, 2]


def test_nothing_is_set_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    args = arguments()
    cpu.apply_cpu_settings(args, given=[])
    assert vars(args) == vars(arguments())
    assert "ACCELERATE_USE_CPU" not in os.environ


@pytest.mark.usefixtures("no_accelerator")
def test_the_users_own_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    args = arguments()
    args.bf16, args.ddp_backend = True, "mpi"
    cpu.apply_cpu_settings(args, given=["use_cpu"])
    assert (args.bf16, args.use_cpu, args.ddp_backend) == (True, False, "mpi")
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "4"


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize(
    ("engine_kwargs", "gib"), [({"kv_cache_memory_bytes": 2**28}, None), ({"seed": 1}, "1")]
)
def test_a_lone_process_and_the_size_of_a_cache(
    engine_kwargs: dict[str, int], gib: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no backend. vLLM's variable is not set if the engine's settings have a cache size:
    the variable would win."""
    monkeypatch.delenv("RANK")
    args = arguments()
    args.vllm_engine_kwargs = engine_kwargs
    cpu.apply_cpu_settings(args, given=[])
    assert args.ddp_backend is None
    assert os.environ.get("VLLM_CPU_KVCACHE_SPACE") == gib


LONE_RANK = """
import contextlib
import gc
import pathlib
import time
import torch
import torch.distributed as dist
from swift.rlhf_trainers import vllm_client  # as a rank has: DDP would import torch._dynamo here
from swift_grpo_ext.cpu.gloo import GlooCommunicator
from swift_grpo_ext.cpu.settings import _leave_group
from types import SimpleNamespace

def gloo_threads(fewer_than=1000):
    # A joined thread is in /proc until the kernel has removed it.
    deadline = time.monotonic() + 60
    while True:
        names = []
        for file in pathlib.Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):
                names.append(file.read_text())
        count = sum("gloo" in name for name in names)
        if count < fewer_than or time.monotonic() > deadline:
            return count

def start():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    trainer = SimpleNamespace(model=model)
    trainer.itself = trainer
    return store

weights = GlooCommunicator(SimpleNamespace(rank=0, world_size=1, store=start()))
weights.broadcast(torch.zeros(2), src=0)
both = gloo_threads()
del weights
own = gloo_threads(fewer_than=both)
_leave_group()
print(both, own, gloo_threads(fewer_than=1))

gc.freeze()  # what is left to collect is ours
for _ in range(100):
    start()
    sent, received = torch.zeros(2), torch.zeros(2)
    sent.mark = received.mark = "known to Python"
    dist.all_gather([received], sent)
    del sent, received
    _leave_group()
"""


@pytest.mark.stack
@pytest.mark.skipif(sys.platform != "linux", reason="threads are named in /proc")
def test_no_thread_of_gloo_outlives_its_groups() -> None:
    """The trainer is unreachable, as at the end of a rank, in a cycle that holds DDP's group. A
    thread that has yet to free a tensor needs the GIL; this causes no deadlock."""
    lone = subprocess.run(
        [sys.executable, "-c", LONE_RANK], check=True, capture_output=True, text=True, timeout=300
    )
    both, own, none = map(int, lone.stdout.split())
    assert both > own > none == 0
