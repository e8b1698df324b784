"""Packed rows are used once they are proven to have the log-probabilities of plain rows [L6]."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from swift_grpo_ext.logits import packed as packed_rows
from swift_grpo_ext.logits import proof, segments
from swift_grpo_ext.logits.shim import base_model
from tests.rig.logits.batch import ROWS, Batch
from tests.rig.logits.models import add_lora, build, qwen2
from tests.rig.logits.trainers import Ours, make_pass, seen_positions
from tests.rig.ranks import ThreadRanks, run_rank_groups

pytestmark = pytest.mark.usefixtures("packs_what_saves_little")
WORTH = proof.WORTH
WHOLE = 5 * max(map(sum, ROWS))
"""Positions of a plain pass over `ROWS`."""


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
    trainer, model = Ours(), build("Qwen2")
    seen = seen_positions(model)
    for rows in (ROWS[:1], ROWS, ROWS):
        make_pass(trainer, model, Batch(rows).shared())
    packed = min(seen[1:])
    assert seen == [13, packed, WHOLE, WHOLE, packed, packed]
    assert not warned


def test_rows_within_a_window_prove_nothing_of_longer_ones(warned: list[str]) -> None:
    """Mistral sees 5 positions here."""
    trainer, model = Ours(), build("Mistral")
    short, long = ((4, 1), (4, 1)), ROWS[:2]
    seen = seen_positions(model)
    for rows in (short, short, long, short, long):
        make_pass(trainer, model, Batch(rows).shared())
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
    trainer, model = Ours(), add_lora(build("Gemma4"))
    rows = ROWS[:2] + ROWS[3:]
    texts, images = Batch(rows), Batch(rows).see(model)
    seen = seen_positions(model)
    values = [make_pass(trainer, model, each.shared()) for each in (texts, images, images)]
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
    make_pass(Ours(), model, Batch(ROWS).shared())
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
    trainer, seen = Ours(), seen_positions(model)
    plain = Ours(logps_shared_prompt="false")
    for rows in (((9, 4), (9, 6)), ((12, 4), (12, 5)), ((12, 5), (12, 9))):
        batch = Batch(rows).shared()
        found = make_pass(trainer, model, batch)
        torch.testing.assert_close(found, make_pass(plain, model, batch))
    assert seen == [20, 30, 30, 20, 30, 22, 34, 27, 42]


@pytest.mark.parametrize(("rows", "is_packed"), [(((3, 30), (3, 31)), False), (ROWS, True)])
def test_what_saves_a_tenth_is_packed(
    rows: Any, is_packed: bool, informed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "WORTH", WORTH)
    trainer, model, batch = Ours(), build("Qwen2"), Batch(rows).shared()
    seen = seen_positions(model)
    make_pass(trainer, model, batch)
    assert (min(seen) < batch.inputs["input_ids"].numel()) == is_packed
    assert ("would save 4%, and 10% is the least" in informed[0]) != is_packed


def test_a_packed_pass_that_fails_ends_nothing(warned: list[str]) -> None:
    trainer, model = Ours(), build("Qwen2")

    def refuse(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["attention_mask"].ndim == 4:
            raise KeyError("four dimensions")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    values = [make_pass(trainer, model, Batch(ROWS).shared()) for _ in range(2)]
    assert torch.equal(*values)
    assert len(warned) == 1
    assert "as they are: the first packed pass failed (KeyError: 'four dimensions')" in warned[0]


def test_what_one_rank_has_seen_fail_no_rank_does(warned: list[str]) -> None:
    """Rank 1's model ignores masks, rank 0's does not. Rank 0 makes one pass more, as with a
    teacher of some rows, and waits for nobody in it."""
    models = [build("Qwen2") for _ in range(2)]
    blind_to_masks(models[1])
    seen = [seen_positions(model) for model in models]

    def work(ranks: ThreadRanks) -> None:
        trainer = Ours()
        for _ in range(2):
            for _ in range(2 - ranks.rank):
                make_pass(trainer, models[ranks.rank], Batch(ROWS).shared())
            failed = ranks.all_gather(trainer.completion_logps.sharing_failed)
            trainer.completion_logps.end_round(any(failed))

    run_rank_groups(2, work)
    packed = seen[0][0]
    first = [packed, WHOLE, WHOLE]
    assert seen == [[*first, packed, packed, WHOLE, WHOLE], [*first, WHOLE, WHOLE]]
    other, own = sorted(warned)
    assert "auto leaves micro-batches of Qwen2ForCausalLM as they are: " in own
    assert "rows of text differ by" in own
    assert "from here on: on another rank" in other
