"""Repairs of vLLM: made once, where their names are, and with the effect that they are made for."""

from __future__ import annotations

import copy
import os
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, ProcessorMixin

from swift_grpo_ext.upstream import pins, vllm_repairs
from swift_grpo_ext.upstream.contract import Pin, mismatch

needs_copies = pytest.mark.skipif(
    any(map(mismatch, pins.PROCESSOR_COPIES)), reason="these vLLM and transformers copy otherwise"
)


class TwoTokenizers(ProcessorMixin):
    """A processor that transformers loads, and that copies its arguments as it does."""

    def __init__(self, tokenizer: Any = None, decoder_tokenizer: Any = None, **other: Any) -> None:
        self.tokenizer, self.decoder_tokenizer = tokenizer, decoder_tokenizer
        self.copies = copy.deepcopy({"tokenizer": tokenizer, **other})
        if "fails" in other:
            raise TypeError("This processor cannot be made.")

    @classmethod
    def from_pretrained(cls, name: str, **kwargs: Any) -> Any:
        made = cls._load_tokenizer_from_pretrained("tokenizer", name, **kwargs)
        second = cls._load_tokenizer_from_pretrained("decoder_tokenizer", name, **kwargs)
        return cls(made, second, **{k: v for k, v in kwargs.items() if k in ("other", "fails")})


@needs_copies
@pytest.mark.parametrize(("is_handed_over", "num_loads"), [(True, 1), (False, 2)])
def test_a_processor_takes_the_tokenizer_that_vllm_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_handed_over: bool, num_loads: int
) -> None:
    """It neither copies it nor loads another in its place; a second tokenizer is its own.
    Afterwards, also where loading failed, tokenizers are copied and loaded as before."""
    from vllm.transformers_utils import processor as upstream

    words = WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?")
    tokenizer = transformers.TokenizersBackend(tokenizer_object=Tokenizer(words))
    loads = []

    def from_pretrained(name: str, **kwargs: Any) -> Any:
        loads.append(kwargs.get("subfolder"))
        return copy.copy(tokenizer)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    vllm_repairs.load_processors_uncopied()
    other = copy.deepcopy(tokenizer)
    given: Any = {"tokenizer": tokenizer} if is_handed_over else {}
    load = partial(
        upstream.cached_get_processor, str(tmp_path), processor_cls=TwoTokenizers, other=other
    )
    loaded = load(**given)
    assert load(**given) is loaded
    assert len(loads) == num_loads
    assert (loaded.tokenizer is tokenizer) == is_handed_over
    assert (loaded.copies["tokenizer"] is tokenizer) == is_handed_over
    assert loaded.decoder_tokenizer is not tokenizer
    assert loaded.copies["other"] is not other

    with pytest.raises(TypeError, match="cannot be made"):
        load(fails=True, **given)
    copied = copy.deepcopy(tokenizer)
    assert copied is not tokenizer
    assert copied.convert_tokens_to_ids("two") == 1
    again = TwoTokenizers._load_tokenizer_from_pretrained(
        "tokenizer", str(tmp_path), tokenizer=tokenizer
    )
    assert again is not tokenizer


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
    made: list[str] = []
    pin = Pin("vllm.transformers_utils.processor", name)
    repair = vllm_repairs.repair([pin])(lambda: made.append(name))
    repair()
    repair()
    assert len(made) == times


@pytest.mark.skipif(any(map(mismatch, pins.SHARED_MEMORY)), reason="vLLM 0.11 names it elsewhere")
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
