"""Chosen positions, chunks and prompts read once have the values and gradients of transformers' own
pass with all logits [L1, L2, L4, L6].

`scripts/gpu.sh` runs this file on a GPU too.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils as flash

from scripts.bench import passes
from scripts.bench.measure import peak_bytes
from swift_grpo_ext.logits.packed import reason_against
from swift_grpo_ext.logits.shim import base_model
from tests.rig.logits.batch import (
    DEVICE,
    Batch,
    Rows,
    Run,
    Way,
    assert_close,
    chosen,
    counted_positions,
    plain,
    values_and_gradients,
)
from tests.rig.logits.models import CONFIGS, TEXT, add_lora, build, recomputed

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.08}
"""Bounds on errors: sums have other orders."""

HALF = 0.5
"""Factor for weights in bfloat16. Without it, bfloat16 changes gradients of the plain pass by 12 to
25% (Qwen2, Qwen2.5-VL, on a CPU), which hides faults. With it, passes differ by at most 4%, and by
9% if samples attend to each other. Gated delta nets keep their weights: they normalize their
outputs, and smaller weights make their rounding worse."""

GROUPS: Rows = ((7, 9), (7, 3), (7, 12), (10, 4), (10, 3), (8, 5))
"""Attention reads both samples of the second prompt as one block. No other row has the last
prompt."""

TOOLS: Rows = ((9, 4), (9, 2, 7, 3), (12, 4, 6, 2), (12, 2))
"""Some samples have a tool's answer, which is not trained on."""


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


TARGETS = ["q_proj", "v_proj", "in_proj_qkv", "out_proj"]
CHANGES: dict[str, Callable[[Any], Any]] = {
    "adapters": partial(add_lora, target_modules=TARGETS),
    "DoRA": partial(add_lora, target_modules=TARGETS, use_dora=True),
    "adapted head": partial(add_lora, target_modules=["q_proj", "lm_head"]),
    "trained head": partial(add_lora, modules_to_save=["lm_head"]),
    "recomputed": partial(recomputed, use_reentrant=False),
    "recomputed, reentrant": partial(recomputed, use_reentrant=True),
    "compiled": partial(torch.compile, backend="aot_eager"),
    "compiled in place": compiled_in_place,
}


# --- flash attention without a GPU ---


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> Tensor:
    """Return [queries, heads, width] of concatenated sequences, like the package `flash_attn`. The
    last query of a sequence sees its last key; causality and windows are counted from there."""
    q_sizes, k_sizes = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(q_sizes), max(k_sizes)) == (max_seqlen_q, max_seqlen_k)
    outputs = []
    parts = zip(q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True)
    for query, key, value in parts:
        last = len(key) - len(query)
        seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(last)
        if window_size[0] >= 0:
            seen = seen.triu(last - window_size[0])
        heads = (x.transpose(0, 1) for x in (query, key, value))
        options = {"attn_mask": seen, "scale": softmax_scale, "enable_gqa": True}
        outputs.append(scaled_dot_product_attention(*heads, **options).transpose(0, 1))
    return torch.cat(outputs)


