"""A group's prompt is read once: exact layouts, and real models against ms-swift's own passes over
the micro-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_grpo_ext.logits import proof, segments
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.packed import (
    GroupRows,
    SharedPromptInputs,
    UnknownInputError,
    layout_of,
    pack,
    reason_against,
    saving,
)
from swift_grpo_ext.logits.shim import LogitsShim
from tests.rig.logits.compare import assert_close
from tests.rig.logits.groups import ROWS, Group, positions_of
from tests.rig.logits.models import IMAGE, IMAGES, build
from tests.unit.logits.test_logps import Ours, Upstream, config_of, run

pytestmark = pytest.mark.usefixtures("packs_what_saves_little")

PAD = -100


def labelled(prompt: int, *rows: tuple[list[int], str]) -> GroupRows:
    """Return a group of rows; a letter `x` marks each token that is trained on."""
    labels = [
        [i if letter == "x" else PAD for i, letter in zip(ids, letters, strict=True)]
        for ids, letters in rows
    ]
    return GroupRows(prompt, [ids for ids, _ in rows], labels)


@pytest.mark.parametrize(
    ("groups", "row", "positions", "segments", "predicted"),
    [
        # An answer of its environment between two completions.
        (
            [labelled(2, ([7, 8, 1, 2], "--xx"), ([7, 8, 3, 4, 5, 6, 9], "--x--x-"))],
            *([7, 8, 1, 2, 8, 3, 4, 5, 6, 9], [0, 1, 2, 3, 1, 2, 3, 4, 5, 6]),
            *("A a a a b b b b b b", [0, 1, 1, 0, 1, 0, 0, 1, 0, 0]),
        ),
        # Two prompts; a group of one is a prompt from its first to its last token.
        (
            [
                labelled(0, ([6, 8, 1], "--x")),
                labelled(2, ([7, 8, 1, 2], "--xx"), ([7, 8, 3], "--x")),
                labelled(0, ([7, 8, 1], "--x")),
            ],
            *([6, 8, 1, 7, 8, 1, 2, 8, 3, 7, 8, 1], [0, 1, 2, 0, 1, 2, 3, 1, 2, 0, 1, 2]),
            *("A A A B a a a b b C C C", [0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 0]),
        ),
        # A response without a token, and one that is not trained on.
        (
            [labelled(3, ([7, 8, 9], "---"), ([7, 8, 9, 1, 2], "-----"), ([7, 8, 9, 3], "---x"))],
            *([7, 8, 9, 9, 1, 2, 9, 3], [0, 1, 2, 2, 3, 4, 2, 3]),
            *("A A a b b b c c", [0, 0, 0, 0, 0, 0, 1, 0]),
        ),
    ],
)
def test_samples_lie_behind_their_prompt(
    groups: list[GroupRows], row: Any, positions: Any, segments: str, predicted: Any
) -> None:
    """Capitals stand for prompts, small letters for samples of the prompt before."""
    ones = torch.ones(len(groups), 9, dtype=torch.int64)
    heads = {"input_ids": ones, "attention_mask": ones}
    found = layout_of(groups, heads)
    assert found.ids_L.tolist() == row
    assert found.columns_L.tolist() == positions
    assert found.predicts_L.tolist() == predicted
    number, expected = -1, list[tuple[int, int]]()
    for before, letter in zip(" " + segments[::2], segments[::2], strict=False):
        number += letter.isupper() and letter != before
        expected.append((number, 0 if letter.isupper() else " abc".index(letter)))
    assert list(zip(found.groups_L.tolist(), found.numbers_L.tolist(), strict=True)) == expected


def test_what_a_row_of_each_group_says_of_all_tokens() -> None:
    """A sample's own tokens are text, with positions that continue those of the prompt's image. The
    first row has padding on the left."""
    groups = [
        labelled(3, ([8, 8, 7, 1, 2], "---xx"), ([8, 8, 7, 3, 4, 5], "---xxx")),
        labelled(0, ([8, 8, 8, 8, 7, 6, 1], "------x")),
    ]
    ids = torch.tensor([[0, 8, 8, 7, 3, 4, 5], [8, 8, 8, 8, 7, 6, 1]])
    counted = torch.tensor([[0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 1, 2, 3]])
    heads = {
        "input_ids": ids,
        "attention_mask": (ids > 0).int(),
        "position_ids": torch.stack([counted, counted + 10, counted + 20]),
        "mm_token_type_ids": (ids == 8).int() + 2 * (ids == 5).int(),
        "second_per_grid_ts": [1.0],
        "pixel_values": torch.zeros(9, 2),
    }
    found = layout_of(groups, heads).inputs(heads)
    assert found.keys() == heads.keys() - {"attention_mask", "second_per_grid_ts"}
    text, down, right = found["position_ids"][:, 0].tolist()
    assert text == [0, 0, 1, 2, 3, 1, 2, 3, 4, 0, 0, 0, 0, 1, 2, 3]
    assert (down, right) == ([n + 10 for n in text], [n + 20 for n in text])
    assert found["mm_token_type_ids"].tolist() == [[1, 1, *[0] * 7, 1, 1, 1, 1, 0, 0, 0]]
    assert found["pixel_values"] is heads["pixel_values"]
    with pytest.raises(UnknownInputError, match=r"the input bias \(2, 7\) is not known"):
        layout_of(groups, heads).inputs({**heads, "bias": torch.zeros(2, 7)})
    with pytest.raises(UnknownInputError, match="attention_mask has the shape"):
        layout_of(groups, {**heads, "attention_mask": torch.ones(2, 1, 7, 7)})


def test_a_prompt_of_one_token_is_not_packed() -> None:
    """The samples share only the token that predicts their first ones."""
    groups = [labelled(1, ([7, 1], "-x"), ([7, 2], "-x"))]
    inputs = SharedPromptInputs({}, groups, {}, dict)
    with pytest.raises(UnknownInputError, match="a prompt has one token"):
        pack(inputs, build("Qwen2"))


def test_what_is_expected_to_be_saved() -> None:
    """A packed row has 89 positions of the prompt and 12, 12 and 2 of samples, in place of 303."""
    rows = [([1] * length, "-" * length) for length in (101, 101, 91)]
    assert 1 - saving([labelled(90, *rows)]) == pytest.approx((89 + 12 + 12 + 2) / 303)


# --- real models ---


@pytest.mark.parametrize(
    ("side", "chunk_size", "attention"), [("right", 99, "sdpa"), ("left", 4, "eager")]
)
def test_text_as_ms_swift_but_for_rounding(
    side: str, chunk_size: int, attention: str, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    informed: list[str] = []
    monkeypatch.setattr(proof.logger, "info", informed.append)
    model, batch = build("Qwen2", lora=True), Group(ROWS, side)
    model.get_base_model().set_attn_implementation(attention)
    keys = {"logits_to_keep"}
    expected, theirs, _ = run(Upstream, model, batch, keys=keys)
    seen = positions_of(model)
    monkeypatch.setattr(LogitsShim, "chunk_size", chunk_size)
    found, ours, _ = run(Ours, model, batch.shared(), keys=keys)
    assert_close(found, expected)
    assert torch.allclose(ours, theirs.where(ours != 0, 0.0), atol=1e-5)
    packed, whole = seen[-1], 5 * max(map(sum, ROWS))
    assert seen == [packed, whole, whole, packed]
    assert packed < whole
    assert f"Qwen2ForCausalLM read {packed} positions instead of {whole}" in informed[-1]
    assert not warned


TYPES = {"Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids"}

TOOL_ROWS = ((9, 4, 0, 0), (9, 5, 0, 0), (9, 2, 7, 3), (12, 4, 6, 2), (12, 3, 0, 0), (12, 2, 0, 0))
"""Rows with a tool's image are groups of one sample."""


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "InternVL", "Gemma3", "Gemma4", "Qwen3.5"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_images_as_ms_swift_but_for_rounding(name: str, side: str, warned: list[str]) -> None:
    """The tower, which is trained too, encodes the image of a group once."""
    model = build(name, lora=True)
    if name == "Qwen3.5" and "linear_attention" not in segments.KINDS:
        pytest.skip("transformers 5.12 has other states of gated delta nets")
    model.get_base_model().model.requires_grad_(True)
    batch = Group(TOOL_ROWS, side, has_images=True).see(model, IMAGES[name])
    if name in TYPES:  # its images look ahead
        batch.inputs[TYPES[name]] = (batch.inputs["input_ids"] == IMAGE).int()
    expected, _, _ = run(Upstream, model, batch, keys={"logits_to_keep"})
    num_images: list[int] = []
    patches = len(batch.inputs["pixel_values"]) // 8
    model.get_base_model().register_forward_pre_hook(
        lambda _, __, kwargs: num_images.append(len(kwargs["pixel_values"]) // patches),
        with_kwargs=True,
    )
    found, _, _ = run(Ours, model, batch.shared(), keys={"logits_to_keep"})
    assert_close(found, expected, 5e-5)
    # Packed: two prompts, and two samples with prompt and tool. Plain: six prompts and two tools.
    assert num_images == [6, 8, 8, 6]
    assert not warned


@pytest.mark.parametrize(
    ("name", "changed", "inputs", "told"),
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
    name: str, changed: dict[str, Any], inputs: dict[str, Any], told: str
) -> None:
    model = build(name)
    for key, value in changed.items():
        setattr(model.config.get_text_config(), key, value)
    found = reason_against(model, inputs)
    assert (told in found) if told else not found


@pytest.mark.parametrize(
    ("flags", "padding_free", "shares"),
    [
        ({}, False, True),
        ({"logps_shared_prompt": "false"}, False, False),
        ({"logits_shim": "off"}, False, False),
        ({}, True, False),
        ({"per_device_train_batch_size": 1}, False, False),
        ({"router_replay_mode": "R3"}, False, False),
        ({"torch_compile": True}, False, False),
    ],
)
def test_where_prompts_are_shared(flags: dict[str, Any], padding_free: bool, shares: bool) -> None:
    template: Any = SimpleNamespace(padding_free=padding_free, sequence_parallel_size=1)
    assert CompletionLogps(config_of(**flags), template).shares_prompts == shares


def test_inputs_that_are_not_packed_are_collated_by_ms_swift() -> None:
    """The trainer's settings, such as `use_cache`, apply too."""
    model, batch = build("Qwen2"), Group(ROWS)
    expected, _, _ = run(Upstream, model, batch, keys={"use_cache"})
    told: list[Any] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: told.append(kwargs["use_cache"]), with_kwargs=True
    )
    flags = {"logps_shared_prompt": "false"}
    found, _, _ = run(Ours, model, batch.shared(), keys={"use_cache"}, **flags)
    assert_close(found, expected)
    assert told == [False]
