"""Passes that read a shared prompt once equal the plain pass, and the comparison detects faults."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.bench.passes import FLASH, Batch, once, plain, why_not_installed
from swift_grpo_ext.logits.packed import reason_against
from tests.gpu.compare import assert_within, compare
from tests.gpu.conftest import DEVICE
from tests.gpu.models import make

MODELS = ("Qwen2", "Qwen2.5-VL", "InternVL", "Qwen3.5", "Gemma3")
DTYPES = ("float32", "bfloat16")
WAYS = [
    *(
        (attention, dtype, "")
        for attention in ("sdpa", "eager")
        for dtype in ("float32", "bfloat16")
    ),
    *(("sdpa", "float32", kind) for kind in ("reentrant", "not reentrant")),
]
if DEVICE == "cuda":
    WAYS += [(attention, "bfloat16", "") for attention in FLASH]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("attention", "dtype", "checkpointing"), WAYS)
def test_prompts_that_are_read_once(
    attention: str, dtype: str, checkpointing: str, model: str, device: str
) -> None:
    if reason := why_not_installed(attention):
        pytest.skip(reason)

    def make_case(is_exact: bool) -> tuple[Any, Batch]:
        tiny, batch = make(model, device, dtype, is_exact)
        if not is_exact:  # flash attention does not support float32
            tiny.set_attn_implementation(attention)
        if checkpointing:
            tiny.enable_input_require_grads()
            tiny.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        return tiny, batch

    try:
        tiny, batch = make_case(False)
    except (ImportError, ValueError) as e:
        pytest.skip(f"transformers: {e}")
    if reason := reason_against(tiny, batch.inputs):
        pytest.skip(f"not packed: {reason}")
    ways = {"once": once, "once, in chunks of 3": partial(once, chunk_size=3)}
    assert_within(compare(make_case, plain, ways))


# --- faults are detected ---


def blind(model: Any, batch: Batch) -> Tensor:
    """Hide the first tokens of the prompts."""
    attended = batch.inputs["attention_mask"].clone()
    attended[:, :4] = 0
    return plain(model, replace(batch, inputs={**batch.inputs, "attention_mask": attended}))


def off(model: Any, batch: Batch) -> Tensor:
    """Make one value wrong, but no gradient."""
    values = plain(model, batch)
    return values + 0.05 * values.detach().abs().max() * torch.eye(len(values))[2]


def without_a_gradient(model: Any, batch: Batch) -> Tensor:
    """Remove the gradient of a fifth of the values."""
    values = plain(model, batch)
    return torch.cat([values[:-4], values[-4:].detach()])


def not_a_number(model: Any, batch: Batch) -> Tensor:
    return plain(model, batch) / 0 * 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (once, (True, True)),
        (blind, (False, False)),
        (off, (False, True)),
        (without_a_gradient, (True, False)),
        (not_a_number, (False, False)),
    ],
)
def test_a_wrong_pass_is_detected(way: Any, expected: tuple[bool, bool], dtype: str) -> None:
    """`expected` says whether values and gradients pass."""
    comparisons = compare(partial(make, "Qwen2", "cpu", dtype), plain, {"way": way})
    assert tuple(c.passed for c in comparisons) == expected


def test_one_release_of_flash_attention_is_not_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention 4 installs files into the package of FlashAttention 2."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0\n"
    (tmp_path / "flash_attn_4-4.0.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.0.dist-info/METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    assert why_not_installed("flash_attention_2") == "flash-attn is not installed"
    assert why_not_installed("flash_attention_4") == ""
