"""Our trainer's log-probabilities equal ms-swift's, over all layouts of a batch [L1, L5, L6]."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.logits import logps
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.shim import LogitsShim
from tests.rig.logits.batch import ROWS, UNEQUAL, Batch
from tests.rig.logits.compare import Run, assert_close, counted_positions, values_and_gradients
from tests.rig.logits.models import build
from tests.rig.logits.trainers import (
    Ours,
    Upstream,
    config_of,
    loss_pass,
    seen_positions,
    template_of,
)


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


@pytest.mark.usefixtures("packs_what_saves_little")
@pytest.mark.parametrize(("side", "chunk_size"), [("right", 99), ("left", 4)])
def test_a_prompt_is_read_once(
    side: str,
    chunk_size: int,
    warned: list[str],
    informed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LogitsShim, "chunk_size", chunk_size)
    model, batch = build("Qwen2", lora=True), Batch(ROWS, side)
    expected, _ = run(Upstream(), model, batch)
    seen = seen_positions(model)
    found, _ = run(Ours(), model, batch.shared())
    assert_close(found, expected)
    packed, whole = seen[-1], batch.predicts_BT.numel()
    assert seen == [packed, whole, whole, packed]  # the first three are the proof
    assert packed < whole
    assert f"Qwen2ForCausalLM read {packed} positions instead of {whole}" in informed[-1]
    assert not warned


def test_without_the_shim() -> None:
    """`--logits_shim off` has ms-swift's own arithmetic."""
    model, batch = build("Qwen2"), Batch(UNEQUAL)
    expected, theirs = run(Upstream(), model, batch)
    found, counts = run(Ours(logits_shim="off"), model, batch)
    assert_close(found, expected, 0.0)
    assert counts == theirs


def test_strict_refuses_what_auto_slices() -> None:
    model, batch = build("names the keyword only"), Batch(UNEQUAL)
    upstream = Upstream()
    upstream.model_kwarg_keys = set()
    expected, _ = run(upstream, model, batch)
    found, _ = run(Ours(logits_shim="auto"), model, batch)
    assert_close(found, expected)
    with pytest.raises(RuntimeError, match="computes the logits of all positions"):
        run(Ours(logits_shim="strict"), model, batch)


def test_inputs_that_are_not_packed_are_collated_by_ms_swift() -> None:
    """The trainer's settings, such as `use_cache`, apply too."""
    model, batch = build("Qwen2"), Batch(ROWS)
    expected, _ = run(Upstream(), model, batch)
    settings: list[Any] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: settings.append(kwargs["use_cache"]), with_kwargs=True
    )
    ours = Ours(logps_shared_prompt="false")
    ours.model_kwarg_keys = {"use_cache"}
    found, _ = run(ours, model, batch.shared())
    assert_close(found, expected)
    assert settings == [False]


# --- settings ---


@pytest.mark.parametrize(
    ("flags", "parallel", "reason"),
    [
        ({}, 2, "sequence_parallel_size 2"),
        ({"use_liger_kernel": True}, 1, "use_liger_kernel"),
        ({}, 1, ""),
        ({"logits_shim": "off", "use_liger_kernel": True}, 2, ""),
    ],
)
def test_what_is_left_alone_is_said(
    flags: dict[str, Any], parallel: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(logps.logger, "warning", warned.append)
    ours = CompletionLogps(config_of(**flags), template_of(parallel=parallel))
    model, batch = build("Qwen2"), Batch(UNEQUAL).grpo_batch()
    assert (ours.restrict(model, batch) is model) == (parallel > 1)
    assert [reason in text for text in warned] == ([True] if reason else [])


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
    template = template_of(padding_free=padding_free)
    assert CompletionLogps(config_of(**flags), template).shares_prompts == shares


def test_one_shim_for_each_model() -> None:
    ours, batch = CompletionLogps(config_of(), template_of()), Batch(UNEQUAL).grpo_batch()
    policy, reference = build("Qwen2", lora=True), build("Qwen2")
    shim = ours.restrict(policy, batch).shim
    assert ours.restrict(policy, batch).shim is shim
    assert ours.restrict(policy.get_base_model(), batch).shim is shim
    assert ours.restrict(reference, batch).shim is not shim
