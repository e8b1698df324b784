"""Our trainer's log-probabilities equal ms-swift's, over all layouts of a batch."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers import GRPOTrainer
from swift.rlhf_trainers.utils import build_completion_mask_and_seq_lengths
from torch import Tensor

from swift_grpo_ext.config import RolloutGRPOConfig
from swift_grpo_ext.logits import logps
from swift_grpo_ext.logits.logps import CompletionLogps
from swift_grpo_ext.logits.shim import LogitsShim
from swift_grpo_ext.training import RolloutGRPOTrainer
from tests.rig.arguments import training_arguments
from tests.rig.logits.compare import assert_close, counted_positions, values_and_gradients
from tests.rig.logits.models import build


class Upstream(GRPOTrainer):
    """ms-swift's trainer, with the attributes that its log-probabilities use."""

    def __init__(self, config: Any, *, keys: set[str], padding_free: bool) -> None:
        self.args = config
        self.model_kwarg_keys = keys
        self.temperature = 1.3
        self.template = SimpleNamespace(padding_free=padding_free, sequence_parallel_size=1)


class Ours(RolloutGRPOTrainer):
    """Our trainer, with the same attributes."""

    def __init__(self, config: Any, *, keys: set[str], padding_free: bool) -> None:
        Upstream.__init__(self, config, keys=keys, padding_free=padding_free)
        self.completion_logps = CompletionLogps(config, self.template)


def config_of(**flags: Any) -> RolloutGRPOConfig:
    return training_arguments(**{"logits_shim": "strict", **flags})


@dataclass
class Batch:
    """Rows with lengths of prompt, completion, tool's answer and completion. Only completions are
    trained on, as in a conversation."""

    rows: tuple[tuple[int, int, int, int], ...]
    layout: str = "right"
    labels: Tensor = field(init=False)
    inputs: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(2)
        ids = [torch.randint(3, 150, (sum(row),)) for row in self.rows]
        labels = [row_ids.clone() for row_ids in ids]
        for row, row_labels in zip(self.rows, labels, strict=True):
            prompt, first, tool, _ = row
            row_labels[:prompt] = -100
            row_labels[prompt + first : prompt + first + tool] = -100
        if self.layout == "packed":
            self.labels = torch.cat(labels)[None]
            positions = torch.cat([torch.arange(len(i)) for i in ids])[None]
            self.inputs = {"input_ids": torch.cat(ids)[None], "position_ids": positions}
        else:
            pad = torch.nn.utils.rnn.pad_sequence
            side = {"batch_first": True, "padding_side": self.layout}
            self.labels = pad(labels, padding_value=-100, **side)
            mask = pad([torch.ones_like(i) for i in ids], **side)
            self.inputs = {"input_ids": pad(ids, **side), "attention_mask": mask}

    def grpo_batch(self) -> GRPOBatch:
        """As `collate_to_grpo_micro_batch` makes it."""
        first = self.labels.ne(-100).int().argmax(-1)
        num_kept = int((self.labels.shape[-1] - first).max())
        mask, lengths, _ = build_completion_mask_and_seq_lengths(
            self.labels,
            len(self.rows),
            padding_free=self.layout == "packed",
            encoded_batch=self.inputs,
            logits_to_keep=num_kept,
        )
        return GRPOBatch(
            completion_mask=mask,
            truncated_mask=torch.zeros(len(self.rows), dtype=torch.bool),
            seq_lengths=lengths,
            logits_to_keep=num_kept,
        )


UNEQUAL = ((9, 4, 0, 0), (3, 6, 0, 0), (5, 2, 3, 3))


