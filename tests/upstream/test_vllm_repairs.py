"""vLLM's processors are loaded without copies of their tokenizer; experts are packed anew."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import TokenizersBackend
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe
from vllm.tokenizers.hf import maybe_make_thread_pool
from vllm.transformers_utils import processor as upstream

from swift_grpo_ext.upstream import pins, vllm_repairs
from swift_grpo_ext.upstream.contract import Pin


class CopyingProcessor:
    """A processor that copies its arguments as transformers does."""

    def __init__(self, **kwargs: Any) -> None:
        self.copies = copy.deepcopy(kwargs)
        self.tokenizer = kwargs["tokenizer"]
        if kwargs.get("fails"):
            raise TypeError("This processor cannot be made.")


@pytest.fixture
def tokenizer() -> TokenizersBackend:
    words = WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?")
    return TokenizersBackend(tokenizer_object=Tokenizer(words))


def load(tokenizer: Any, folder: Path, **kwargs: Any) -> Any:
    vllm_repairs.load_processors_uncopied()
    return upstream.cached_get_processor(
        str(folder), processor_cls=CopyingProcessor, tokenizer=tokenizer, **kwargs
    )


def test_a_pool_is_not_copied(tokenizer: TokenizersBackend, tmp_path: Path) -> None:
    pool = maybe_make_thread_pool(tokenizer)
    assert load(pool, tmp_path).copies["tokenizer"] is pool
    assert pool.convert_tokens_to_ids(["two", "one"]) == [1, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_pool_is_copied_afterwards(
    tokenizer: TokenizersBackend, tmp_path: Path, fails: bool
) -> None:
    pool = maybe_make_thread_pool(tokenizer)
    try:
        load(pool, tmp_path, fails=fails)
    except TypeError:
        assert fails
    other = copy.deepcopy(pool)
    assert other is not pool
    assert other.convert_tokens_to_ids("two") == 1


def test_another_tokenizer_is_copied(tokenizer: TokenizersBackend, tmp_path: Path) -> None:
    copied = load(tokenizer, tmp_path).copies["tokenizer"]
    assert copied is not tokenizer
    assert copied.get_vocab() == tokenizer.get_vocab()


def test_a_processor_is_loaded_once(tokenizer: TokenizersBackend, tmp_path: Path) -> None:
    pool = maybe_make_thread_pool(tokenizer)
    assert load(pool, tmp_path) is load(pool, tmp_path)


def test_an_unknown_vllm_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = upstream.get_processor
    unknown = Pin("vllm.transformers_utils.processor", "no_such_function")
    monkeypatch.setattr(pins, "PROCESSOR_COPIES", (unknown,))
    vllm_repairs.load_processors_uncopied.__wrapped__()
    assert upstream.get_processor is before


def test_experts_of_an_update_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.32 loads and reloads: experts come in parameters of their own, are processed, and
    are copied into the first ones, which ms-swift then lets it process once more."""
    method = SimpleNamespace(moe_kernel=None, unquantized_backend="cpu")
    layer = SimpleNamespace(moe_config=None)

    def pack(layer: Any) -> None:
        for name in ("w13_weight", "w2_weight"):
            setattr(
                layer, name, torch.nn.Parameter(getattr(layer, name) + 100, requires_grad=False)
            )

    def init(_: Any) -> None:
        method.moe_kernel = SimpleNamespace(
            fused_experts=SimpleNamespace(process_weights_after_loading=pack)
        )

    method._init_moe_kernel = init
    monkeypatch.setattr(
        moe,
        "convert_to_unquantized_kernel_format",
        lambda *_, w13_weight, w2_weight, **__: (w13_weight, w2_weight),
    )
    vllm_repairs.pack_experts_anew()
    set_up = moe.UnquantizedFusedMoEMethod._setup_kernel

    def load(value: float) -> list[torch.nn.Parameter]:
        layer.w13_weight, layer.w2_weight = (
            torch.nn.Parameter(torch.tensor([value]), requires_grad=False) for _ in "ab"
        )
        set_up(method, layer, layer.w13_weight, layer.w2_weight)
        return [layer.w13_weight, layer.w2_weight]

    first = load(1.0)
    assert [float(p) for p in first] == [101.0, 101.0]
    for value in (2.0, 3.0):
        loaded = load(value)
        assert [float(p) for p in loaded] == [value + 100] * 2
        for own, new in zip(first, loaded, strict=True):
            own.data.copy_(new)
        layer.w13_weight, layer.w2_weight = first
        set_up(method, layer, layer.w13_weight, layer.w2_weight)
        assert [float(p) for p in (layer.w13_weight, layer.w2_weight)] == [value + 100] * 2
