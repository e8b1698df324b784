"""Repairs of vLLM: made once, where their names are, and with the effect that they are made for."""

from __future__ import annotations

import asyncio
import copy
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.upstream import patches, pins, vllm_repairs
from swift_grpo_ext.upstream.contract import Pin, mismatch
from tests.stack.processes import ROOT


@pytest.mark.parametrize("has_model", [False, True])
def test_a_plugin_that_imports_a_missing_model_is_left_out(
    has_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(vllm_repairs, "find_spec", lambda _: has_model or None)
    vllm_repairs.leave_out_broken_plugins.__wrapped__()
    if has_model:
        assert "VLLM_PLUGINS" not in os.environ
    else:
        plugins = {e.name for e in entry_points(group="vllm.general_plugins")}
        left = set(os.environ["VLLM_PLUGINS"].split(","))
        assert left >= plugins - {"swift_uembed"}
        assert "swift_uembed" not in left


@pytest.mark.skipif(any(map(mismatch, pins.PROCESSOR_COPIES)), reason="it copies otherwise")
def test_a_processor_is_loaded_without_copies_of_its_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Afterwards, also where loading failed, tokenizers are copied as before."""
    from vllm.transformers_utils import processor as upstream

    def get_processor(
        processor_name: str,
        *args: Any,
        revision: Any = None,
        trust_remote_code: bool = False,
        processor_cls: Any = None,
        **kwargs: Any,
    ) -> Any:
        if processor_name == "none":
            raise OSError("There is no such processor.")
        return copy.deepcopy(kwargs)

    for name in ("get_processor", "cached_get_processor"):
        monkeypatch.setattr(upstream, name, get_processor)
    vllm_repairs.load_processors_uncopied.__wrapped__()  # type: ignore[attr-defined]
    tokenizer, other = Tokens(), Tokens()
    loaded = upstream.cached_get_processor("a", tokenizer=tokenizer, other=other)
    assert loaded["tokenizer"] is tokenizer
    assert loaded["other"] is not other
    assert upstream.cached_get_processor("a", tokenizer=tokenizer, other=other) is loaded
    with pytest.raises(OSError, match="no such processor"):
        upstream.get_processor("none", tokenizer=tokenizer)
    assert copy.deepcopy(tokenizer) is not tokenizer
    assert upstream.get_processor("a") == {}


class Tokens:
    """A tokenizer."""


@pytest.mark.parametrize(("name", "times"), [("get_processor", 1), ("no_such_function", 0)])
def test_a_repair_is_made_once_where_its_names_are(name: str, times: int) -> None:
    made: list[str] = []
    pin = Pin("vllm.transformers_utils.processor", name)
    repair = patches.repair([pin])(lambda: made.append(name))
    repair()
    repair()
    assert len(made) == times


names_its_memory = pytest.mark.skipif(
    any(map(mismatch, pins.SHARED_MEMORY)), reason="vLLM 0.11 names it elsewhere"
)


@names_its_memory
def test_shared_memory_has_a_name_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    vllm_repairs.name_shared_memory_by_run()
    monkeypatch.setenv("VLLM_DIST_IDENT", "//")  # as vLLM makes it of `env://`
    ranks: Any = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    names = []
    for port in ("29500", "29501", "29500"):
        monkeypatch.setenv("MASTER_PORT", port)
        names.append(_CPUSHMDistributed.make_group_name(ranks))
    assert names[0] != names[1]
    assert names[0] == names[2]


@pytest.mark.stack
@names_its_memory
def test_shared_memory_neither_meets_nor_leaves_any_of_its_name(tmp_path: Path) -> None:
    """Training processes end by `os._exit` or a signal, and clean up nothing."""
    finished = subprocess.run(
        [sys.executable, "-m", "tests.upstream.shared_memory", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


@pytest.mark.skipif(any(map(mismatch, pins.PACKED_CONVOLUTIONS)), reason="packs none")
def test_packed_convolutions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift has layers processed once more, behind the update that brought their weights."""
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(utils.ops, "causal_conv1d_weight_pack", lambda weight: weight + 100)
    vllm_repairs.keep_packed_convolutions()
    layer = torch.nn.Module()
    for value in (1, 2):
        weight = torch.full((8, 1, 4), value, dtype=torch.bfloat16)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        for _ in range(2):
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
            assert layer.weight.tolist() == [[value + 100] * 4] * 8


def test_a_call_is_answered_for_all_replicas() -> None:
    """Two replicas of one worker and of two."""
    asked: list[Any] = []

    async def call(*args: Any, engine: str) -> list[str]:
        asked.append(args)
        return [f"{engine}.{worker}" for worker in range(1 + (engine == "b"))]

    core = SimpleNamespace(core_engines=["a", "b"], _call_utility_async=call)
    engine: Any = SimpleNamespace(engine_core=core)
    vllm_repairs.hear_all(engine)
    answers = asyncio.run(engine.collective_rpc("load", 2.0, (1,), {"k": 3}))
    assert answers == ["a.0", "b.0", "b.1"]
    assert asked == [("collective_rpc", "load", 2.0, (1,), {"k": 3})] * 2
    asyncio.run(engine.collective_rpc("load"))
    assert asked[2:] == [("collective_rpc", "load", None, (), None)] * 2
