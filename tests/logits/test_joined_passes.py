"""Micro-batches that a pass without gradients takes together, on a real model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rl_core.data import GRPOBatch
from torch import Tensor

from swift_grpo_ext.logits import logps
from swift_grpo_ext.logits.joined_passes import (
    Waiting,
    larger_micro_batches,
    packed_positions,
    parts_within_memory,
)
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.shared_prompt import GroupLengths
from tests.logits.models import build
from tests.logits.test_logps import Batch, Ours, config_of
from tests.logits.test_shared_prompt import ROWS, Group, blind_to_masks, positions_of

LENGTHS = [*map(sum, ROWS)]
PROMPTS = [prompt for prompt, *_ in ROWS]
ONE_EACH = {"num_generations": 3, "per_device_train_batch_size": 1, "steps_per_generation": 5}


class Round:
    """The two groups of `ROWS`, of which micro-batches hold one sample each."""

    def __init__(self) -> None:
        self._whole = Group(ROWS)
        config = config_of(**ONE_EACH)
        self.trainer: Any = Ours(config, keys=set(), padding_free=False)
        ids = self._whole.inputs["input_ids"]
        self.samples = [
            SimpleNamespace(
                number=number,
                prompt_id=f"prompt_{prompt}",
                encoded={"input_ids": ids[number, :length].tolist()},
                teacher_messages=None,
            )
            for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
        ]
        self.batches = [self.collate([sample])[1] for sample in self.samples]

    def collate(self, samples: Sequence[Any]) -> tuple[dict[str, Any], GRPOBatch]:
        rows = [sample.number for sample in samples]
        batch = Batch(tuple(ROWS[row] for row in rows))
        length = batch.inputs["input_ids"].shape[1]
        batch.inputs["input_ids"] = self._whole.inputs["input_ids"][rows, :length]
        batch.labels = self._whole.labels[rows, :length]
        return batch.inputs, batch.grpo_batch()

    def alone(self, model: Any, number: int) -> Tensor:
        inputs, batch = self.collate([self.samples[number]])
        logps_BK: Tensor = self.trainer._get_per_token_logps_and_entropies_single(
            model, inputs, batch
        )[0]
        return logps_BK

    def passes(self, *models: Any) -> list[list[Tensor]]:
        """Ask each model for the log-probabilities of each micro-batch, as ms-swift's trainer
        does: one micro-batch after the other, of the policy and then of a reference."""
        completions = self.trainer.completion_logps
        micro_batches = [[sample] for sample in self.samples]
        joined = completions.joined_passes(micro_batches, self.collate, 1.3, models[0])
        found: list[list[Tensor]] = [[] for _ in models]
        with torch.no_grad():
            for number, batch in enumerate(self.batches):
                for model, values in zip(models, found, strict=True):
                    alone = partial(self.alone, model, number)
                    values.append(joined.add(model, batch, alone) if joined else alone())
        return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for level in ("warning", "info", "info_once"):
        monkeypatch.setattr(logps.logger, level, lambda line, **_: lines.append(line))
    return lines


def assert_as_alone(round_: Round, model: Any, found: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for number, values in enumerate(found):
            torch.testing.assert_close(values, round_.alone(model, number), atol=1e-5, rtol=0)


def test_a_group_of_micro_batches_reads_its_prompt_once(told: list[str]) -> None:
    """The policy and a reference, which is another model."""
    round_, models = Round(), [build("Qwen2"), build("Qwen2")]
    models[1].lm_head.weight.data.mul_(0.5)
    seen = [positions_of(model) for model in models]
    found = [round_.passes(*models), round_.passes(*models)]
    first, second = 8 + 5 + 7 + 6, 11 + 4  # prompts, but for their last tokens, and samples
    for each in seen:
        # The first group is computed both ways, once, and rounded otherwise; a sample that is left
        # over by itself.
        assert each == [first, *LENGTHS[:3], *LENGTHS[:3], first, second, first, second]
    for values in found:
        for model, of_model in zip(models, values, strict=True):
            assert_as_alone(round_, model, of_model)
    assert not torch.equal(found[0][0][0], found[0][1][0])
    assert sum("read 26 positions in the place of 51" in line for line in told) == 2


def test_micro_batches_that_cannot_be_packed_are_computed_one_by_one(told: list[str]) -> None:
    round_, model = Round(), build("Qwen2")
    blind_to_masks(model)  # samples see one another
    seen = positions_of(model)
    found = [round_.passes(model)[0] for _ in range(2)]
    assert seen[1:] == [*LENGTHS[:3], *LENGTHS[:3], *LENGTHS, *LENGTHS]
    for values in found:
        assert_as_alone(round_, model, values)
    assert sum("nats apart in the mean, and rounding explains" in line for line in told) == 1


def test_out_of_memory_ends_nothing(told: list[str]) -> None:
    round_, model = Round(), build("Qwen2")
    round_.passes(model)

    def refuse(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["attention_mask"].ndim == 4:
            raise torch.OutOfMemoryError("36 GiB")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    assert_as_alone(round_, model, round_.passes(model)[0])
    assert_as_alone(round_, model, round_.passes(model)[0])
    assert sum("do not fit into memory together" in line for line in told) == 1


def test_a_teacher_of_another_prompt_leaves_micro_batches_alone() -> None:
    """All samples of all ranks have such rows then."""

    def joins(round_: Round) -> bool:
        micro_batches = [[sample] for sample in round_.samples]
        completions = round_.trainer.completion_logps
        joined = completions.joined_passes(micro_batches, round_.collate, 1.0, build("Qwen2"))
        return joined is not None

    round_ = Round()
    assert joins(round_)
    round_.samples[3].teacher_messages = [{"role": "user", "content": "It is a 7."}]
    assert not joins(round_)


@pytest.mark.parametrize(
    ("flags", "can_join"),
    [
        ({}, True),
        ({"logps_shared_prompt": "false"}, False),
        ({"per_device_train_batch_size": 3}, False),
        ({"router_replay_mode": "R3"}, False),
        ({"logits_shim": "off"}, False),
    ],
)
def test_where_micro_batches_are_joined(flags: dict[str, Any], can_join: bool) -> None:
    trainer: Any = Ours(config_of(**{**ONE_EACH, **flags}), keys=set(), padding_free=False)
    assert trainer.completion_logps.can_join == can_join
    spread = SimpleNamespace(padding_free=False, sequence_parallel_size=2)
    assert not CompletionLogps(config_of(**{**ONE_EACH, **flags}), spread).can_join


# --- memory, and what larger micro-batches would save ---


def waiting_for(prompt_id: str, length: int, completion: int) -> Waiting:
    sample: Any = SimpleNamespace(prompt_id=prompt_id, encoded={"input_ids": [0] * length})
    mask = torch.ones(1, completion, dtype=torch.bool)
    return Waiting([sample], mask, torch.zeros(1, completion), lambda: mask)


def test_no_more_memory_than_with_gradients() -> None:
    """Of a 3B model with 36 layers, a pass with gradients over 1,625 positions."""
    text: Any = SimpleNamespace(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, vocab_size=151_936
    )
    eight = [waiting_for("a", 1625, 256) for _ in range(8)]
    assert packed_positions(eight) == 1368 + 8 * 256
    assert packed_positions([*eight[:4], waiting_for("b", 900, 256)]) == 1368 + 5 * 256 + 643
    parts = partial(parts_within_memory, text=text)
    width, wide = text.hidden_size, text.intermediate_size
    kept = 1625 * (36 * width + 8 * width + 5 * wide) + 256 * text.vocab_size
    for num_joined, fits in ((4, True), (8, False)):
        joined = (1368 + num_joined * 256) * 3 * (width + wide)
        assert (joined + num_joined * 256 * text.vocab_size <= kept) == fits
    assert parts(eight, recomputes=True, chunk_size=0) == 2
    assert parts(eight, recomputes=True, chunk_size=0, num_gradients=3_750_000_000) == 1
    # Logits of a chunk are all that there are, and layers that are not recomputed are kept.
    assert parts(eight, recomputes=True, chunk_size=64) == 1
    assert parts(eight, recomputes=False, chunk_size=0) == 1
    # Where completions are long and prompts short there is little to share, and much to hold.
    assert parts([waiting_for("a", 4097, 4096)] * 8, recomputes=True, chunk_size=0) == 8


def test_what_larger_micro_batches_would_save() -> None:
    text: Any = SimpleNamespace(hidden_size=10**9)
    config: Any = SimpleNamespace(
        num_generations=8, per_device_train_batch_size=2,
        gradient_accumulation_steps=16, steps_per_generation=16,
    )  # fmt: skip
    told = larger_micro_batches(GroupLengths(1000, [250, 250]), text, config)
    assert told.startswith("--per_device_train_batch_size 8 --gradient_accumulation_steps 4 in the")
    assert "of 2 and 16 makes the same steps" in told
    assert "expected to save 50% of the passes" in told  # 3,000 of 4 x 1,500
    assert "has 3000 positions in memory at a time, not 1500" in told
    assert not larger_micro_batches(GroupLengths(10, [250, 250]), text, config)
    config.steps_per_generation = 32
    assert "--steps_per_generation 8 in" in larger_micro_batches(
        GroupLengths(1000, [250]), text, config
    )
    config.per_device_train_batch_size = 8
    assert not larger_micro_batches(GroupLengths(1000, [250]), text, config)
    # A rank has less of a round than a group.
    config.per_device_train_batch_size = 1
    config.gradient_accumulation_steps = config.steps_per_generation = 2
    told = larger_micro_batches(GroupLengths(1000, [250]), text, config)
    assert told.startswith("--per_device_train_batch_size 2 --gradient_accumulation_steps 1 in the")
