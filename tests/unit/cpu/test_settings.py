"""Settings for CPUs apply without an accelerator, and never override the user's own."""

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
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables, of a rank without an accelerator. Pytest's own allocator and exit functions
    are left alone."""
    variables = {"RANK": "0"}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(cpu, "has_accelerator", lambda: False)
    monkeypatch.setattr(cpu.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *_: 1))
    monkeypatch.setattr(cpu.weakref, "finalize", lambda *_: None)
    return variables


def applied(given: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
    """Return settings after those for CPUs were applied."""
    args = SimpleNamespace(**(SETTINGS | settings))
    cpu.apply_cpu_settings(args, given)
    return vars(args)


def test_defaults_without_an_accelerator(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert applied() == FOR_CPU
    assert environment.items() >= {**cpu.CPU_ENVIRONMENT, "MALLOC_TOP_PAD_": "268435456"}.items()
    environment.clear()
    monkeypatch.setattr(cpu, "has_accelerator", lambda: True)
    assert applied() == SETTINGS
    assert environment == {}


def test_the_users_own_settings_win(environment: dict[str, str]) -> None:
    """A lone process gets no backend. vLLM's variable is not set if the engine's settings have a
    cache size: the variable would win."""
    environment["VLLM_CPU_KVCACHE_SPACE"] = "4"
    args = applied(given=("use_cpu",), bf16=True, ddp_backend="mpi")
    assert (args["bf16"], args["use_cpu"], args["ddp_backend"]) == (True, False, "mpi")
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "4"
    environment.clear()
    assert applied(vllm_engine_kwargs={"kv_cache_memory_bytes": 2**28})["ddp_backend"] is None
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    applied(vllm_engine_kwargs={"seed": 1})
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_what_was_saved_is_loaded_onto_a_rank(tmp_path: Path) -> None:
    """transformers before 5.19 loads so to resume."""
    make(cpu.load_onto_ranks)
    torch.save(torch.arange(3), tmp_path / "optimizer.pt")
    for only in (True, False):
        saved = torch.load(tmp_path / "optimizer.pt", map_location="cpu:0", weights_only=only)
        assert saved.tolist() == [0, 1, 2]
