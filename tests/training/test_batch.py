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
    RolloutGap,
    ZeroGradientWarning,
    check_counts_of,
    check_training_batch,
    rollouts_own_prompts,
    switch_off_dropout,
)
from tests.arguments import training_arguments
from tests.ranks import ThreadRanks, run_rank_groups


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
        ids = [1, 90, 10, 2, 5]
        one.encoded = {"input_ids": ids, "labels": [-100, -100, -100, -100, 5]}
    words = {10: "\n"}
    made = template()
    made.tokenizer.decode = lambda ids: "".join(words.get(i, str(i)) for i in ids)
    made.data_collator = list
    with rollouts_own_prompts(made, samples):
        collated = made.data_collator([one.encoded for one in samples])
    assert [len(encoded["input_ids"]) for encoded in collated] == [4, 5, 5, 5]
    assert samples[0].encoded == {"input_ids": [1, 90, 2, 5], "labels": [-100, -100, -100, 5]}
    check_training_batch(samples[:2], batch(), arguments(), made)


def test_what_is_collated_has_the_text_that_max_length_left() -> None:
    """Where the limit explains it: a system prompt that one side lacks stays a difference."""
    for max_length, ids in ((3, [3, 90, 4, 5]), (9, [1, 2, 3, 90, 4, 5])):
        drawn = sample(rollout_prompt_ids=[3, 90, 4])
        drawn.encoded = {"input_ids": [1, 2, 3, 90, 4, 5], "labels": [-100] * 5 + [5]}
        made = template(max_length)
        made.data_collator = list
        with rollouts_own_prompts(made, [drawn]):
            made.max_length = None  # as ms-swift, while it encodes
            made.data_collator([drawn.encoded])
        assert drawn.encoded["input_ids"] == ids


# --- counts (M6) ---


def test_each_sampled_token_has_a_log_probability() -> None:
    """Those that an environment put in between have none; a sample without any has no count."""
    tool = sample(turns=[(5, 6, 9), (7,)], logprobs=[(-1, -1), (-1,)], mask=[(1, 1, 0), (1,)])
    single = sample(turns=(), logprobs=(), response_token_ids=[5, 6], rollout_logprobs=[-1, -1])
    check_counts_of([sample(), sample(logprobs=()), tool, single])
    message = r"train round 3\.0, group 2, sample 1: 2 sampled tokens and 1 log-prob"
    with pytest.raises(DisagreementError, match=message):
        check_counts_of([sample(), sample(logprobs=[(-0.5,)])])
    with pytest.raises(DisagreementError, match="3 sampled tokens and 2 log-prob"):
        check_counts_of([sample(turns=[(5, 6, 9)])])


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
    listed = sample(encoded={"input_ids": [1, 2, 3, 5]})
    check_training_batch([listed], batch(), arguments(), template())
    other = sample(rollout_prompt_ids=[1, 9, 3])
    message = r"train round 3\.0, group 2, sample 1: .* from token 1 on .* Give `swift rollout`"
    with pytest.raises(DisagreementError, match=message):
        check_training_batch([sample(), other], batch(), arguments(), template())


@pytest.mark.parametrize(("max_length", "is_cut"), [(3, True), (2, True), (4, False), (0, False)])
def test_a_prompt_as_long_as_the_limit_was_cut(max_length: int, is_cut: bool) -> None:
    other = sample(rollout_prompt_ids=[2, 3, 5])
    remedy = rf"--max_length {max_length} .*_strategy left.* delete" if is_cut else "MAX_PIXELS"
    with pytest.raises(DisagreementError, match=remedy):
        check_training_batch([other], batch(), arguments(), template(max_length))


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


def test_placeholders_are_another_notation_for_media() -> None:
    drawn = sample(rollout_prompt_ids=[1, 90, 90, 3], encoded={"input_ids": [1, -200, 3, 5, 6]})
    check_training_batch([drawn], batch(), arguments(), template())


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


def measure(gap: RolloutGap, *batches: Any, dtype: torch.dtype = torch.float32) -> Any:
    return gap.measure(list(batches), dtype, 7)


def test_the_gap_is_that_of_all_ranks() -> None:
    """Absolute differences of completion tokens only; a rank without any changes nothing."""
    batches = [
        [batch(rollout=((-1.0, -1.0),), training=((-1.5, -9.0),), mask=((1, 0),))],
        [batch(**FAR), batch(rollout=((-1.0, 0.0),), training=((-0.9, 0.0),))],
        [batch(rollout=None)],
        [batch(mask=((0, 0),))],
    ]

    def work(ranks: ThreadRanks) -> Any:
        return measure(RolloutGap(arguments(), ranks), *batches[ranks.rank])

    results = run_rank_groups(4, work)
    expected = {"rollout_gap/mean": (0.5 + 0.2 + 0.4 + 0.1) / 5, "rollout_gap/max": 0.5}
    assert results == [pytest.approx(expected)] * 4


def test_without_log_probabilities_there_is_no_gap(warnings: list[str]) -> None:
    gap = RolloutGap(arguments(), SingleRank())
    assert measure(gap, batch(rollout=None), batch(training=None)) == {}
    assert warnings == []


