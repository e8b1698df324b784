"""Our trainer's log-probabilities equal ms-swift's, over all layouts of a batch [L1, L5, L6].
Packed rows are used once they are proven to have the log-probabilities of plain rows."""

from typing import Any

import pytest
import torch

from swift_grpo_ext.logits import proof
from swift_grpo_ext.logits.segments import is_packed
from swift_grpo_ext.logits.shim import LogitsShim
from tests.rig.logits.batch import (
    ROWS,
    UNEQUAL,
    Batch,
    Ours,
    Rows,
    Run,
    Upstream,
    assert_close,
    counted_positions,
    loss_pass,
    make_pass,
    seen_positions,
    values_and_gradients,
)
from tests.rig.logits.models import build
from tests.rig.ranks import ThreadRanks, run_rank_groups

WORTH = proof.WORTH
PACKED, WHOLE = 46, 5 * max(map(sum, ROWS))
"""Positions of both passes over `ROWS`."""

SHORT: Rows = ((4, 1), (4, 1))


@pytest.fixture(autouse=True)
def _packs_what_saves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "WORTH", 0.0)


def run(trainer: Any, model: Any, batch: Batch, *, entropy: bool = True) -> tuple[Run, list[int]]:
    """Return log-probabilities and entropies with gradients, and the numbers of positions at the
    head."""
    with counted_positions(model) as counts:
        found = values_and_gradients(
            model, lambda: loss_pass(trainer, model, batch, entropy=entropy)
        )
    return found, counts


@pytest.mark.parametrize(
    ("layout", "chunk_size", "entropy"),
    [("right", 99, False), ("right", 4, True), ("left", 4, False), ("packed", 99, True)],
)
def test_as_ms_swift_but_for_rounding(
    layout: str, chunk_size: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogitsShim, "chunk_size", chunk_size)
    model, batch = build("Qwen2", lora=True), Batch(UNEQUAL, layout)
    is_free = layout == "packed"
    expected, theirs = run(Upstream(padding_free=is_free), model, batch, entropy=entropy)
    found, counts = run(Ours(padding_free=is_free), model, batch, entropy=entropy)
    assert_close(found, expected)
    num_tokens = len(batch.targets_N)
    assert max(counts) == min(chunk_size, num_tokens)
    # A pass in chunks ends with one position, and its backward computes the others again.
    assert sum(counts) == 2 * num_tokens + 1
    assert max(theirs) > num_tokens


def test_a_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are not packed are collated by ms-swift. The trainer's settings, such as
    `use_cache`, apply to both."""
    monkeypatch.setattr(LogitsShim, "chunk_size", 4)
    model, batch = build("Qwen2", lora=True), Batch(ROWS, "left")
    expected, _ = run(Upstream(), model, batch)
    seen, settings = seen_positions(model), list[bool]()
    model.register_forward_pre_hook(
        lambda _, __, kwargs: settings.append(kwargs["use_cache"]), with_kwargs=True
    )
    for flags in ({}, {"logps_shared_prompt": "false"}):
        ours = Ours(**flags)
        ours.model_kwarg_keys = {"use_cache"}
        found, _ = run(ours, model, batch.shared())
        assert_close(found, expected)
    assert seen == [PACKED, WHOLE, WHOLE, PACKED, WHOLE]  # the first three are the proof
    assert settings == [False] * 5


def test_without_the_shim() -> None:
    """`--logits_shim off` has ms-swift's own arithmetic."""
    model, batch = build("Qwen2"), Batch(UNEQUAL)
    expected, theirs = run(Upstream(), model, batch)
    found, counts = run(Ours(logits_shim="off"), model, batch)
    assert_close(found, expected, 0.0)
    assert counts == theirs


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"parallel": 2}, "sequence_parallel_size 2"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({}, ""),
        ({"logits_shim": "off", "use_liger_kernel": True, "parallel": 2}, ""),
    ],
)
def test_what_is_left_alone_is_said(
    settings: dict[str, Any], reason: str, warnings: list[str]
) -> None:
    model, batch = build("Qwen2"), Batch(UNEQUAL).grpo_batch()
    restricted = Ours(**settings).completion_logps.restrict(model, batch)
    assert (restricted is model) == ("parallel" in settings)
    assert [reason in text for text in warnings] == ([True] if reason else [])


