"""Settings for CPUs apply without an accelerator, and never override the user's own."""

from __future__ import annotations

import os
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