def test_a_wide_gap_is_said_once(warnings: list[str]) -> None:
    gap = RolloutGap(arguments(), SingleRank())
    for _ in range(2):
        measure(gap, batch(**FAR))
    [warning] = warnings
    assert "Step 7: log-probabilities" in warning
    assert "0.3 nats apart in the mean (0.4 at most, 2 tokens), above the 0.01" in warning


def test_the_limit_itself_is_no_alarm(warnings: list[str]) -> None:
    within = batch(rollout=((-1.0, -2.0),), training=((-1.0078125, -2.0078125),))
    measure(RolloutGap(arguments(), SingleRank()), within)
    measure(RolloutGap(arguments(), SingleRank()), batch(**FAR), dtype=torch.float32)
    assert len(warnings) == 1


def test_nan_is_wide_whatever_is_expected(warnings: list[str]) -> None:
    gap = RolloutGap(arguments(top_p=0.5), SingleRank())
    measure(gap, batch(), batch(training=((float("nan"), -1.0),)))
    [warning] = warnings
    assert "nan nats apart in the mean (nan at most" in warning


def test_the_limit_follows_the_temperature(warnings: list[str]) -> None:
    near = batch(rollout=((-1.0, -2.0),), training=((-1.02, -2.02),))
    measure(RolloutGap(arguments(temperature=0.25), SingleRank()), near)
    assert warnings == []
    measure(RolloutGap(arguments(temperature=1.0), SingleRank()), near)
    assert len(warnings) == 1


HAS_MIN_P = pytest.mark.skipif(
    not hasattr(RequestConfig(), "min_p"), reason="ms-swift 4.4 has no such flag"
)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.9},
        {"top_p": None},
        {"top_k": 20},
        pytest.param({"min_p": 0.3}, marks=HAS_MIN_P),
        {"repetition_penalty": 1.1},
        {"repetition_penalty": 0.9},
        {"structured_outputs_regex": r"\d"},
        {"async_generate": True},
    ],
)
def test_a_healthy_run_gets_no_alarm(changes: dict[str, Any], warnings: list[str]) -> None:
    """R4: rollouts from a part of the vocabulary, or with older weights, lie apart by design."""
    gap = RolloutGap(arguments(**changes), SingleRank())
    assert measure(gap, batch(**FAR))["rollout_gap/max"] == pytest.approx(0.4)
    assert warnings == []


@pytest.mark.parametrize(
    "same", [{"top_k": 0}, {"top_k": -1}, {"structured_outputs_regex": ""}, {"top_p": 1}]
)
def test_settings_that_cut_nothing_hide_nothing(same: dict[str, Any], warnings: list[str]) -> None:
    measure(RolloutGap(arguments(**same), SingleRank()), batch(**FAR))
    assert len(warnings) == 1


@pytest.mark.parametrize(
    ("changes", "dtype", "limit"),
    [
        ({}, torch.float32, 0.01),
        ({}, torch.bfloat16, 0.125),
        ({"bf16": True}, torch.float32, 0.125),  # autocast
        ({"fp16": True}, torch.float32, 0.125),
    ],
)
def test_the_limit_follows_the_precision_of_the_computation(
    changes: dict[str, Any], dtype: torch.dtype, limit: float, warnings: list[str]
) -> None:
    gap = RolloutGap(arguments(**changes), SingleRank())
    for difference, expected in ((0.9 * limit, 0), (1.1 * limit, 1)):
        measure(gap, batch(((-1.0, -1.0),), ((-1.0 - difference,) * 2,)), dtype=dtype)
        assert len(warnings) == expected


# --- gradients ---


@pytest.mark.parametrize(
    ("grad_norm", "zero_std", "changes", "is_said"),
    [
        (0.0, [0.25], {}, True),
        (0.0, [1.0, 0.0], {}, True),
        (0.0, [0.0, 1.0], {}, False),  # the last round has nothing to learn from
        (0.0, [1.0], {}, False),
        (0.0, [], {}, False),
        (1e-9, [0.0], {}, False),
        (None, [0.0], {}, False),  # --max_grad_norm 0 computes none
        (float("nan"), [0.0], {}, False),
        (0.0, [0.25], {"overlong_filter": True}, False),
        (0.0, [0.25], {"off_policy_sequence_mask_delta": 0.0}, False),
        (0.0, [0.25], {"rollout_importance_sampling_mode": "token_mask"}, False),
        (0.0, [0.25], {"rollout_importance_sampling_mode": "token_truncate"}, True),
        (0.0, [0.25], {"num_iterations": 2}, False),
        (0.0, [0.25], {"gradient_accumulation_steps": 4}, True),  # two rounds in a step
        (0.0, [0.25], {"steps_per_generation": 4}, False),  # half a round
    ],
)
def test_no_gradient_beside_reward_variance_is_said(
    grad_norm: float | None,
    zero_std: list[float],
    changes: dict[str, Any],
    is_said: bool,
    warnings: list[str],
) -> None:
    watch = ZeroGradientWarning(arguments(**changes))
    for step in (5, 6):
        watch.check(grad_norm, zero_std, step)
    assert len(warnings) == is_said
    if is_said:
        share = f"{1 - zero_std[-1]:.0%}"
        assert f"Step 5: the gradient norm is 0, though rewards differ in {share}" in warnings[0]


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
