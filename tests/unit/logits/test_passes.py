"""Chosen positions, chunks and prompts read once have the values and gradients of transformers' own
pass with all logits [L1, L2, L4, L6]; the comparison detects wrong passes.

`scripts/gpu.sh` runs this file on a GPU too.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from scripts.bench import passes
from swift_grpo_ext.logits.packed import reason_against
from swift_grpo_ext.logits.shim import base_model
from tests.rig.logits import flash
from tests.rig.logits.batch import Batch, Rows, Way, chosen, packed, plain
from tests.rig.logits.compare import (
    DEVICE,
    Run,
    counted_positions,
    values_and_gradients,
    wrong_parts,
)
from tests.rig.logits.models import add_lora, build

FLOAT32 = 1e-4
"""Bound on errors in float32: sums have other orders."""

HALF = 0.5
"""Factor for weights in bfloat16. Without it, bfloat16 changes gradients of the plain pass by 12 to
25% (Qwen2, Qwen2.5-VL, on a CPU), which hides faults. With it, the change is 1 to 5%, while samples
that attend to each other change gradients by 38 to 76%. Gated delta nets keep their weights: they
normalize their outputs, and smaller weights make their rounding worse."""

NEEDS = {"Qwen3.5": "Qwen3_5Config", "Gemma3": "Gemma3Config", "Gemma4": "Gemma4Config"}
"""Configurations that some releases of transformers lack."""

GROUPS: Rows = ((7, 9), (7, 3), (7, 12), (10, 4), (10, 6), (8, 5))
"""No other row has the last prompt."""

TOOLS: Rows = ((9, 4), (9, 5), (9, 2, 7, 3), (12, 4, 6, 2), (12, 3), (12, 2))
"""Rows with a tool's image are groups of one sample."""


def with_hooks(model: Any) -> Any:
    """Hook the head before and after, as masks of tokens do; each hook must run once."""
    ruled_out, lowest = torch.tensor([150, 155]), torch.finfo(torch.float32).min / 16
    head = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda _, args: (1.5 * args[0],))
    head.register_forward_hook(
        lambda _, __, logits: logits.index_fill_(-1, ruled_out.to(logits.device), lowest)
    )
    return model


TARGETS = ["q_proj", "v_proj", "in_proj_qkv", "out_proj"]
ADDITIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda model: model,
    "adapters": partial(add_lora, target_modules=TARGETS),
    "DoRA": partial(add_lora, target_modules=TARGETS, use_dora=True),
    "adapted head": partial(add_lora, target_modules=["q_proj", "lm_head"]),
    "trained head": partial(add_lora, modules_to_save=["lm_head"]),
    "hooked head": with_hooks,
}


def recomputed(model: Any, *, use_reentrant: bool) -> Any:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


MODES: dict[str, Callable[[Any], Any]] = {
    "": lambda model: model,
    "recomputed": partial(recomputed, use_reentrant=False),
    "recomputed, reentrant": partial(recomputed, use_reentrant=True),
    "compiled": partial(torch.compile, backend="aot_eager"),
    "compiled in place": compiled_in_place,
}


@dataclass(frozen=True)
class Case:
    name: str
    attention: str = "sdpa"
    dtype: str = "float32"
    addition: str = ""  # what the plain pass has too
    mode: str = ""  # what the plain pass does without
    rows: Rows = GROUPS
    side: str = "right"
    with_images: bool = False

    def __str__(self) -> str:
        parts = (self.name, self.attention, self.dtype, self.addition, self.mode, self.side)
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
    Case("remote code", addition="adapted head"),
    Case("remote code", addition="trained head"),
    Case("soft-capped (Gemma2)", addition="hooked head"),
    Case("soft-capped (Gemma2)", mode="compiled"),
    Case("soft-capped (Gemma2)", mode="compiled in place"),
    Case("Qwen2.5-VL", addition="adapters", mode="recomputed", with_images=True),
    Case("Qwen2, some windows", addition="DoRA", mode="recomputed, reentrant"),
    Case("Qwen2, some windows", addition="adapters", mode="recomputed"),
    Case("Qwen3.5", addition="DoRA", mode="recomputed, reentrant"),
    Case("Qwen3.5", addition="adapters", mode="recomputed"),
    # The delta rule is computed in chunks of 64 positions, the convolution sees 4.
    Case("Qwen3.5", rows=((2, 2), (2, 3))),
    Case("Qwen3.5", rows=((2, 1), (2, 1))),
    Case("Qwen3.5", rows=((4, 1), (4, 70), (4, 1))),
    Case("Qwen3.5", rows=((64, 1), (64, 65), (65, 3), (65, 1))),
    Case("Qwen3.5", rows=((66, 5), (66, 2), (3, 66), (3, 2), (130, 1))),
]


