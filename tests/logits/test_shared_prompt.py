"""A group's prompt is read once: layouts with exact values, and real models against ms-swift's
own passes over the whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swift_grpo_ext.logits import logps, segments, shared_prompt
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.shared_prompt import (
    GroupLengths,
    UnknownInputError,
    groups_of,
    layout_of,
    media_of,
    reason_against,
    samples_of,
    saving,
)
from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.ranks import RankGroup
from tests.logits.compare import assert_close
from tests.logits.models import IMAGE, IMAGES, PLACEHOLDERS, add_lora, build, qwen2
from tests.logits.test_logps import Batch, Ours, Upstream, config_of, run
from tests.ranks import ThreadRanks, run_rank_groups

APART = {(0, 1)}


@pytest.mark.parametrize(
    ("ids", "predicts", "other_media", "row", "positions", "segments", "predicted"),
    [
        # Padding on the left; an answer of its environment between two completions.
        (
            [[0, 0, 0, 7, 8, 1, 2], [7, 8, 3, 4, 5, 6, 9]],
            [[0, 0, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1, 0]],
            *(set(), [7, 8, 1, 8, 3, 4, 5, 6], [0, 1, 2, 1, 2, 3, 4, 5]),
            *("A a a b b b b b", [0, 1, 1, 1, 1, 0, 0, 1]),
        ),
        # Two prompts; a group of one is a prompt from beginning to end.
        (
            [[7, 8, 1, 2], [7, 8, 3, 0], [6, 8, 1, 0]],
            [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]],
            *(set(), [7, 8, 1, 8, 6, 8], [0, 1, 2, 1, 0, 1]),
            *("A a a b B B", [0, 1, 1, 1, 0, 1]),
        ),
        # Nothing says where the prompt of a sample without a completion ends: it stands by itself.
        (
            [[7, 8, 9], [7, 8, 9], [7, 8, 9]],
            [[0, 1, 0], [0, 1, 0], [0, 0, 0]],
            *(set(), [7, 8, 8, 7, 8], [0, 1, 1, 0, 1]),
            *("A a b B B", [0, 1, 1, 0, 0]),
        ),
        # A prompt of one token has nothing in common but what predicts.
        (
            [[8, 1], [8, 2]],
            [[1, 0], [1, 0]],
            *(set(), [8, 8], [0, 0]),
            *("A B", [1, 1]),
        ),
        # One prompt with other images is another prompt.
        (
            [[7, 8, 1], [7, 8, 2], [7, 8, 3]],
            [[0, 1, 0]] * 3,
            *(APART, [7, 8, 7, 8, 8], [0, 1, 0, 1, 1]),
            *("A A B a b", [0, 1, 0, 1, 1]),
        ),
    ],
)
def test_samples_lie_behind_their_prompt(
    ids: Any, predicts: Any, other_media: Any, row: Any, positions: Any, segments: str,
    predicted: Any,
) -> None:  # fmt: skip
    """Capitals are prompts; small letters the samples of the one before."""
    tokens, wanted = torch.tensor(ids), torch.tensor(predicts).bool()
    samples = samples_of(tokens, tokens > 0, wanted)
    found = layout_of(groups_of(samples, lambda a, b: (a, b) not in other_media))
    assert found.take(tokens).tolist() == [row]
    assert found.positions_L.tolist() == positions
    assert found.take(wanted).int().tolist() == [predicted]
    groups, numbers, letters = -1, [], []
    for letter in segments.split():
        groups += letter.isupper() and (not letters or letters[-1][1] != letter)
        letters.append((groups, letter))
        numbers.append(0 if letter.isupper() else " abc".index(letter))
    assert found.groups_L.tolist() == [group for group, _ in letters]
    assert found.numbers_L.tolist() == numbers


def test_samples_that_predict_nothing_share_nothing() -> None:
    """All completions of a batch may be masked out; equal rows have no samples behind them then."""
    ids = torch.tensor([[7, 8, 9], [7, 8, 9]])
    samples = samples_of(ids, ids > 0, torch.zeros_like(ids).bool())
    assert len(groups_of(samples, lambda a, b: True)) == 2


def test_what_is_expected_to_be_saved() -> None:
    """Three samples of 11, 11 and 1 positions of a prompt of 89 that stand in rows of 100."""
    ids = torch.ones(3, 101, dtype=torch.int64)
    predicts = torch.zeros_like(ids).bool()
    predicts[:2, 89:100] = predicts[2, 89] = True
    samples = samples_of(ids, ids > 0, predicts)
    group = [*map(GroupLengths.of, groups_of(samples, lambda a, b: True))]

    def share(width: int, **text: Any) -> float:
        return 1 - saving(group, SimpleNamespace(hidden_size=width, **text))

    assert share(10**9) == pytest.approx((89 + 11 + 11 + 1) / 300)
    # Where pairs are all that costs: those of the prompt, and of samples with it and themselves.
    pairs = 89**2 / 2 + 2 * 11 * (89 + 11 / 2) + (89 + 1 / 2)
    assert share(0) == pytest.approx(pairs / (3 * 100**2 / 2))
    window = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    assert share(0, **window) == pytest.approx((89 + 11 + 11 + 1) / 300)
    # A gated delta net has samples in rows of one length, and no pairs.
    assert share(1, layer_types=["linear_attention"]) == pytest.approx((89 + 3 * 11) / 300)


def lengths_of_media(ids: list[list[int]], config: dict[str, Any], **inputs: Any) -> Any:
    """Return, for each row, lengths of the media of its prompt and suffix, by the inputs' names.
    The rows have no padding, and predict something at their third and fifth columns."""
    input_ids = torch.tensor(ids)
    wanted = torch.zeros_like(input_ids).bool()
    wanted[:, [2, 4]] = True
    samples = samples_of(input_ids, torch.ones_like(input_ids).bool(), wanted)
    rows = media_of(inputs, samples, SimpleNamespace(**config))
    return [{name: (len(row.prompt[name]), len(row.suffix[name])) for name in row.prompt}
            for row in rows]  # fmt: skip


MEDIA_ROWS = [[IMAGE, 7, 1, IMAGE, 2, 9], [7] * 6, [IMAGE, IMAGE, 7, 7, 7, IMAGE]]
"""Two images, one of them a tool's; none; one of twice their size, and one that is given when all
is said. A token stands for four patches."""

GRID = [[1, 2, 2], [1, 2, 2], [1, 2, 4], [1, 2, 2]]
NAMED = {"image_token_id": IMAGE}


def test_each_row_has_the_media_that_its_placeholders_take_up() -> None:
    inputs = {"pixel_values": torch.arange(20.0), "image_grid_thw": torch.tensor(GRID)}
    assert lengths_of_media(MEDIA_ROWS, NAMED, **inputs) == [
        {"pixel_values": (4, 4), "image_grid_thw": (1, 1)},
        {"pixel_values": (0, 0), "image_grid_thw": (0, 0)},
        {"pixel_values": (8, 0), "image_grid_thw": (1, 0)},
    ]
    # Without a grid, all images are of one size.
    ids = [*MEDIA_ROWS[:2], [IMAGE, 7, 7, 7, 7, IMAGE]]
    found = lengths_of_media(ids, {"image_token_index": IMAGE}, pixel_values=torch.zeros(4, 3))
    assert found == [{"pixel_values": lengths} for lengths in ((1, 1), (0, 0), (1, 0))]


def test_images_that_are_cut_into_tiles() -> None:
    """LLaVA-NeXT cuts an image into 2 or 4 tiles here, beside the whole, and its placeholders are
    no measure of that."""
    config = {
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[4, 8], [8, 8]],
        "vision_config": SimpleNamespace(image_size=4),
    }
    sizes = torch.tensor([[4, 8], [4, 8], [8, 7], [4, 8]])
    pixels = torch.zeros(3 + 3 + 5 + 3, 3, 4, 4)
    assert lengths_of_media(MEDIA_ROWS, config, pixel_values=pixels, image_sizes=sizes) == [
        {"pixel_values": (3, 3), "image_sizes": (1, 1)},
        {"pixel_values": (0, 0), "image_sizes": (0, 0)},
        {"pixel_values": (5, 0), "image_sizes": (1, 0)},
    ]
    with pytest.raises(UnknownInputError, match="cannot be split by sample"):
        lengths_of_media(MEDIA_ROWS, config, pixel_values=pixels, image_sizes=sizes[:3])


@pytest.mark.parametrize(
    ("config", "grid", "num_patches"),
    [
        (NAMED, [*GRID[:2], [1, 2, 6], [1, 2, 2]], 24),  # a border within an image
        ({}, GRID, 20),
        (NAMED, GRID, 24),
    ],
)
def test_media_that_do_not_come_out_even(
    config: dict[str, int], grid: list[list[int]], num_patches: int
) -> None:
    inputs = {"pixel_values": torch.zeros(num_patches, 2), "image_grid_thw": torch.tensor(grid)}
    with pytest.raises(UnknownInputError, match="pixel_values cannot be split by sample"):
        lengths_of_media(MEDIA_ROWS, config, **inputs)


# --- real models ---


@dataclass
class Group(Batch):
    """Two groups of samples, each of one prompt, of ids that ms-swift's batch has."""

    has_images: bool = False
    """Whether each prompt begins with an image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.inputs["input_ids"]
        own: dict[int, Tensor] = {}
        for row, (prompt, *_) in enumerate(self.rows):
            first = self.first_of(row)
            here = slice(first, first + prompt)
            ids[row, here] = own.setdefault(prompt, ids[row, here].clone())
            if self.has_images:
                ids[row, first : first + 6] = PLACEHOLDERS

    def first_of(self, row: int) -> int:
        return int(self.inputs["attention_mask"][row].int().argmax())

    def see(self, model: Any, pixels: Callable[[int], dict[str, Tensor]]) -> Group:
        """Give each group an image, and one to all answers of tools, with the positions that
        ms-swift's template gives them."""
        ids = self.inputs["input_ids"]
        seen: dict[int, Any] = {}
        given, each = pixels(1), []
        for row, (prompt, completion, tool, _) in enumerate(self.rows):
            each += [seen.setdefault(prompt, pixels(1))] if self.has_images else []
            if tool:
                first = self.first_of(row) + prompt + completion
                ids[row, first : first + 6] = PLACEHOLDERS
                each.append(given)
        self.inputs |= {k: torch.cat([image[k] for image in each]) for k in each[0]}
        if "image_grid_thw" in self.inputs:
            find_positions = model.get_base_model().model.get_rope_index
            kinds = {"mm_token_type_ids": (ids == IMAGE).int()}
            if not kinds.keys() <= inspect.signature(find_positions).parameters.keys():
                kinds = {}  # transformers 4 looks for placeholders itself
            wanted = ("image_grid_thw", "attention_mask")
            given_to_it = {name: self.inputs[name] for name in wanted}
            positions, _ = find_positions(ids, **given_to_it, **kinds)
            self.inputs |= {**kinds, "position_ids": positions}
        return self


