"""Packed rows are proven to have the log-probabilities of plain ones before they are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swift_grpo_ext.logits import packed as packed_rows
from swift_grpo_ext.logits import proof, segments
from swift_grpo_ext.logits.shim import base_model
from tests.rig.logits.groups import ROWS, Group, make_pass, positions_of, sharing
from tests.rig.logits.models import IMAGE, IMAGES, add_lora, build, qwen2
from tests.rig.ranks import ThreadRanks, run_rank_groups
from tests.unit.logits.test_logps import Ours, config_of

pytestmark = pytest.mark.usefixtures("packs_what_saves_little")
WORTH = proof.WORTH


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(proof.logger, "info", lines.append)
    return lines


def blind_to_masks(model: Any) -> None:
    """Let a model's samples see one another."""
    inner: Any = base_model(model).model
    own = inner.forward

    def forward(*args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
        seen = attention_mask if attention_mask.ndim == 2 else torch.ones_like(attention_mask)
        return own(*args, attention_mask=seen, **kwargs)

    inner.forward = forward


def test_a_pass_over_one_sample_decides_nothing(warned: list[str]) -> None:
    """It shares nothing; a later micro-batch is the proof."""
    trainer, model = sharing(), build("Qwen2")
    seen = positions_of(model)
    for rows in (ROWS[:1], ROWS, ROWS):
        make_pass(trainer, model, Group(rows).shared())
    packed, whole = min(seen[1:]), 5 * max(map(sum, ROWS))
    assert seen == [13, packed, whole, whole, packed, packed]
    assert not warned


def test_rows_within_a_window_prove_nothing_of_longer_ones(warned: list[str]) -> None:
    """Mistral sees 5 positions here."""
    trainer, model = sharing(), build("Mistral")
    short, long = ((4, 1, 0, 0), (4, 1, 0, 0)), ROWS[:2]
    seen = positions_of(model)
    for rows in (short, short, long, short, long):
        make_pass(trainer, model, Group(rows).shared())
    assert seen == [7, 10, 10, 7, 7, 20, 30, 30, 20, 7, 20]
    assert not warned


def test_text_proves_nothing_of_images(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: Gemma 4's images look ahead in all layers, and not only in those with windows.

    In a tiny model it moves log-probabilities by 0.006 to 0.07 nats; bfloat16 allows 0.033.
    """
    right = packed_rows.images_that_look_ahead
    if right(build("Gemma4"))[1] == segments.EVERYWHERE:
        pytest.skip("transformers 5.12 lets them look ahead in all layers")
    monkeypatch.setattr(
        packed_rows, "images_that_look_ahead", lambda m: (right(m)[0], segments.EVERYWHERE)
    )
    trainer, model = sharing(), build("Gemma4")
    rows = ROWS[:2] + ROWS[3:]
    images = Group(rows, has_images=True).see(add_lora(model), IMAGES["Gemma4"])
    images.inputs["mm_token_type_ids"] = (images.inputs["input_ids"] == IMAGE).int()
    seen = positions_of(model)
    batches = [each.shared() for each in (Group(rows), images, images)]
    values = [make_pass(trainer, model, batch) for batch in batches]
    packed, whole = min(seen), 4 * max(map(sum, rows))
    assert seen == [packed, whole, whole, packed, packed, *[whole] * 4]
    assert torch.equal(*values[1:])
    assert "rows of image differ by" in warned[0]


def test_a_small_fault_is_no_rounding(warned: list[str]) -> None:
    """A fault of a thousandth of each logit is less than the limit between engines and training."""
    model = build("Qwen2")

    def shift(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs["attention_mask"].ndim == 4:
            output.last_hidden_state = output.last_hidden_state * 1.001

    model.model.register_forward_hook(shift, with_kwargs=True)
    make_pass(sharing(), model, Group(ROWS).shared())
    assert "rows of text differ by 0.00" in warned[0]


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
        {"rope_type": "dynamic", "factor": 2.0},
    ],
)
def test_angles_that_follow_the_longest_row(rope: dict[str, Any]) -> None:
    """A packed row has the angles of the longest row, also if that is 1 beyond a border."""
    rope |= {"rope_theta": 10000.0, "original_max_position_embeddings": 16}
    model = qwen2(rope_parameters=rope, max_position_embeddings=16)
    trainer, seen = sharing(), positions_of(model)
    plain = Ours(config_of(logps_shared_prompt="false"), keys=set(), padding_free=False)
    short, astride = ((9, 4, 0, 0), (9, 6, 0, 0)), ((12, 4, 0, 0), (12, 5, 0, 0))
    for rows in (short, astride, ((12, 5, 0, 0), (12, 9, 0, 0))):
        batch = Group(rows).shared()
        found = make_pass(trainer, model, batch)
        torch.testing.assert_close(found, make_pass(plain, model, batch))
    assert seen == [20, 30, 30, 20, 30, 22, 34, 27, 42]


@pytest.mark.parametrize(("rows", "is_packed"), [(((3, 30, 0, 0), (3, 31, 0, 0)), 0), (ROWS, 1)])
def test_what_saves_a_tenth_is_packed(
    rows: Any, is_packed: bool, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "WORTH", WORTH)
    trainer, model, batch = sharing(), build("Qwen2"), Group(rows).shared()
    seen = positions_of(model)
    make_pass(trainer, model, batch)
    assert (min(seen) < batch.inputs["input_ids"].numel()) == is_packed
    assert ("would save 4%, and 10% is the least" in told[0]) != is_packed


def test_a_packed_pass_that_fails_ends_nothing(warned: list[str]) -> None:
    trainer, model = sharing(), build("Qwen2")

    def refuse(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["attention_mask"].ndim == 4:
            raise KeyError("four dimensions")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    values = [make_pass(trainer, model, Group(ROWS).shared()) for _ in range(2)]
    assert torch.equal(*values)
    assert len(warned) == 1
    assert "as they are: the first packed pass failed (KeyError: 'four dimensions')" in warned[0]


def test_what_one_rank_has_seen_fail_no_rank_does(warned: list[str]) -> None:
    """Rank 1's model ignores masks, rank 0's does not. Rank 0 makes one pass more, as with a
    teacher of some rows, and waits for nobody in it."""
    models = [build("Qwen2") for _ in range(2)]
    blind_to_masks(models[1])
    seen = [positions_of(model) for model in models]

    def work(ranks: ThreadRanks) -> None:
        trainer = sharing()
        for _ in range(2):
            for _ in range(2 - ranks.rank):
                make_pass(trainer, models[ranks.rank], Group(ROWS).shared())
            failed = ranks.all_gather(trainer.completion_logps.sharing_failed)
            trainer.completion_logps.end_round(any(failed))

    run_rank_groups(2, work)
    packed, whole = seen[0][0], 5 * max(map(sum, ROWS))
    proof = [packed, whole, whole]
    assert seen == [[*proof, packed, packed, whole, whole], [*proof, whole, whole]]
    other, own = sorted(warned)
    assert own.startswith(
        "--logps_shared_prompt auto leaves micro-batches of Qwen2ForCausalLM as they are:"
    )
    assert "rows of text differ by" in own
    assert "from here on: on another rank" in other