def install_flash(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Let a model use `flash_attention_2`. Transformers' own code around it runs: it removes
    padding, and passes its arguments on."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    vars(package).update(dict.fromkeys(names, flash_attn_varlen_func))
    vars(padding).update(pad_input=flash._pad_input, unpad_input=flash._unpad_input)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    model.config.get_text_config()._attn_implementation = "flash_attention_2"


# --- whole models ---


@dataclass(frozen=True)
class Case:
    name: str
    attention: str = "sdpa"
    dtype: str = "float32"
    changes: tuple[str, ...] = ()
    rows: Rows = GROUPS
    side: str = "right"
    with_images: bool = False

    def __str__(self) -> str:
        parts = (self.name, self.attention, self.dtype, *self.changes, self.side)
        return ", ".join(filter(None, parts))


TEXTS = (
    "Qwen2", "Mistral", "Qwen2, some windows", "Gemma3", "Gemma4",
    "soft-capped (Gemma2)", "Qwen2.5-VL", "Qwen3.5", "Qwen3-Next",
)  # fmt: skip
SEEING = ("Qwen2.5-VL", "Gemma3", "Gemma4", "Qwen3.5")
CASES = [
    *(Case(name, attention) for name in TEXTS for attention in ("sdpa", "eager")),
    *(
        Case(name, rows=TOOLS, side=s, with_images=True)
        for name in SEEING
        for s in ("right", "left")
    ),
    *(
        Case(name, attention, "bfloat16", with_images=True)
        for name in ("Qwen2", "Qwen2.5-VL", "Qwen3.5", "Gemma3")
        for attention in ("sdpa", "eager", *(passes.FLASH if DEVICE == "cuda" else ()))
    ),
    *(Case(name, "flash_attention_2") for name in TEXTS if DEVICE == "cpu"),
    Case("Qwen2, tied"),
    Case("remote code"),
    Case("remote code", changes=("adapted head",)),
    Case("remote code", changes=("trained head",)),
    Case("soft-capped (Gemma2)", changes=("compiled",)),
    Case("soft-capped (Gemma2)", changes=("compiled in place",)),
    Case("Qwen2.5-VL", changes=("adapters", "recomputed"), with_images=True),
    Case("Qwen2, some windows", changes=("DoRA", "recomputed, reentrant")),
    Case("Qwen3.5", changes=("DoRA", "recomputed, reentrant")),
    Case("Qwen3.5", changes=("adapters", "recomputed")),
    # The delta rule is computed in chunks of 64 positions, the convolution sees 4.
    Case("Qwen3.5", rows=((2, 1), (2, 1))),
    Case("Qwen3.5", rows=((4, 1), (4, 70), (4, 1))),
    Case("Qwen3.5", rows=((64, 1), (64, 65), (65, 3), (65, 1))),
    Case("Qwen3.5", rows=((66, 5), (66, 2), (3, 66), (3, 2), (130, 1))),
]


class Compared:
    """A tiny model and its batch."""

    def __init__(self, case: Case) -> None:
        kind, _ = CONFIGS.get(case.name, ("Qwen2", {}))
        if not hasattr(transformers, f"{kind}Config"):  # some releases lack it
            pytest.skip(f"transformers {transformers.__version__} has no {case.name}")
        # TF32 would round float32 products to 10 bits, differently for each batch size. By default
        # cudnn's convolutions use it.
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        self.tolerance = TOLERANCES[case.dtype]
        self.model = build(case.name)
        for change in case.changes:
            self.model = CHANGES[change](self.model)
        self.batch = Batch(case.rows, case.side).see(self.model, with_images=case.with_images)
        self.model.to(DEVICE)
        if case.dtype == "bfloat16":
            with torch.no_grad():
                for path, weight in self.model.named_parameters():
                    if weight.ndim > 1 and "linear_attn" not in path:
                        weight.mul_(HALF)
            self.model.bfloat16()

    def run(self, way: Way) -> Run:
        batch = self.batch.to(self.model)
        return values_and_gradients(self.model, lambda: way(self.model, batch))

    def assert_right(self, way: Way, expected: Run) -> None:
        assert_close(self.run(way), expected, self.tolerance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain passes after other ways are right too."""
    torch._dynamo.reset()
    compared = Compared(case)
    model = compared.model
    if case.attention == "flash_attention_2" and DEVICE == "cpu":
        install_flash(monkeypatch, model)
    elif reason := passes.why_not_installed(case.attention):
        pytest.skip(reason)
    elif case.attention != "sdpa":
        try:
            model.set_attn_implementation(case.attention)
        except (ImportError, ValueError) as e:
            pytest.skip(f"transformers: {e}")
    expected = compared.run(plain)
    is_compiled = "compiled" in "".join(case.changes)
    can_pack = not is_compiled and not reason_against(base_model(model), compared.batch.inputs)
    for once, size in product((False, True) if can_pack else (False,), (1024, 4)):
        way = partial(chosen, once=once, chunk_size=size)
        with nullcontext([]) if is_compiled else counted_positions(model) as counts:
            compared.assert_right(way, expected)
        assert is_compiled or max(counts) == min(len(compared.batch.targets_N), size)
        compared.assert_right(plain, expected)


@pytest.mark.parametrize(
    ("name", "kinds"), [("Gemma3", "token_type_ids"), ("Gemma4", "mm_token_type_ids")]
)
def test_images_whose_positions_see_each_other(name: str, kinds: str) -> None:
    """Gemma 3's do in all layers, Gemma 4's in those with a window, where audio (3) does not. The
    second image crosses the border of a window. One image is a tool's."""
    compared = Compared(Case(name, rows=((9, 4), (9, 3), (12, 8), (12, 2), (8, 2, 7, 1))))
    causal = compared.run(plain)
    types = torch.zeros_like(compared.batch.inputs["input_ids"])
    types[:2, 2:6] = types[2:4, 1:4] = types[2:4, 6:10] = types[4, 11:15] = 1
    if name == "Gemma4":
        types[2:4, 6:10], types[4, 16:18] = 2, 3
    compared.batch.inputs[kinds] = types
    expected = compared.run(plain)
    compared.assert_right(partial(chosen, once=True), expected)
    assert float((causal[0] - expected[0]).abs().max()) > 0.01


# --- memory ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_take_no_more_memory_than_is_asked_for(dtype: str) -> None:
    """Logits of other positions are never computed, and chunks bound the memory of the others."""
    small = {"vocab_size": 151_936 if DEVICE == "cuda" else 16_384, "num_hidden_layers": 1}
    torch.manual_seed(0)
    settings = {**TEXT, **small, "initializer_range": 0.1, "use_cache": False}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**settings))
    model.to(DEVICE, getattr(torch, dtype))
    batch = Batch(((768, 256), (640, 192))).to(model)
    peaks = []
    for way in (plain, chosen, partial(chosen, chunk_size=16)):
        way(model, batch).sum().backward()  # gradients are there from now on
        peaks.append(peak_bytes(lambda way=way: way(model, batch).sum().backward()))
    of_all, of_chosen, of_chunks = peaks
    # Completions are a 5th of all positions, a chunk is a 28th of them; activations remain.
    assert of_chosen <= 0.3 * of_all
    assert of_chunks <= 0.13 * of_all
