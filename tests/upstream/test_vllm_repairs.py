"""vLLM copies its tokenizer as late as it can, and loads it once; experts are packed anew."""

from __future__ import annotations

import copy
import os
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, ProcessorMixin

from swift_grpo_ext.upstream import pins, vllm_repairs
from swift_grpo_ext.upstream.contract import Pin, mismatch

if any(map(mismatch, (*pins.PROCESSOR_COPIES, *pins.TOKENIZER_POOL))):
    pytest.skip("this vLLM and transformers need no such repair", allow_module_level=True)

from transformers import TokenizersBackend
from vllm.renderers import hf as renderers_hf
from vllm.tokenizers.hf import maybe_make_thread_pool
from vllm.transformers_utils import processor as upstream


class CopyingProcessor:
    """A processor that copies its arguments as transformers does."""

    def __init__(self, **kwargs: Any) -> None:
        self.copies = copy.deepcopy(kwargs)
        self.tokenizer = kwargs["tokenizer"]
        if kwargs.get("fails"):
            raise TypeError("This processor cannot be made.")


class TwoTokenizers(ProcessorMixin):
    """A processor that transformers loads."""

    def __init__(self, tokenizer: Any = None, decoder_tokenizer: Any = None) -> None:
        self.tokenizer, self.decoder_tokenizer = tokenizer, decoder_tokenizer


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
    pool = maybe_make_thread_pool(tokenizer) or tokenizer  # vLLM 0.23 changes it in place
    assert load(pool, tmp_path).copies["tokenizer"] is pool
    assert pool.convert_tokens_to_ids(["two", "one"]) == [1, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_pool_is_copied_afterwards(
    tokenizer: TokenizersBackend, tmp_path: Path, fails: bool
) -> None:
    pool = maybe_make_thread_pool(tokenizer)
    if pool is None:
        pytest.skip("vLLM 0.23 changes a tokenizer in place, after which no copy can be made")
    try:
        load(pool, tmp_path, fails=fails)
    except TypeError:
        assert fails
    other = copy.deepcopy(pool)
    assert other is not pool
    assert other.convert_tokens_to_ids("two") == 1


def test_a_bare_tokenizer_is_not_copied(tokenizer: TokenizersBackend, tmp_path: Path) -> None:
    assert load(tokenizer, tmp_path).copies["tokenizer"] is tokenizer
    assert copy.deepcopy(tokenizer) is not tokenizer


def test_another_tokenizer_is_copied(tokenizer: TokenizersBackend, tmp_path: Path) -> None:
    other = copy.deepcopy(tokenizer)
    assert load(tokenizer, tmp_path, other=other).copies["other"] is not other


@pytest.mark.parametrize(("handed_over", "num_loads"), [(True, 1), (False, 2)])
def test_a_processor_loads_no_tokenizer_beside_the_one_it_is_given(
    tokenizer: TokenizersBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    handed_over: bool,
    num_loads: int,
) -> None:
    """`decoder_tokenizer`, a second one, is loaded in any case."""
    loads = []

    def from_pretrained(name: str, **kwargs: Any) -> Any:
        loads.append(kwargs["subfolder"])
        return copy.copy(tokenizer)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    vllm_repairs.load_processors_uncopied()
    given = {"tokenizer": tokenizer} if handed_over else {}
    loaded = upstream.cached_get_processor(str(tmp_path), processor_cls=TwoTokenizers, **given)
    assert len(loads) == num_loads
    assert (loaded.tokenizer is tokenizer) == handed_over
    assert loaded.decoder_tokenizer is not tokenizer


def test_outside_of_vllm_a_processor_loads_its_tokenizer(
    tokenizer: TokenizersBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_repairs.load_processors_uncopied()
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: "loaded")
    loaded = TwoTokenizers._load_tokenizer_from_pretrained(
        "tokenizer", tmp_path, tokenizer=tokenizer
    )
    assert loaded == "loaded"


@pytest.fixture
def renderers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's renderers, which are as they were afterwards."""
    monkeypatch.setattr(renderers_hf, "maybe_make_thread_pool", maybe_make_thread_pool)
    vllm_repairs.copy_tokenizers_late.__wrapped__()
    return renderers_hf


def test_a_pool_makes_its_copies_when_they_are_asked_for(
    tokenizer: TokenizersBackend, renderers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    deepcopy = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda value: copies.append(value) or deepcopy(value))
    pool = renderers.maybe_make_thread_pool(tokenizer, 2) or tokenizer
    assert copies == []
    assert pool.convert_tokens_to_ids("two") == 1
    assert pool.decode([0]) == "one"  # with the copy that has come back
    assert len(copies) == 1


def test_a_processor_is_loaded_once(tokenizer: TokenizersBackend, tmp_path: Path) -> None:
    pool = maybe_make_thread_pool(tokenizer) or tokenizer
    assert load(pool, tmp_path) is load(pool, tmp_path)


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


@pytest.mark.parametrize(("name", "times"), [("get_processor", 1), ("no_such_function", 0)])
def test_a_repair_is_made_once_where_its_names_are(name: str, times: int) -> None:
    made = []
    pin = Pin("vllm.transformers_utils.processor", name)
    repair = vllm_repairs.repair([pin])(lambda: made.append(pin))
    repair()
    repair()
    assert len(made) == times


@pytest.mark.skipif(any(map(mismatch, pins.PACKED_EXPERTS)), reason="another way to pack them")
def test_experts_of_an_update_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.32 loads and reloads: experts come in parameters of their own, are processed, and
    are copied into the first ones, which ms-swift then lets it process once more."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as moe

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