def test_where_prompts_are_shared() -> None:
    assert Ours().completion_logps.shares_prompts
    for flags in (
        {"padding_free": True},
        {"logps_shared_prompt": "false"},
        {"logits_shim": "off"},
        {"per_device_train_batch_size": 1},
        {"router_replay_mode": "R3"},
        {"torch_compile": True},
    ):
        assert not Ours(**flags).completion_logps.shares_prompts, flags


# --- the proof ---


@pytest.mark.parametrize(
    ("name", "batches", "expected"),
    [
        # One sample shares nothing; a later micro-batch is the proof.
        ("Qwen2", (ROWS[:1], ROWS, ROWS), [13, PACKED, WHOLE, WHOLE, PACKED, PACKED]),
        # Mistral sees 5 positions here: rows within a window prove nothing of longer ones.
        (
            "Mistral",
            (SHORT, SHORT, ROWS[:2], SHORT, ROWS[:2]),
            [7, 10, 10, 7, 7, 20, 30, 30, 20, 7, 20],
        ),
    ],
)
def test_each_kind_of_row_is_proven_once(
    name: str, batches: tuple[Rows, ...], expected: list[int], warnings: list[str]
) -> None:
    trainer, model = Ours(), build(name)
    seen = seen_positions(model)
    for rows in batches:
        make_pass(trainer, model, Batch(rows).shared())
    assert seen == expected
    assert not warnings


# --- faults ---


def shift(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Move each logit of a packed pass by a thousandth, which is less than the limit between
    engines and training."""
    if is_packed(kwargs["attention_mask"]):
        output.last_hidden_state = output.last_hidden_state * 1.001


def shift_images(*args: Any) -> None:
    if args[2].get("pixel_values") is not None:
        shift(*args)


def refuse(_: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    if is_packed(kwargs["attention_mask"]):
        raise KeyError("four dimensions")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (shift, "rows of text differ by 0.00"),
        (refuse, "as they are: the first packed pass failed (KeyError: 'four dimensions')"),
    ],
)
def test_a_fault_ends_nothing(fault: Any, text: str, warnings: list[str]) -> None:
    trainer, model = Ours(), build("Qwen2")
    model.model.register_forward_hook(fault, with_kwargs=True)
    values = [make_pass(trainer, model, Batch(ROWS).shared()) for _ in range(2)]
    assert torch.equal(*values)
    [warning] = warnings
    assert text in warning


def test_text_proves_nothing_of_images(warnings: list[str]) -> None:
    trainer, model = Ours(), build("Qwen2.5-VL")
    model.model.register_forward_hook(shift_images, with_kwargs=True)
    texts, images = (Batch(ROWS).see(model, with_images=given) for given in (False, True))
    seen = seen_positions(model)
    values = [make_pass(trainer, model, each.shared()) for each in (texts, images, images)]
    assert seen == [PACKED, WHOLE, WHOLE, PACKED, PACKED, *[WHOLE] * 4]
    assert torch.equal(*values[1:])
    assert "rows of image differ by" in warnings[0]


def test_what_one_rank_has_seen_fail_no_rank_does(warnings: list[str]) -> None:
    """Packing fails on rank 1. Rank 0 makes one pass more, as with a teacher of some rows, and
    waits for nobody in it."""
    models = [build("Qwen2") for _ in range(2)]
    models[1].model.register_forward_hook(shift, with_kwargs=True)
    seen = [seen_positions(model) for model in models]

    def work(ranks: ThreadRanks) -> None:
        trainer = Ours()
        for _ in range(2):
            for _ in range(2 - ranks.rank):
                make_pass(trainer, models[ranks.rank], Batch(ROWS).shared())
            failed = ranks.all_gather(trainer.completion_logps.sharing_failed)
            trainer.completion_logps.end_round(any(failed))

    run_rank_groups(2, work)
    first = [PACKED, WHOLE, WHOLE]
    assert seen == [[*first, PACKED, PACKED, WHOLE, WHOLE], [*first, WHOLE, WHOLE]]
    other, own = sorted(warnings)
    assert "auto leaves micro-batches of Qwen2ForCausalLM as they are: " in own
    assert "rows of text differ by" in own
    assert "from here on: on another rank" in other


def test_what_saves_less_than_a_tenth_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    informed: list[str] = []
    monkeypatch.setattr(proof.logger, "info", informed.append)
    monkeypatch.setattr(proof, "WORTH", WORTH)
    model = build("Qwen2")
    seen = seen_positions(model)
    make_pass(Ours(), model, Batch(((3, 30), (3, 31))).shared())
    assert seen == [2 * 34]
    assert "would save 4%, and 10% is the least" in informed[0]