ROWS = ((9, 4, 0, 0), (9, 6, 0, 0), (9, 2, 3, 3), (12, 3, 0, 0), (12, 1, 0, 0))


def positions_of(model: Any) -> list[int]:
    """How many positions the decoder reads, in each pass from now on."""
    seen: list[int] = []
    decoder = base_model(model).get_decoder()
    decoder.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0][..., 0].numel()), with_kwargs=True
    )
    return seen


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(logps.logger, "warning", told.append)
    return told


@pytest.mark.parametrize(
    ("side", "chunk_size", "attention"), [("right", 0, "sdpa"), ("left", 4, "eager")]
)
def test_text_as_ms_swift_but_for_rounding(
    side: str, chunk_size: int, attention: str, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    informed: list[str] = []
    monkeypatch.setattr(logps.logger, "info", informed.append)
    model, batch = build("Qwen2", lora=True), Group(ROWS, side)
    model.get_base_model().set_attn_implementation(attention)
    keys = {"logits_to_keep"}
    expected, theirs, _ = run(Upstream, model, batch, keys=keys)
    seen = positions_of(model)
    flags = {"logps_shared_prompt": "true", "logps_chunk_size": chunk_size}
    found, ours, _ = run(Ours, model, batch, keys=keys, **flags)
    assert_close(found, expected)
    assert torch.allclose(ours, theirs.where(ours != 0, 0.0), atol=1e-5)
    packed, whole = seen[-1], 5 * max(map(sum, ROWS))
    assert seen == [packed, whole, whole, packed]
    assert packed < whole
    assert f"Qwen2ForCausalLM read {packed} positions in the place of {whole}" in informed[-1]
    assert not warned


KINDS = {"Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids"}

TOOL_ROWS = ((9, 2, 7, 3), (9, 4, 7, 2), (9, 5, 0, 0), (9, 1, 7, 0), (9, 3, 7, 1), (12, 4, 6, 2))
"""The fourth ends with what its tool gave, which predicts nothing and is not read."""


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "InternVL", "Gemma3", "Gemma4", "Qwen3.5"])
def test_images_as_ms_swift_but_for_rounding(name: str, warned: list[str]) -> None:
    """The tower, which learns too, sees the image of a group once. Those of tools stay the samples'
    own, also where neighbours were given one image: each has placeholders for its own."""
    model = build(name, lora=True)
    model.get_base_model().model.requires_grad_(True)
    batch = Group(TOOL_ROWS, has_images=True).see(model, IMAGES[name])
    if name in KINDS:  # its images look ahead
        batch.inputs[KINDS[name]] = (batch.inputs["input_ids"] == IMAGE).int()
    expected, _, _ = run(Upstream, model, batch, keys={"logits_to_keep"})
    num_images: list[int] = []
    patches = len(batch.inputs["pixel_values"]) // 11
    model.get_base_model().register_forward_pre_hook(
        lambda _, __, kwargs: num_images.append(len(kwargs["pixel_values"]) // patches),
        with_kwargs=True,
    )
    found, _, _ = run(Ours, model, batch, keys={"logits_to_keep"}, logps_shared_prompt="true")
    assert_close(found, expected, 5e-5)
    # Two prompts' and four tools'; of six samples and five tools in the batch it is held against.
    assert num_images == [6, 11, 11, 6]
    assert not warned


def test_images_that_nothing_is_learned_from_keep_their_tower_in_use(warned: list[str]) -> None:
    """A rank that does not call a tower, which others call, would leave them waiting."""
    model, rows = build("Qwen2.5-VL", lora=True), ((9, 2, 7, 0), (9, 2, 7, 0))
    batch = Group(rows).see(model, IMAGES["Qwen2.5-VL"])
    num_calls: list[int] = []
    model.get_base_model().model.visual.register_forward_pre_hook(lambda *_: num_calls.append(1))
    run(Ours, model, batch, keys={"logits_to_keep"}, logps_shared_prompt="true")
    assert len(num_calls) == 1
    assert "all pixel_values come after the last token that is trained on" in warned[0]


def test_equal_words_with_other_images_stay_apart() -> None:
    model = build("Qwen2.5-VL", lora=True)
    batch = Group(ROWS[:2] + ROWS[3:], has_images=True).see(model, IMAGES["Qwen2.5-VL"])
    batch.inputs["pixel_values"] = torch.randn(4 * 16, 1176)
    seen = positions_of(model)
    run(Ours, model, batch, keys={"logits_to_keep"}, logps_shared_prompt="true")
    assert seen == [batch.inputs["input_ids"].numel()]


def blind_to_masks(model: Any) -> None:
    """Let a model's samples see one another."""
    inner: Any = base_model(model).model
    own = inner.forward

    def forward(*args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
        seen = attention_mask if attention_mask.ndim == 2 else torch.ones_like(attention_mask)
        return own(*args, attention_mask=seen, **kwargs)

    inner.forward = forward


def sharing(flag: str = "true", ranks: RankGroup | None = None, **flags: Any) -> Any:
    """A trainer that packs what it can."""
    config = config_of(logps_shared_prompt=flag, **flags)
    return Ours(config, keys=set(), padding_free=False, ranks=ranks)


def make_pass(trainer: Any, model: Any, batch: Batch) -> Tensor:
    """Log-probabilities without gradients, as of the old policy."""
    with torch.no_grad():
        logps_BK, _ = trainer._get_per_token_logps_and_entropies_single(
            model, dict(batch.inputs), batch.grpo_batch()
        )
    return logps_BK


def test_a_pass_over_one_sample_decides_nothing(warned: list[str]) -> None:
    """It has nothing to share; batches that come after it say what is true of them."""
    trainer, model = sharing(), build("Qwen2")
    seen = positions_of(model)
    for rows in (ROWS[:1], ROWS, ROWS):
        make_pass(trainer, model, Group(rows))
    packed, whole = min(seen[1:]), 5 * max(map(sum, ROWS))
    assert seen == [13, packed, whole, whole, packed, packed]
    assert not warned


def test_batches_within_a_window_prove_nothing_of_longer_ones(warned: list[str]) -> None:
    """Mistral sees 5 positions here."""
    trainer, model = sharing(), build("Mistral")
    short, long = ((4, 1, 0, 0), (4, 1, 0, 0)), ROWS[:2]
    seen = positions_of(model)
    for rows in (short, short, long, short, long):
        make_pass(trainer, model, Group(rows))
    assert seen == [5, 10, 10, 5, 5, 18, 30, 30, 18, 5, 18]
    assert not warned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_proves_nothing_of_images(
    dtype: torch.dtype, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's images look ahead in all layers here, and should in those with windows alone."""
    right = shared_prompt.images_that_look_ahead
    monkeypatch.setattr(
        shared_prompt, "images_that_look_ahead", lambda m: (right(m)[0], segments.EVERYWHERE)
    )
    trainer, model = sharing(), build("Gemma4").to(dtype)
    images = Group(ROWS, has_images=True).see(add_lora(model), IMAGES["Gemma4"])
    images.inputs["pixel_values"] = images.inputs["pixel_values"].to(dtype)
    images.inputs[KINDS["Gemma4"]] = (images.inputs["input_ids"] == IMAGE).int()
    seen = positions_of(model)
    values = [make_pass(trainer, model, batch) for batch in (Group(ROWS), images, images)]
    packed, whole = min(seen), 5 * max(map(sum, ROWS))
    assert seen == [packed, whole, whole, packed, packed, *[whole] * 4]
    assert torch.equal(*values[1:])
    assert "rows of image lie" in warned[0]


def test_a_small_fault_is_no_rounding(warned: list[str]) -> None:
    """A thousandth of each logit is less than engines and training may lie apart."""
    model = build("Qwen2")

    def shift(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["attention_mask"].ndim == 4:
            output.logits = output.logits * 1.001

    model.register_forward_hook(shift, with_kwargs=True)
    trainer = sharing(logits_shim="auto")
    make_pass(trainer, model, Group(ROWS))
    assert "rows of text lie 0.00" in warned[0]


LONG = ((12, 5, 0, 0), (12, 6, 0, 0))
"""Rows of 17 and 18 tokens."""


@pytest.mark.parametrize(
    ("rope", "is_packed"),
    [
        # Proven on each side of the border; not where the plain batch alone lies beyond it.
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}, True),
        ({"rope_type": "dynamic", "factor": 2.0}, False),  # new angles for each length
    ],
)
def test_angles_that_follow_the_longest_row(
    rope: dict[str, Any], is_packed: bool, warned: list[str]
) -> None:
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
    model = qwen2(rope_parameters=rope, max_position_embeddings=64)
    trainer, seen = sharing(), positions_of(model)
    short, astride = ((9, 4, 0, 0), (9, 6, 0, 0)), ((12, 4, 0, 0), (12, 5, 0, 0))
    for rows in (short, LONG, short, LONG, astride):
        make_pass(trainer, model, Group(rows))
    proof = [18, 30, 30, 18]
    long = [22, 36, 36, 22] if is_packed else [36]
    assert seen == [*proof, *long, 18, *long[-1:], 34]
    assert len(warned) == 1
    assert "follows the longest row" in warned[0]


@pytest.mark.parametrize(("rows", "is_packed"), [(((3, 20, 0, 0), (3, 21, 0, 0)), 0), (ROWS, 1)])
def test_auto_packs_what_saves_a_tenth(rows: Any, is_packed: bool, warned: list[str]) -> None:
    trainer, model, batch = sharing("auto"), build("Qwen2"), Group(rows)
    seen = positions_of(model)
    make_pass(trainer, model, batch)
    assert (min(seen) < batch.inputs["input_ids"].numel()) == is_packed
    assert not warned


def test_a_packed_pass_that_fails_ends_nothing(warned: list[str]) -> None:
    trainer, model = sharing(), build("Qwen2")

    def refuse(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["attention_mask"].ndim == 4:
            raise KeyError("four dimensions")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    values = [make_pass(trainer, model, Group(ROWS)) for _ in range(2)]
    assert torch.equal(*values)
    assert len(warned) == 1
    assert "as they are: its first packed pass failed (KeyError: 'four dimensions')" in warned[0]


def test_what_one_rank_has_seen_fail_no_rank_does(warned: list[str]) -> None:
    """Rank 1's model sees more than the mask says; rank 0's first batch did not show it. Rank 0
    makes a pass more, as with a teacher whom only some batches ask, and waits for nobody in it."""
    models = [build("Qwen2") for _ in range(2)]
    blind_to_masks(models[1])
    seen = [positions_of(model) for model in models]

    def work(ranks: ThreadRanks) -> None:
        trainer = sharing(ranks=ranks)
        for _ in range(2):
            for _ in range(2 - ranks.rank):
                make_pass(trainer, models[ranks.rank], Group(ROWS))
            trainer.completion_logps.end_round()

    run_rank_groups(2, work)
    packed, whole = seen[0][0], 5 * max(map(sum, ROWS))
    proof = [packed, whole, whole]
    assert seen == [[*proof, packed, packed, whole, whole], [*proof, whole, whole]]
    other, own = sorted(warned)
    assert own.startswith(
        "--logps_shared_prompt true leaves batches of Qwen2ForCausalLM as they are:"
    )
    assert "rows of text lie" in own
    assert "from here on: on another rank" in other


@pytest.mark.parametrize(
    ("name", "changed", "inputs", "told"),
    [
        ("Qwen2", {}, {}, ""),
        ("Qwen2", {"_attn_implementation": "flash_attention_2"}, {}, ""),
        ("Qwen2", {"_attn_implementation": "flex_attention"}, {}, ""),
        ("Qwen2", {"_attn_implementation": "paged|eager"}, {}, "--attn_impl paged|eager is"),
        ("Qwen2", {"layer_types": ["chunked_attention"]}, {}, "(chunked_attention)"),
        ("Qwen2", {"output_router_logits": True}, {}, "--router_aux_loss_coef"),
        ("Qwen2.5-VL", {}, {}, "made of its images"),
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


ALONE = {"per_device_train_batch_size": 1, "steps_per_generation": 1}
"""Ranks have one sample of a round each."""


@pytest.mark.parametrize(
    ("flags", "padding_free", "told"),
    [
        ({"logits_shim": "off"}, False, "no effect with --logits_shim off"),
        ({}, True, "no effect with --padding_free true"),
        ({"per_device_train_batch_size": 1}, False, ""),
        (ALONE, False, "no effect with --per_device_train_batch_size 1, with which a rank has one"),
        ({**ALONE, "logps_shared_prompt": "auto"}, False, ""),
        ({"router_replay_mode": "R3"}, False, "no effect with --router_replay_mode R3"),
        ({}, False, ""),
    ],
)
def test_where_it_has_no_effect_it_is_said(
    flags: dict[str, Any], padding_free: bool, told: str, warned: list[str]
) -> None:
    template = SimpleNamespace(padding_free=padding_free, sequence_parallel_size=1)
    CompletionLogps(config_of(**{"logps_shared_prompt": "true", **flags}), template)
    assert [told in text for text in warned] == ([True] if told else [])
