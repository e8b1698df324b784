"""What the rollout saw and drew against what training sees, sample by sample and as a gap."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.infer_engine.protocol import RequestConfig

from swift_grpo_ext.config import RolloutGRPOConfig
from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.agreement import DisagreementError
from swift_grpo_ext.training.batch import (
    check_counts,
    check_training_batch,
    gap_limit_of,
    measure_rollout_gap,
    rollouts_own_prompts,
    switch_off_dropout,
)
from tests.arguments import training_arguments
from tests.ranks import run_rank_groups


def arguments(**changes: Any) -> RolloutGRPOConfig:
    return training_arguments(**{"vllm_mode": "server", "temperature": 1.0, **changes})


def template(max_length: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        **{"max_length": max_length, "truncation_strategy": "left", "placeholder_tokens": [90]},
        tokenizer=SimpleNamespace(decode=str),
    )


def sample(
    turns: Any = ((5, 6),), logprobs: Any = ((-0.5, -1.0),), mask: Any = (), **fields: Any
) -> Any:
    """A sample as ms-swift has it: lists for each turn."""
    values: dict[str, Any] = {
        "sample_id": SampleId(phase="train", step=3, number=0, group=2, index=1),
        "response_token_ids": [list(turn) for turn in turns],
        "rollout_logprobs": [list(turn) for turn in logprobs],
        "response_loss_mask": [list(turn) for turn in mask],
        "rollout_prompt_ids": [1, 2, 3],
        "encoded": {"input_ids": torch.tensor([[1, 2, 3, 5, 6]])},
    }
    return SimpleNamespace(**(values | fields))


def batch(
    rollout: Any = ((-0.5, -1.0),), training: Any = ((-0.5, -1.0),), mask: Any = ((1, 1),)
) -> Any:
    def tensor(rows: Any) -> Any:
        return None if rows is None else torch.tensor(rows)

    return SimpleNamespace(
        rollout_per_token_logps=tensor(rollout),
        old_per_token_logps=tensor(training),
        completion_mask=torch.tensor(mask),
    )


# --- prompts (M3) ---


def test_what_is_collated_has_the_prompt_of_its_rollout() -> None:
    """Each sample its own; a conversation, and a sample without a rollout, keep theirs."""
    prompts = [[1, 90, 2], None, [1, 90, 3], [1, 90, 2]]
    samples = [sample(rollout_prompt_ids=ids) for ids in prompts]
    samples[3].response_token_ids = [[5], [6]]
    for one in samples:
        one.encoded = {"input_ids": [1, 90, 10, 2, 5], "labels": [-100] * 4 + [5]}
    made = template()
    made.tokenizer.decode = lambda ids: "".join({10: "\n"}.get(i, str(i)) for i in ids)
    made.data_collator = list
    with rollouts_own_prompts(made, samples):
        collated = made.data_collator([one.encoded for one in samples])
    assert [len(encoded["input_ids"]) for encoded in collated] == [4, 5, 5, 5]
    check_training_batch(samples[:2], batch(), arguments(), made)


@pytest.mark.parametrize(
    ("max_length", "is_cut"), [(None, False), (0, False), (2, True), (3, True), (4, False)]
)
def test_what_is_collated_has_the_text_that_max_length_left(
    max_length: int | None, is_cut: bool
) -> None:
    """Where the limit explains it: a system prompt that one side lacks stays a difference."""
    drawn = sample(rollout_prompt_ids=[3, 90, 4])
    drawn.encoded = {"input_ids": [1, 2, 3, 90, 4, 5], "labels": [-100] * 5 + [5]}
    made = template(max_length)
    made.data_collator = list
    with rollouts_own_prompts(made, [drawn]):
        made.max_length = None  # as ms-swift, while it encodes
        made.data_collator([drawn.encoded])
    assert drawn.encoded["input_ids"] == ([3, 90, 4, 5] if is_cut else [1, 2, 3, 90, 4, 5])
    drawn.rollout_prompt_ids = [9, 90, 4]
    cause = (
        rf"cut prompts to --max_length {max_length} \(.* left\).* delete\.$"
        if is_cut
        else "vLLM than"
    )
    with pytest.raises(DisagreementError, match=cause):
        check_training_batch([drawn], batch(), arguments(), template(max_length))


# --- counts (M6) ---


def test_each_sampled_token_has_a_log_probability() -> None:
    """Those that an environment put in between have none; a sample without any has no count."""
    tool = sample(turns=[(5, 6, 9), (7,)], logprobs=[(-1, -1), (-1,)], mask=[(1, 1, 0), (1,)])
    single = sample(turns=(), logprobs=(), response_token_ids=[5, 6], rollout_logprobs=[-1, -1])
    check_counts([sample(), sample(logprobs=()), tool, single])
    message = r"train round 3\.0, group 2, sample 1: 2 sampled tokens and 1 log-prob"
    with pytest.raises(DisagreementError, match=message):
        check_counts([sample(), sample(logprobs=[(-0.5,)])])
    with pytest.raises(DisagreementError, match="3 sampled tokens and 2 log-prob"):
        check_counts([sample(turns=[(5, 6, 9)])])


@pytest.mark.parametrize(("count", "is_good"), [(1, False), (2, True), (3, True), (4, False)])
def test_a_batch_without_log_probabilities_names_the_count(count: int, is_good: bool) -> None:
    """One token may lack in training: the end of a turn that was sampled."""
    drawn = sample(turns=[(5,) * count], logprobs=[(-1.0,) * count])
    without = batch(rollout=None)
    if is_good:
        check_training_batch([drawn], without, arguments(), template())
        return
    with pytest.raises(DisagreementError, match=f"{count} tokens were sampled, and 2 would be"):
        check_training_batch([drawn], without, arguments(), template())


def test_a_batch_with_log_probabilities_is_aligned() -> None:
    many = sample(turns=[(5,) * 4], logprobs=[(-1.0,) * 4])
    check_training_batch([many], batch(), arguments(), template())
    check_training_batch([sample(logprobs=())], batch(rollout=None), arguments(), template())


# --- prompts (M3) ---


def test_training_begins_with_the_prompt_of_the_rollout() -> None:
    check_training_batch([sample()], batch(), arguments(), template())
    media = sample(rollout_prompt_ids=[1, 90, 90, 3], encoded={"input_ids": [1, -200, 3, 5, 6]})
    check_training_batch([media], batch(), arguments(), template())
    other = sample(rollout_prompt_ids=[1, 9, 3])
    message = r"train round 3\.0, group 2, sample 1: .* from token 1 on .* Give `swift rollout`"
    with pytest.raises(DisagreementError, match=message):
        check_training_batch([sample(), other], batch(), arguments(), template())


def test_a_mismatch_may_be_a_warning(warnings: list[str]) -> None:
    """Once; and the way to it is named."""
    other = sample(rollout_prompt_ids=[1, 9, 3])
    with pytest.raises(DisagreementError, match=r"vLLM than .* --rollout_mismatch warn trains"):
        check_training_batch([other], batch(), arguments(vllm_mode="colocate"), template())
    warns = arguments(rollout_mismatch="warn")
    for _ in range(2):
        check_training_batch([sample(), other], batch(), warns, template())
    [warning] = warnings
    assert "from token 1 on" in warning
    assert "Training goes on (--rollout_mismatch warn)" in warning


def test_conversations_and_unknown_prompts_are_left_to_others() -> None:
    turns = sample(turns=[(5,), (6,)], rollout_prompt_ids=[9])
    unknown = sample(rollout_prompt_ids=None)
    never_drawn = sample()
    del never_drawn.rollout_prompt_ids
    check_training_batch([turns, unknown, never_drawn], batch(), arguments(), template())
    one_turn = sample(turns=[(5, 6)], rollout_prompt_ids=[9])
    with pytest.raises(DisagreementError):
        check_training_batch([one_turn], batch(), arguments(), template())


# --- the gap (M5) ---

FAR = {"rollout": ((-0.5, -1.0),), "training": ((-0.3, -1.4),)}  # 0.2 and 0.4 nats


HAS_MIN_P = pytest.mark.skipif(
    not hasattr(RequestConfig(), "min_p"), reason="ms-swift 4.4 has no such flag"
)


def measure(*batches: Any, ranks: Any = None, limit: float = 0.25, **changes: Any) -> Any:
    args = arguments(**changes)
    return measure_rollout_gap(list(batches), args, ranks or SingleRank(), limit, step=7)


def test_the_gap_is_that_of_all_ranks() -> None:
    """Absolute differences of completion tokens only; a rank without any changes nothing."""
    batches = [
        [batch(rollout=((-1.0, -1.0),), training=((-1.5, -9.0),), mask=((1, 0),))],
        [batch(**FAR), batch(rollout=((-1.0, 0.0),), training=((-0.9, 0.0),))],
        [batch(rollout=None), batch(training=None)],
        [batch(mask=((0, 0),))],
    ]
    results = run_rank_groups(4, lambda ranks: measure(*batches[ranks.rank], ranks=ranks))
    expected = {"rollout_gap/mean": (0.5 + 0.2 + 0.4 + 0.1) / 5, "rollout_gap/max": 0.5}
    assert results == [pytest.approx(expected)] * 4


def test_without_log_probabilities_there_is_no_gap(warnings: list[str]) -> None:
    assert measure(batch(rollout=None), batch(training=None)) == {}
    assert warnings == []


def test_a_wide_gap_is_said_once(warnings: list[str]) -> None:
    for _ in range(2):
        measure(batch(**FAR))
    [warning] = warnings
    assert "Step 7: log-probabilities" in warning
    assert "0.3 nats apart in the mean (0.4 at most, 2 tokens), above the 0.25" in warning


def test_the_limit_itself_is_no_alarm(warnings: list[str]) -> None:
    within = batch(rollout=((-1.0, -2.0),), training=((-1.25, -2.25),))
    measure(within)
    assert warnings == []
    measure(within, limit=0.24)
    assert len(warnings) == 1


def test_nan_is_wide_whatever_is_expected(warnings: list[str]) -> None:
    measure(batch(), batch(training=((float("nan"), -1.0),)), top_p=0.5)
    [warning] = warnings
    assert "nan nats apart in the mean (nan at most" in warning


@pytest.mark.parametrize(
    ("changes", "num_warnings"),
    [
        # Rollouts from a part of the vocabulary, or with older weights, lie apart by design (R4).
        ({"top_p": 0.9}, 0),
        ({"top_p": None}, 0),
        ({"top_k": 20}, 0),
        pytest.param({"min_p": 0.3}, 0, marks=HAS_MIN_P),
        ({"repetition_penalty": 1.1}, 0),
        ({"structured_outputs_regex": r"\d"}, 0),
        ({"async_generate": True}, 0),
        # Settings that cut nothing hide nothing.
        ({"top_p": 1}, 1),
        ({"top_k": 0}, 1),
        ({"top_k": -1}, 1),
        ({"structured_outputs_regex": ""}, 1),
    ],
)
def test_a_healthy_run_gets_no_alarm(
    changes: dict[str, Any], num_warnings: int, warnings: list[str]
) -> None:
    assert measure(batch(**FAR), **changes)["rollout_gap/max"] == pytest.approx(0.4)
    assert len(warnings) == num_warnings


@pytest.mark.parametrize(
    ("changes", "dtype", "limit"),
    [
        ({}, torch.float32, 0.01),
        ({}, torch.bfloat16, 0.125),
        ({"bf16": True}, torch.float32, 0.125),  # autocast
        ({"fp16": True, "temperature": 0.5}, torch.float32, 0.25),
    ],
)
def test_the_limit_follows_the_computation(
    changes: dict[str, Any], dtype: torch.dtype, limit: float
) -> None:
    assert gap_limit_of(arguments(**changes), dtype) == limit


# --- dropout ---


class Attention(torch.nn.Module):
    """Calls functional dropout with its attribute, as transformers' layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_dropout = 0.5
        self.dropout = torch.nn.Dropout(0.5)
        self.scaling = 0.5
        self.hidden_dropout = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dropped = torch.nn.functional.dropout(x, self.attention_dropout, self.training)
        return torch.Tensor(self.dropout(dropped))


def test_dropout_is_really_off() -> None:
    """In training mode two passes agree, where they did not; what was 0 is not counted."""
    layers = torch.nn.Sequential(Attention(), torch.nn.Dropout2d(0.1), torch.nn.Dropout(0.0))
    layers.train()
    x = torch.ones(4, 64)
    assert not torch.equal(layers[0](x), layers[0](x))
    assert switch_off_dropout(layers) == 3
    assert torch.equal(layers(x), x)
    assert layers[0].scaling == 0.5
    assert switch_off_dropout(layers) == 0
