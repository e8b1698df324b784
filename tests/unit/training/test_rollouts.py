"""A rollout that fails on one rank ends all ranks, each with the cause (F3)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.training.rollouts import RolloutTraining, Round
from tests.rig.ranks import ThreadRanks, run_rank_groups


class Trainer(RolloutTraining):
    """A rank without model and engine; its rollout may fail."""

    def __init__(
        self, ranks: RankGroup, *, fails: bool, generates: bool = True, **own: Any
    ) -> None:
        self.ranks, self.fails = ranks, fails
        self.waits: list[float] = []
        self._settings: Any = SimpleNamespace(generates=generates)
        self._clock: Any = SimpleNamespace(record_wait=self.waits.append)
        self.multi_turn_scheduler = own.get("scheduler")
        self.enable_server_multi_turn = own.get("on_server", False)

    def infer(self) -> Any:
        samples: Any = [f"sample of {self.ranks.rank}"]
        config: Any = None
        return self._infer_single_or_multi_turn(samples, config)


@pytest.fixture(autouse=True)
def _rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    def infer(trainer: Trainer, samples: Any, *_: Any) -> Any:
        if trainer.fails:
            raise OSError(f"disk {trainer.ranks.rank} is gone")
        return samples

    monkeypatch.setattr(RolloutTrainerMixin, "_infer_single_or_multi_turn", infer)


OWN = [f"OSError: disk {rank} is gone" for rank in range(2)]


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ((), [(["sample of 0"], 1), (["sample of 1"], 1)]),
        ((1,), [f"RolloutError: The rollout failed on rank 1: {OWN[1]}", OWN[1]]),
        ((0, 1), OWN),
    ],
)
def test_a_rollout_that_fails_on_one_rank_fails_on_all(
    failing: tuple[int, ...], expected: list[Any]
) -> None:
    """No rank waits for another one; each error names the rank that failed."""

    def work(ranks: ThreadRanks) -> Any:
        trainer = Trainer(ranks, fails=ranks.rank in failing)
        try:
            return trainer.infer(), len(trainer.waits)
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    assert run_rank_groups(2, work) == expected


@pytest.mark.parametrize(
    "settings", [{"generates": False}, {"scheduler": object()}, {"on_server": True}]
)
def test_a_rank_that_fails_between_collectives_of_ms_swift_meets_nobody(
    settings: dict[str, Any],
) -> None:
    """The other rank is in such a collective and would not answer."""

    def exchange(value: Any) -> list[Any]:
        raise AssertionError(value)

    with pytest.raises(OSError, match="disk 0 is gone"):
        Trainer(ThreadRanks(0, 2, exchange), fails=True, **settings).infer()


def test_a_round_is_measured_once_all_its_batches_are() -> None:
    batches: list[Any] = [SimpleNamespace(old_per_token_logps=None) for _ in range(2)]
    round_ = Round([], [([], batch) for batch in batches], [])
    for batch in batches:
        assert not round_.is_measured
        batch.old_per_token_logps = 0
    assert round_.is_measured
