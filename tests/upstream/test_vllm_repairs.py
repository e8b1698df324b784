"""Repairs of vLLM have the effect that they are made for."""

from __future__ import annotations

import asyncio
import copy
import os
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest

from swift_grpo_ext.upstream import pins, vllm_repairs
from swift_grpo_ext.upstream.contract import mismatch


@pytest.mark.parametrize("has_model", [False, True])
def test_a_plugin_that_imports_a_missing_model_is_left_out(
    has_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(vllm_repairs, "find_spec", lambda _: has_model or None)
    vllm_repairs.leave_out_broken_plugins()
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
    vllm_repairs.load_processors_uncopied()
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


class AsyncLLM(SimpleNamespace):
    """vLLM's engine, by its name."""


def test_a_call_is_answered_for_all_replicas() -> None:
    """Two replicas of one worker and of two."""
    asked: list[Any] = []

    async def call(*args: Any, engine: str) -> list[str]:
        asked.append(args)
        return [f"{engine}.{worker}" for worker in range(1 + (engine == "b"))]

    core = SimpleNamespace(core_engines=["a", "b"], _call_utility_async=call)
    engine: Any = AsyncLLM(engine_core=core)
    vllm_repairs.hear_all(engine)
    answers = asyncio.run(engine.collective_rpc("load", 2.0, (1,), {"k": 3}))
    assert answers == ["a.0", "b.0", "b.1"]
    assert asked == [("collective_rpc", "load", 2.0, (1,), {"k": 3})] * 2
    asyncio.run(engine.collective_rpc("load"))
    assert asked[2:] == [("collective_rpc", "load", None, (), None)] * 2
