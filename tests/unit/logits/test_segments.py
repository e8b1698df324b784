"""Attention and gated delta nets read packed rows by segments: a sample sees its prompt and itself
[L6]. `test_passes.py` compares whole models."""

from __future__ import annotations

import pytest
import torch
import transformers

from swift_grpo_ext.logits import segments
from tests.rig.logits.batch import Batch, packed_form
from tests.rig.logits.models import build

ROWS = ((7, 9), (7, 3), (7, 12), (10, 4), (10, 6), (8, 5))


def test_a_state_without_its_gradient_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities would be right, but the prompt's gradient would be too small."""
    if "linear_attention" not in segments.KINDS:
        pytest.skip("transformers 5.12 has other states of gated delta nets")
    own = segments.DeltaNetCache.update_recurrent_state
    monkeypatch.setattr(
        segments.DeltaNetCache,
        "update_recurrent_state",
        lambda self, states, *args, **kwargs: own(self, states.detach(), *args, **kwargs),
    )
    model = build("Qwen3.5")
    inputs, _ = packed_form(model, Batch(ROWS).see(model, with_images=False))
    with torch.no_grad():
        model(**inputs)
    with pytest.raises(ValueError, match="without its gradient"):
        model(**inputs)


def test_attention_that_passes_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Mistral")
    inputs, _ = packed_form(model, Batch(ROWS))
    functions = transformers.models.mistral.modeling_mistral.ALL_ATTENTION_FUNCTIONS
    own = functions["sdpa"]
    monkeypatch.setitem(
        functions, "sdpa", lambda *args, sliding_window, **kwargs: own(*args, **kwargs)
    )
    with pytest.raises(ValueError, match="passes no window to its implementation"):
        model(**inputs)


def test_attention_that_looks_its_function_up_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model, file = build("Qwen2"), transformers.models.qwen2.modeling_qwen2
    assert segments.reason_against(model) == ""
    monkeypatch.delattr(file, "ALL_ATTENTION_FUNCTIONS")
    assert "not that of transformers' AttentionInterface" in segments.reason_against(model)


def test_a_mask_that_was_copied_says_the_same() -> None:
    model = build("Qwen2")
    inputs, _ = packed_form(model, Batch(ROWS))
    copied = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    with torch.no_grad():
        assert torch.equal(model(**copied).logits, model(**inputs).logits)


def test_blocks_compute_at_most_twice_what_is_seen() -> None:
    """Samples after a prompt of 10 share a call as long as they are together no longer than it;
    blocks are (start, stop)."""
    sizes = [10, 4, 4, 4, 12, 1, 1]
    numbers = torch.arange(7).repeat_interleave(torch.tensor(sizes))
    mask = torch.zeros(1, 1, 4, len(numbers), dtype=torch.int32)
    mask[0, 0, 1] = numbers
    blocks = segments.Segments.of(mask).blocks
    assert [(block.start, block.stop) for block in blocks] == [
        (0, 10), (10, 18), (18, 22), (22, 34), (34, 36),
    ]  # fmt: skip
