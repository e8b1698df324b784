"""Attention and gated delta nets read packed rows by segments: real models give the same on packed
rows as on the unpacked batches."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from swift_grpo_ext.logits import segments
from swift_grpo_ext.logits.packed import (
    Form,
    GroupRows,
    SharedPromptInputs,
    pack,
    reason_against,
)
from swift_grpo_ext.logits.shim import base_model
from tests.rig.logits import flash
from tests.rig.logits.compare import Gradients, assert_close, values_and_gradients
from tests.rig.logits.models import add_lora, build

ROWS = ((7, 9), (7, 3), (7, 12), (10, 4), (10, 6), (8, 5))
"""Tokens of each row's prompt and completion. No other row has the last prompt."""

TEXTS = (
    "Qwen2", "Mistral", "Qwen2, some windows", "Gemma3", "Gemma4",
    "soft-capped (Gemma2)", "Qwen2.5-VL", "Qwen3.5", "Qwen3-Next",
)  # fmt: skip


def batch_of(rows: Any = ROWS) -> tuple[dict[str, Any], Tensor]:
    """Return a batch with padding on the right, and the positions that predict completions."""
    torch.manual_seed(1)
    length = max(map(sum, rows))
    input_ids, mask = torch.zeros(2, len(rows), length, dtype=torch.int64)
    predicts = torch.zeros(len(rows), length, dtype=torch.bool)
    prompts = {prompt: torch.randint(3, 150, (prompt,)) for prompt, _ in rows}
    for row, (prompt, completion) in enumerate(rows):
        input_ids[row, :prompt] = prompts[prompt]
        input_ids[row, prompt : prompt + completion] = torch.randint(3, 150, (completion,))
        mask[row, : prompt + completion] = 1
        predicts[row, prompt - 1 : prompt + completion - 1] = True
    return {"input_ids": input_ids, "attention_mask": mask}, predicts


def packed(model: Any, inputs: dict[str, Any], predicts: Tensor) -> Form:
    """Pack a batch: rows next to each other that begin with one prompt are a group."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "mrope_section" in str(base.config):
        columns = torch.arange(predicts.shape[1])
        inputs = {**inputs, "position_ids": columns.expand(3, *predicts.shape)}
    reason = reason_against(base, inputs)
    if "(linear_attention)" in reason:
        pytest.skip(reason)  # transformers 5.12
    assert not reason
    labels = torch.where(predicts, inputs["input_ids"].roll(-1, 1), -100).roll(1, 1)
    lengths, prompts = inputs["attention_mask"].sum(1).tolist(), predicts.int().argmax(1) + 1

    def prompt_of(row: int) -> list[int]:
        return inputs["input_ids"][row, : prompts[row]].tolist()

    groups, heads = [], []
    for prompt, same in groupby(range(len(lengths)), key=prompt_of):
        rows = [*same]
        ids, labels_of = (
            [values[row, : lengths[row]].tolist() for row in rows]
            for values in (inputs["input_ids"], labels)
        )
        groups.append(GroupRows(len(prompt) if len(rows) > 1 else 0, ids, labels_of))
        heads.append(max(rows, key=lambda row: lengths[row]))
    of_heads = {name: value[..., heads, :] for name, value in inputs.items()}
    return pack(SharedPromptInputs(inputs, groups, of_heads, dict), base)


def run(model: Any, inputs: dict[str, Any], predicts: Tensor) -> tuple[Tensor, Gradients]:
    """Return log-probabilities of all tokens at some positions, and all gradients."""
    return values_and_gradients(
        model, lambda: model(**inputs, use_cache=False).logits[predicts].log_softmax(-1)
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_packed_row_is_the_batch_but_for_rounding(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    if attention == "flash_attention_2":
        flash.install(monkeypatch, model)
    else:
        model.set_attn_implementation(attention)
    inputs, predicts = batch_of()
    expected = run(model, inputs, predicts)
    batch = packed(model, inputs, predicts)
    assert batch[1].numel() < predicts.numel()
    assert_close(run(model, *batch), expected)
    assert_close(run(model, inputs, predicts), expected, 0.0)  # others are read as before


@pytest.mark.parametrize("is_reentrant", [True, False])
@pytest.mark.parametrize("name", ["Qwen2, some windows", "Qwen3.5"])
def test_recomputation_reads_by_segments_too(name: str, is_reentrant: bool) -> None:
    """Adapters are trained, and the backward recomputes layers, as in ms-swift."""
    targets = ["q_proj", "v_proj", "in_proj_qkv", "out_proj"]
    model = add_lora(build(name), target_modules=targets, use_dora=is_reentrant)
    inputs, predicts = batch_of()
    expected = run(model, inputs, predicts)
    model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    model.enable_input_require_grads()
    batch = packed(model, inputs, predicts)
    num_calls = []
    layer = base_model(model).get_decoder().layers[0]
    layer.mlp.register_forward_pre_hook(lambda *_: num_calls.append(1))
    assert_close(run(model, *batch), expected)
    assert len(num_calls) == 2


@pytest.mark.parametrize(
    "rows",
    [
        ((2, 2), (2, 3)),
        ((2, 1), (2, 1)),
        ((4, 1), (4, 70), (4, 1)),
        ((64, 1), (64, 65), (65, 3), (65, 1)),
        ((66, 5), (66, 2), (3, 66), (3, 2), (130, 1)),
    ],
)
@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3-Next"])
def test_states_go_on_from_prompts_of_any_length(name: str, rows: Any) -> None:
    """The delta rule is computed in chunks of 64 positions, the convolution sees 4."""
    model = build(name)
    inputs, predicts = batch_of(rows)
    expected = run(model, inputs, predicts)
    assert_close(run(model, *packed(model, inputs, predicts)), expected)


def test_states_go_on_under_ms_swifts_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift's forward of gated delta nets drops keywords that it does not know."""
    from swift.model.models.qwen import _patch_qwen3_5_linear_attention_sequence_parallel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet as Net

    inputs, predicts = batch_of()
    expected = run(build("Qwen3.5"), inputs, predicts)
    monkeypatch.setattr(Net, "forward", Net.forward)
    _patch_qwen3_5_linear_attention_sequence_parallel()
    assert Net.forward.__name__ == "sp_linear_forward"
    monkeypatch.setattr(Net, "_ms_swift_sp_linear_patched", False)
    model = build("Qwen3.5")
    assert_close(run(model, *packed(model, inputs, predicts)), expected)


