"""Settings for CPUs apply without an accelerator, and never override the user's own."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.cpu import settings as cpu
from swift_grpo_ext.upstream.patches import make

SETTINGS: dict[str, Any] = {"use_cpu": False, "fp16": None, "bf16": None, "ddp_backend": None}
FOR_CPU = {"use_cpu": True, "fp16": False, "bf16": False, "ddp_backend": "gloo"}


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_accelerator", lambda: False)
    monkeypatch.setenv("RANK", "0")
    for name in (*cpu.CPU_ENVIRONMENT, *cpu.KEEP_FREED_MEMORY):
        monkeypatch.setenv(name, "to be removed")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    # pytest's own allocator and exit functions are left alone.
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *_: 1))
    monkeypatch.setattr(cpu.weakref, "finalize", lambda *_: None)


def applied(given: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    """Return settings after those for CPUs were applied."""
    args = SimpleNamespace(**(SETTINGS | settings))
    cpu.apply_cpu_settings(args, given)
    return vars(args)


def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in cpu.CPU_ENVIRONMENT if name in os.environ}


def test_defaults_without_an_accelerator() -> None:
    assert applied() == FOR_CPU
    assert environment() == cpu.CPU_ENVIRONMENT


def test_nothing_is_set_beside_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    assert applied() == SETTINGS
    assert environment() == {}


def test_the_users_own_settings_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    args = applied(given=("use_cpu",), bf16=True, ddp_backend="mpi")
    assert (args["bf16"], args["use_cpu"], args["ddp_backend"]) == (True, False, "mpi")
    assert environment() == cpu.CPU_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "4"}


def test_a_lone_process_and_the_size_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no backend. vLLM's variable is not set if the engine's settings have a cache size:
    the variable would win."""
    monkeypatch.delenv("RANK")
    assert applied(vllm_engine_kwargs={"kv_cache_memory_bytes": 2**28})["ddp_backend"] is None
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment()
    applied(vllm_engine_kwargs={"seed": 1})
    assert environment()["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_what_was_saved_is_loaded_onto_a_rank(tmp_path: Path) -> None:
    """transformers before 5.19 loads so to resume."""
    make(cpu.load_onto_ranks)
    torch.save(torch.arange(3), tmp_path / "optimizer.pt")
    for only in (True, False):
        saved = torch.load(tmp_path / "optimizer.pt", map_location="cpu:0", weights_only=only)
        assert saved.tolist() == [0, 1, 2]