def run(
    host: type[Any], model: Any, batch: Batch, *, keys: set[str], entropy: bool = True, **flags: Any
) -> tuple[Any, Tensor, list[int]]:
    """Return the log-probabilities (and entropies) of completion tokens with gradients, the
    log-probabilities in ms-swift's layout, and the numbers of positions at the head."""
    trainer = host(config_of(**flags), keys=keys, padding_free=batch.layout == "packed")
    grpo_batch = batch.grpo_batch()
    whole = []

    def values_of() -> Tensor:
        inputs = copy(batch.inputs)
        logps_BK, entropies_BK = trainer._get_per_token_logps_and_entropies_single(
            model, inputs, grpo_batch, compute_entropy=entropy
        )
        mask = grpo_batch.completion_mask
        assert logps_BK.shape == mask.shape
        whole.append(logps_BK.detach())
        if entropies_BK is None:
            return logps_BK[mask]
        return torch.stack([logps_BK[mask], entropies_BK[mask]])

    with counted_positions(model) as counts:
        found = values_and_gradients(model, values_of)
    return found, whole[0], counts


@pytest.mark.parametrize(
    ("layout", "chunk_size", "entropy"),
    [("right", 99, False), ("right", 4, True), ("left", 4, False), ("packed", 99, True)],
)
@pytest.mark.parametrize("name", ["Qwen2", "VideoLlama3"])
def test_as_ms_swift_but_for_rounding(
    name: str, layout: str, chunk_size: int, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogitsShim, "chunk_size", chunk_size)
    model, batch = build(name, lora=True), Batch(UNEQUAL, layout)
    keys = {"logits_to_keep"} if name == "Qwen2" else set()
    expected, _, theirs = run(Upstream, model, batch, keys=keys, entropy=entropy)
    found, whole, counts = run(Ours, model, batch, keys=keys, entropy=entropy)
    assert_close(found, expected)
    num_tokens = int(batch.labels.ne(-100).sum())
    assert max(counts) == min(chunk_size, num_tokens)
    # A pass in chunks ends with one position, and its backward computes the others again.
    assert sum(counts) == 2 * num_tokens + 1
    assert max(theirs) > num_tokens
    # Other places are masked by multiplication: they may be neither infinite nor NaN.
    assert whole.isfinite().all()


def test_without_the_shim() -> None:
    """`--logits_shim off` has ms-swift's own arithmetic."""
    model, batch = build("Qwen2"), Batch(UNEQUAL)
    expected, _, theirs = run(Upstream, model, batch, keys={"logits_to_keep"})
    found, _, counts = run(Ours, model, batch, keys={"logits_to_keep"}, logits_shim="off")
    assert_close(found, expected, 0.0)
    assert counts == theirs


def test_strict_refuses_what_auto_slices() -> None:
    model, batch = build("names the keyword only"), Batch(UNEQUAL)
    expected, _, _ = run(Upstream, model, batch, keys=set())
    found, _, _ = run(Ours, model, batch, keys=set(), logits_shim="auto")
    assert_close(found, expected)
    with pytest.raises(RuntimeError, match="computes the logits of all positions"):
        run(Ours, model, batch, keys=set(), logits_shim="strict")


@pytest.mark.parametrize(
    ("flags", "parallel", "told"),
    [
        ({}, 2, "sequence_parallel_size 2"),
        ({"use_liger_kernel": True}, 1, "use_liger_kernel"),
        ({}, 1, ""),
        ({"logits_shim": "off", "use_liger_kernel": True}, 2, ""),
    ],
)
def test_what_is_left_alone_is_said(
    flags: dict[str, Any], parallel: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(logps.logger, "warning", warned.append)
    template = SimpleNamespace(padding_free=False, sequence_parallel_size=parallel)
    ours = CompletionLogps(config_of(**flags), template)
    model, batch = build("Qwen2"), Batch(UNEQUAL).grpo_batch()
    assert (ours.restrict(model, batch) is model) == (parallel > 1)
    assert [told in text for text in warned] == ([True] if told else [])


def test_one_shim_for_each_model() -> None:
    template = SimpleNamespace(padding_free=False, sequence_parallel_size=1)
    ours, batch = CompletionLogps(config_of(), template), Batch(UNEQUAL).grpo_batch()
    policy, reference = build("Qwen2", lora=True), build("Qwen2")
    shim = ours.restrict(policy, batch).shim
    assert ours.restrict(policy, batch).shim is shim
    assert ours.restrict(policy.get_base_model(), batch).shim is shim
    assert ours.restrict(reference, batch).shim is not shim
