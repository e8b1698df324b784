"""Ranks agree on failures after a rollout."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.timing.step_clock import StepClock
from swift_grpo_ext.training.rollouts import RolloutTraining, Round
from tests.rig.ranks import ThreadRanks, run_rank_groups


class Trainer(RolloutTraining):
    """A rank without model and engine, whose rollout may fail."""

    multi_turn_scheduler: Any = None
    enable_server_multi_turn = False

    def __init__(self, ranks: RankGroup, *, fails: bool, generates: bool = True) -> None:
        self.ranks = ranks
        self.fails = fails
        self.waits: list[float] = []
        self._settings: Any = SimpleNamespace(generates=generates)
        self._clock: Any = SimpleNamespace(record_wait=self.waits.append)


@pytest.fixture(autouse=True)
def _rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(trainer: Trainer, samples: Any, *_: Any) -> Any:
        if trainer.fails:
            raise OSError(f"disk {trainer.ranks.rank} is gone")
        return samples

    monkeypatch.setattr(RolloutTrainerMixin, "_infer_single_or_multi_turn", infer)


@pytest.mark.parametrize("failing", [(), (1,), (0, 1)])
def test_a_rollout_that_fails_on_one_rank_fails_on_all(failing: tuple[int, ...]) -> None:
    """No rank waits for another one; each error names the rank that failed."""

    def work(ranks: ThreadRanks) -> Any:
        trainer = Trainer(ranks, fails=ranks.rank in failing)
        samples: Any = [f"sample of {ranks.rank}"]
        config: Any = None
        try:
            results = trainer._infer_single_or_multi_turn(samples, config)
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return results, len(trainer.waits)

    own = [f"OSError: disk {rank} is gone" for rank in range(2)]
    expected: dict[tuple[int, ...], list[Any]] = {
        (): [(["sample of 0"], 1), (["sample of 1"], 1)],
        (1,): [f"RolloutError: The rollout failed on rank 1: {own[1]}", own[1]],
        (0, 1): own,
    }
    assert run_rank_groups(2, work) == expected[failing]


class NoExchange(RankGroup):
    """The other rank is in a collective of ms-swift's and would not answer."""

    size = 2

    def all_gather(self, value: Any) -> list[Any]:
        raise AssertionError(value)


@pytest.mark.parametrize(
    "trainer",
    [
        Trainer(NoExchange(), fails=True, generates=False),
        type("Talks", (Trainer,), {"multi_turn_scheduler": object()})(NoExchange(), fails=True),
        type("Asks", (Trainer,), {"enable_server_multi_turn": True})(NoExchange(), fails=True),
    ],
)
def test_a_rank_that_fails_between_collectives_of_ms_swift_meets_nobody(trainer: Trainer) -> None:
    config: Any = None
    with pytest.raises(OSError, match="disk 0 is gone"):
        trainer._infer_single_or_multi_turn([], config)


def test_a_round_is_measured_once_all_its_batches_are() -> None:
    batches: list[Any] = [SimpleNamespace(old_per_token_logps=None) for _ in range(2)]
    round_ = Round([], [([], batch) for batch in batches], [])
    for batch in batches:
        assert not round_.is_measured
        batch.old_per_token_logps = 0
    assert round_.is_measured


def test_a_round_logs_the_memory_of_the_fullest_rank() -> None:
    """A rank without a figure does not keep the others from logging theirs."""
    figures: list[dict[str, float]] = [{"loss": 20.0}, {"loss": 24.0, "wake": 30.0}, {}]

    def nothing(*_: Any, **__: Any) -> Any:
        return {}

    def work(ranks: ThreadRanks) -> dict[str, list[float]]:
        trainer = Trainer(ranks, fails=False)
        trainer._metrics = {"train": defaultdict(list)}
        trainer.accelerator = SimpleNamespace(device=torch.device("cpu"))
        trainer._clock = StepClock(trainer)  # type: ignore[arg-type]
        trainer._clock.memory.take = lambda: figures[ranks.rank]
        trainer.model = SimpleNamespace(training=True)
        trainer.state = SimpleNamespace(global_step=0)
        trainer.score_listeners = []
        trainer.recorder = SimpleNamespace(record_scores=nothing)
        trainer.completion_logps = SimpleNamespace(sharing_failed=False, end_round=nothing)
        trainer._rewards = SimpleNamespace(record=lambda *_, **__: [])
        trainer._gap_check = SimpleNamespace(check=nothing)
        trainer._round = Round([], [], [])
        trainer._end_round()
        return dict(trainer._metrics["train"])

    expected = {"memory/wake": [30.0], "memory/loss": [24.0]}
    assert run_rank_groups(3, work) == [expected] * 3
