"""Rounds that train nothing are said once, and healthy ones never."""

from __future__ import annotations

from typing import Any

import pytest

from swift_grpo_ext.training import summary
from swift_grpo_ext.training.summary import IdleRounds, idle_reason
from tests.arguments import training_arguments

HEALTHY = {
    "completions/max_length": 9.0,
    "completions/clipped_ratio": 0.5,
    "frac_reward_zero_std": 0.9,
    "reward": 0.25,
}
CUT = {**HEALTHY, "completions/clipped_ratio": 1.0}
EQUAL = {**HEALTHY, "frac_reward_zero_std": 1.0}
MASKED = {**CUT, **EQUAL, "completions/max_length": 0.0}


class Trainer:
    """What ms-swift's trainer has of a round. Its batches hold ten groups."""

    def __init__(self, **settings: Any) -> None:
        sizes: dict[str, Any] = {"generation_batch_size": 20, "num_generations": 2, "beta": 0.0}
        self.args = training_arguments(**{**sizes, **settings})
        self._metrics: dict[str, dict[str, list[float]]] = {"train": {}}
        self.dynamic_num_samples = False
        self.chord_sft_iterator: Any = None
        self._has_teacher = False

    def score(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"].setdefault(name, []).append(value)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    monkeypatch.setattr(summary.logger, "warning", texts.append)
    return texts


def judge(trainer: Any, *rounds: dict[str, float]) -> None:
    idle = IdleRounds()
    for metrics in rounds:
        trainer.score(metrics)
        idle.judge(trainer)


def test_reasons() -> None:
    filters = training_arguments(overlong_filter=True)
    plain = training_arguments(overlong_filter=False)
    for metrics, args, is_multi_turn, expected in (
        (HEALTHY, filters, False, ""),
        ({}, filters, False, ""),  # another release's names
        (CUT, filters, False, "cut"),
        (CUT, plain, False, ""),
        (CUT, filters, True, ""),
        (EQUAL, plain, False, "equal"),
        (EQUAL, training_arguments(scale_rewards="gdpo"), False, ""),
        (MASKED, plain, False, "masked"),
    ):
        assert idle_reason(metrics, args, is_multi_turn=is_multi_turn) == expected


def test_completions_that_are_all_cut_are_said_once(said: list[str]) -> None:
    trainer = Trainer(overlong_filter=True, max_completion_length=7)
    judge(trainer, CUT, CUT, HEALTHY, CUT, CUT)
    assert said == []
    judge(trainer, *[CUT] * 9)
    assert said == [
        "--overlong_filter true: all completions of 3 rounds in a row were cut at "
        "--max_completion_length 7, and cut ones are left out: the loss is 0, and nothing is "
        "trained. Raise --max_completion_length, or leave --overlong_filter out."
    ]


def test_equal_rewards_are_said_after_many_groups(said: list[str]) -> None:
    judge(Trainer(), *[EQUAL] * 4, HEALTHY, *[EQUAL] * 4)
    assert said == []  # 40 groups
    judge(Trainer(), *[EQUAL] * 9)
    judge(Trainer(beta=0.04), *[EQUAL] * 9)
    plain, with_kl = said
    assert plain.startswith(
        "--reward_funcs: in 5 rounds in a row all rewards of each group are equal (0.25 in the "
        "last round's mean): advantages are 0, and nothing is trained. `swift-grpo-ext view`"
    )
    assert "and nothing but the KL term of --beta is trained" in with_kl


def test_tokens_that_do_not_count(said: list[str]) -> None:
    judge(Trainer(), *[MASKED] * 9)
    [text] = said
    assert "in 3 rounds in a row no token of any completion counts" in text


@pytest.mark.parametrize("signal", ["_has_teacher", "chord_sft_iterator"])
def test_who_learns_from_others_is_not_warned(signal: str, said: list[str]) -> None:
    trainer = Trainer(overlong_filter=True)
    setattr(trainer, signal, True)
    judge(trainer, *[CUT] * 9, *[EQUAL] * 9)
    assert said == []
