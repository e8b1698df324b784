"""A packed row has each prompt once, and its samples behind it; attention and gated delta nets read
it by segments [L6]. Some models and inputs cannot be packed. `test_passes.py` compares whole
models."""

from typing import Any

import pytest
import torch

from swift_grpo_ext.logits import segments
from swift_grpo_ext.logits.packed import (
    GroupRows,
    SharedPromptInputs,
    UnknownInputError,
    layout_of,
    pack,
    reason_against,
)
from tests.rig.logits.models import build

GROUP = GroupRows(
    prompt=2,
    ids=[[7, 8, 1, 2], [7, 8, 3, 4, 5]],
    labels=[[-100, -100, 1, 2], [-100, -100, 3, -100, 5]],
)
ONES = torch.ones(1, 5, dtype=torch.int64)
HEADS = {"input_ids": ONES, "attention_mask": ONES}


def test_samples_lie_behind_their_prompt() -> None:
    """The prompt's last token belongs to each sample, as it predicts the first one of it. So a
    prompt of one token is not packed; nor are inputs that are not known."""
    layout = layout_of([GROUP], HEADS)
    assert layout.ids_L.tolist() == [7, 8, 1, 2, 8, 3, 4, 5]
    assert layout.columns_L.tolist() == [0, 1, 2, 3, 1, 2, 3, 4]
    assert layout.numbers_L.tolist() == [0, 1, 1, 1, 2, 2, 2, 2]
    assert layout.predicts_L.tolist() == [0, 1, 1, 0, 1, 0, 1, 0]
    inputs = layout.inputs({**HEADS, "second_per_grid_ts": [1.0]})
    assert inputs.keys() == {"input_ids", "position_ids"}
    with pytest.raises(UnknownInputError, match=r"the input bias \(1, 5\) is not known"):
        layout.inputs({**HEADS, "bias": torch.zeros(1, 5)})
    with pytest.raises(UnknownInputError, match="attention_mask has the shape"):
        layout_of([GROUP], {**HEADS, "attention_mask": torch.ones(1, 1, 5, 5)})
    short = [GroupRows(1, [[7, 1], [7, 2]], [[-100, 1], [-100, 2]])]
    with pytest.raises(UnknownInputError, match="a prompt has one token"):
        pack(SharedPromptInputs({}, short, {}, dict), build("Qwen2"))


@pytest.mark.parametrize(
    ("name", "changed", "inputs", "reason"),
    [
        ("Qwen2", {}, {}, ""),
        ("Qwen2", {"_attn_implementation": "flash_attention_2"}, {}, ""),
        ("Qwen2", {"_attn_implementation": "flex_attention"}, {}, "--attn_impl flex_attention is"),
        ("Qwen2", {"layer_types": ["chunked_attention"]}, {}, "(chunked_attention)"),
        ("Qwen2", {"output_router_logits": True}, {}, "--router_aux_loss_coef"),
        ("Qwen2.5-VL", {}, {}, "position ids from images"),
        ("Qwen2.5-VL", {}, {"position_ids": 0}, ""),
        ("soft-capped (Gemma2)", {}, {}, ""),
        ("remote code", {}, {}, "takes no position_ids"),
    ],
)
def test_what_cannot_be_packed(
    name: str, changed: dict[str, Any], inputs: dict[str, Any], reason: str
) -> None:
    model = build(name)
    for key, value in changed.items():
        setattr(model.config.get_text_config(), key, value)
    found = reason_against(model, inputs)
    assert (reason in found) if reason else not found


# --- segments ---


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