def test_a_state_without_its_gradient_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities would be right, but the prompt's gradient would be too small."""
    own = segments.DeltaNetCache.update_recurrent_state
    monkeypatch.setattr(
        segments.DeltaNetCache,
        "update_recurrent_state",
        lambda self, states, *args, **kwargs: own(self, states.detach(), *args, **kwargs),
    )
    model = build("Qwen3.5")
    inputs, _ = packed(model, *batch_of())
    with torch.no_grad():
        model(**inputs)
    with pytest.raises(ValueError, match="without its gradient"):
        model(**inputs)


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
    """The second image crosses the border of a window. One image is a tool's, so its sample is a
    group of its own."""
    model = build(name)
    inputs, predicts = batch_of(((9, 4), (9, 3), (12, 8), (12, 2), (8, 10)))
    types = torch.zeros_like(inputs["input_ids"])
    types[:2, 2:6] = types[2:4, 1:4] = types[2:4, 6:10] = types[4, 11:15] = 1
    if name == "Gemma4":
        types[2:4, 6:10], types[4, 16:18] = 2, 3
    inputs[kinds] = types
    predicts[4, 9:17] = False
    expected = run(model, inputs, predicts)
    assert_close(run(model, *packed(model, inputs, predicts)), expected, 5e-5)
    causal = run(model, {k: v for k, v in inputs.items() if k != kinds}, predicts)
    assert (float((causal[0] - expected[0]).abs().max()) > 0.01) == looks_ahead


@pytest.mark.parametrize("name", ["Qwen2, some windows", "Qwen3.5"])
def test_a_sample_sees_no_other(name: str) -> None:
    """Logits do not depend on another sample's tokens, to the bit, but on those of the prompt."""
    model = build(name).eval()
    inputs, predicts = batch_of()
    with torch.no_grad():
        before = model(**packed(model, inputs, predicts)[0]).logits[0]
        inputs["input_ids"][1, 8] += 1
        other = model(**packed(model, inputs, predicts)[0]).logits[0]
        inputs["input_ids"][:3, 2] += 1
        prompt = model(**packed(model, inputs, predicts)[0]).logits[0]
    changed = (before != other).any(-1).nonzero()[:, 0].tolist()
    # Prompt 0 to 5, samples 6 to 15 and 16 to 19: the changed token is the second one's third.
    assert changed == [18, 19]
    assert (other != prompt).any(-1).nonzero()[:, 0].tolist() == [*range(2, 33)]


def test_a_window_that_attention_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Mistral")
    inputs, _ = packed(model, *batch_of())
    own = transformers.models.mistral.modeling_mistral.ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(
        transformers.models.mistral.modeling_mistral.ALL_ATTENTION_FUNCTIONS,
        "sdpa",
        lambda *args, sliding_window, **kwargs: own(*args, **kwargs),
    )
    with pytest.raises(ValueError, match="passes no window to its implementation"):
        model(**inputs)


def test_attention_that_looks_its_function_up_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "its attention is not that of transformers' AttentionInterface"
    model, file = build("Qwen2"), transformers.models.qwen2.modeling_qwen2
    assert segments.reason_against(model) == ""
    monkeypatch.delattr(file, "ALL_ATTENTION_FUNCTIONS")
    assert segments.reason_against(model) == told


def test_a_mask_that_was_copied_says_the_same() -> None:
    model = build("Qwen2")
    inputs, _ = packed(model, *batch_of())
    with torch.no_grad():
        expected = model(**inputs).logits
        copied = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
        assert torch.equal(model(**copied).logits, expected)


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