class Compared:
    """A tiny model, and the results of its plain pass; in bfloat16 those of the exact pass too."""

    def __init__(self, case: Case, device: str = DEVICE) -> None:
        if not hasattr(transformers, NEEDS.get(case.name, "Qwen2Config")):
            pytest.skip(f"transformers {transformers.__version__} has no {case.name}")
        # TF32 would round float32 products to 10 bits, differently for each batch size. By default
        # cudnn's convolutions use it.
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")
        self.case, self.exact = case, None
        self.model = self.called = ADDITIONS[case.addition](build(case.name)).to(device)
        if case.dtype == "bfloat16":
            with torch.no_grad():
                for path, weight in self.model.named_parameters():
                    if weight.ndim > 1 and "linear_attn" not in path:
                        weight.mul_(HALF)
            self.exact = self.plain(self.model.bfloat16().float())  # with rounded weights
            self.model.bfloat16()

    def plain(self, model: Any) -> Run:
        case = self.case
        self.batch = Batch(case.rows, case.side).see(model, with_images=case.with_images).to(model)
        return self.run(plain)

    def run(self, way: Way) -> Run:
        return values_and_gradients(self.model, lambda: way(self.called, self.batch))

    def wrong_parts(self, way: Way, expected: Run) -> dict[str, float]:
        return wrong_parts(self.run(way), expected, self.exact, FLOAT32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_way(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain passes after other ways are right too."""
    torch._dynamo.reset()
    compared = Compared(case)
    model = compared.model
    if case.attention == "flash_attention_2" and DEVICE == "cpu":
        flash.install(monkeypatch, model)
    elif reason := passes.why_not_installed(case.attention):
        pytest.skip(reason)
    elif case.attention != "sdpa":
        try:
            model.set_attn_implementation(case.attention)
        except (ImportError, ValueError) as e:
            pytest.skip(f"transformers: {e}")
    expected = compared.plain(model)
    ways: dict[str, Way] = {"chosen": chosen, "in chunks": partial(chosen, chunk_size=4)}
    is_compiled = case.mode.startswith("compiled")
    if not is_compiled and not reason_against(base_model(model), compared.batch.inputs):
        ways |= {"once": packed, "once, in chunks": partial(packed, chunk_size=4)}
    compared.called = MODES[case.mode](model)
    wrong: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        if is_compiled:
            wrong[name] = compared.wrong_parts(way, expected)
        else:
            with counted_positions(model) as counts:
                wrong[name] = compared.wrong_parts(way, expected)
            num_tokens = len(compared.batch.targets_N)
            assert max(counts) == (min(num_tokens, 4) if "chunks" in name else num_tokens)
        wrong[f"plain, after {name}"] = compared.wrong_parts(plain, expected)
    assert {name: parts for name, parts in wrong.items() if parts} == {}


@pytest.mark.parametrize(
    ("name", "kinds", "looks_ahead"),
    [
        # In all layers; and in those with a window alone, where audio (3) does not.
        ("Gemma3", "token_type_ids", True),
        ("Gemma4", "mm_token_type_ids", True),
        # Makes no mask of them.
        ("Gemma3n", "token_type_ids", False),
    ],
)
def test_images_whose_positions_see_each_other(name: str, kinds: str, looks_ahead: bool) -> None:
    """The second image crosses the border of a window. One image is a tool's."""
    compared = Compared(Case(name, rows=((9, 4), (9, 3), (12, 8), (12, 2), (8, 2, 7, 1))))
    causal = compared.plain(compared.model)
    types = torch.zeros_like(compared.batch.inputs["input_ids"])
    types[:2, 2:6] = types[2:4, 1:4] = types[2:4, 6:10] = types[4, 11:15] = 1
    if name == "Gemma4":
        types[2:4, 6:10], types[4, 16:18] = 2, 3
    compared.batch.inputs[kinds] = types
    expected = compared.run(plain)
    assert compared.wrong_parts(packed, expected) == {}
    assert (float((causal[0] - expected[0]).abs().max()) > 0.01) == looks_ahead


def test_the_benches_time_the_same_passes() -> None:
    compared = Compared(Case("Qwen2.5-VL", with_images=True))
    compared.plain(compared.model)
    assert compared.wrong_parts(passes.once, compared.run(passes.plain)) == {}


# --- faults are detected ---


def blind(model: Any, batch: Batch) -> Tensor:
    """Hide the first tokens of the prompts."""
    hidden = copy(batch)
    attended = batch.inputs["attention_mask"].clone()
    attended[:, :4] = 0
    hidden.inputs = {**batch.inputs, "attention_mask": attended}
    return plain(model, hidden)


def without_a_gradient(model: Any, batch: Batch) -> Tensor:
    """Remove the gradient of a fifth of the values."""
    values = plain(model, batch)
    return torch.cat([values[:, :-8], values[:, -8:].detach()], dim=1)


def not_a_number(model: Any, batch: Batch) -> Tensor:
    return plain(model, batch) / 0 * 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("way", "are_values_wrong"), [(blind, True), (without_a_gradient, False), (not_a_number, True)]
)
def test_a_wrong_pass_is_detected(way: Way, are_values_wrong: bool, dtype: str) -> None:
    compared = Compared(Case("Qwen2", dtype=dtype), "cpu")
    wrong = compared.wrong_parts(way, compared.plain(compared.model))
    assert ("values" in wrong) == are_values_wrong
    assert wrong.keys() - {"values"}, "no gradient is wrong"
