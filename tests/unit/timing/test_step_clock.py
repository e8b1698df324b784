"""The parts of a step of a trainer with ms-swift's methods, by a clock that the test moves."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rlhf_trainers import GKDTrainer, GRPOTrainer
from transformers import TrainerControl, TrainerState, TrainingArguments

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.timing import memory, step_clock
from swift_grpo_ext.timing.step_clock import METHODS, PARTS, ROLLOUT_PARTS, StepClock
from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

ARGS, STATE, CONTROL = TrainingArguments(report_to=[]), TrainerState(), TrainerControl()


class Host:
    """The host's clock; it advances while the trainer works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_reads = 0

    def read(self) -> float:
        self.num_reads += 1
        return self.now


HOST = Host()


@pytest.fixture(autouse=True)
def _host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_clock, "perf_counter", HOST.read)


class Trainer:
    """Calls its methods as ms-swift's trainer does; each takes some seconds itself."""

    vllm_mode = "colocate"
    deepspeed: Any = None

    def __init__(self, **changes: Any) -> None:
        self.worked = 0.0
        self._metrics: Any = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.logs: list[dict[str, float]] = []
        self.accelerator = SimpleNamespace(sync_gradients=True, device=torch.device("cpu"))
        vars(self).update(changes)

    def work(self, seconds: float) -> None:
        self.worked += seconds
        HOST.now += seconds

    def training_step(self, failing: bool = False) -> None:
        self._prepare_inputs(failing)
        self._get_per_token_logps_and_entropies(32)
        self.work(64)

    def _prepare_inputs(self, failing: bool) -> None:
        self.work(0.5)
        self._rollout_samples(failing)
        self._score_completions()
        self._prepare_batch_inputs()

    def _rollout_samples(self, failing: bool = False) -> None:
        self.work(1)
        self._generate_completions(failing)

    def _generate_completions(self, failing: bool = False) -> None:
        self.work(1)
        self._fast_infer(failing)

    def _fast_infer(self, failing: bool = False) -> None:
        self.work(2)
        self._move_model_to_vllm()
        self.work(2)
        try:
            self._infer_single_or_multi_turn(failing)
        finally:
            self.work(16)

    def _move_model_to_vllm(self) -> None:
        self.work(8)

    def _infer_single_or_multi_turn(self, failing: bool = False) -> str:
        self.work(100)
        if failing:
            raise ConnectionError("no answer")
        return "samples"

    def _score_completions(self) -> None:
        self.work(1000)

    def _prepare_batch_inputs(self) -> None:
        self.work(2000)
        self._get_per_token_logps_and_entropies(3000)

    def _get_per_token_logps_and_entropies(self, seconds: float) -> None:
        self.work(seconds)

    def evaluation_loop(self) -> None:
        self.work(10000)
        self._rollout_samples()

    def log(self, logs: dict[str, float]) -> None:
        metrics = self._metrics["train"]
        self.logs.append({name: sum(of) / len(of) for name, of in metrics.items()} | logs)
        metrics.clear()


STEP = {
    "rollout": 130.0,
    "wake": 4.0,
    "send": 8.0,
    "generate": 100.0,
    "sleep": 16.0,
    "rewards": 1000.0,
    "batch": 2000.0,
    "logps": 3000.0,
    "loss": 96.0,
    "optimizer": 256.0,
    "rest": 0.5 + 512,
}
"""The seconds of a step's parts."""


def begin(trainer: Any) -> StepClock:
    clock = StepClock(trainer)
    clock.on_train_begin(ARGS, STATE, CONTROL)
    return clock


def step(trainer: Any, clock: StepClock, *batches: bool) -> None:
    """Make a step of batches; each value says whether that batch synchronizes gradients."""
    for is_last in batches or (True,):
        trainer.accelerator.sync_gradients = is_last
        trainer.training_step()
        trainer.work(0 if is_last else 5)  # between two batches there is no optimizer
    trainer.work(256)  # clipping, and the optimizer
    clock.on_optimizer_step(ARGS, STATE, CONTROL)
    trainer.work(512)  # other callbacks
    clock.on_step_end(ARGS, STATE, CONTROL)


def logged(trainer: Trainer) -> dict[str, float]:
    trainer.log({})
    return {name.removeprefix("time/"): value for name, value in trainer.logs[-1].items()}


def test_time_belongs_to_the_innermost_part() -> None:
    clock = begin(trainer := Trainer())
    for _ in range(2):
        step(trainer, clock)
        seconds = logged(trainer)
        assert seconds == STEP
        assert tuple(seconds) == (*PARTS, *ROLLOUT_PARTS)
    assert sum(STEP[part] for part in PARTS) == trainer.worked / 2


def test_steps_between_two_logs_are_averaged_and_gradients_accumulated() -> None:
    clock = begin(trainer := Trainer())
    step(trainer, clock, False, True)
    step(trainer, clock)
    seconds = logged(trainer)
    assert seconds["loss"] == 1.5 * STEP["loss"]
    assert seconds["optimizer"] == STEP["optimizer"]
    assert seconds["rest"] == (3 * 0.5 + 5 + 2 * 512) / 2
    assert sum(seconds[part] for part in PARTS) == trainer.worked / 2


class Resampling(Trainer):
    """Dynamic sampling generates once more while it scores."""

    def _score_completions(self) -> None:
        self.work(1000)
        self._generate_completions()
        self.work(1)


class Sharded(Trainer):
    """DeepSpeed's optimizer steps within the last batch."""

    def __init__(self) -> None:
        super().__init__(deepspeed=self)

    def step(self) -> None:
        self.work(128)

    def _get_per_token_logps_and_entropies(self, seconds: float) -> None:
        self.work(seconds)
        if seconds == 32:
            self.deepspeed.step()


class Evaluating(Trainer):
    def training_step(self, failing: bool = False) -> None:
        self.evaluation_loop()
        super().training_step()


TWICE = {part: 2 * STEP[part] for part in ROLLOUT_PARTS}


@pytest.mark.parametrize(
    ("trainer", "changes"),
    [
        (Trainer(vllm_mode="server"), {"wake": 0.0, "sleep": 0.0}),
        (Resampling(), {"rewards": 1001, "rollout": 2 * STEP["rollout"] - 1, **TWICE}),
        (Sharded(), {"optimizer": STEP["optimizer"] + 128}),
        (Evaluating(), {"rest": STEP["rest"] + 10000 + STEP["rollout"]}),
    ],
)
def test_where_time_of_other_trainers_belongs(trainer: Any, changes: dict[str, float]) -> None:
    """A server's engine neither wakes nor sleeps. A round that dynamic sampling adds is rollout. An
    evaluation counts as rest of the next step."""
    step(trainer, begin(trainer))
    assert logged(trainer) == {**STEP, **changes}


def test_an_exception_leaves_the_parts_right() -> None:
    clock = begin(trainer := Trainer())
    with pytest.raises(ConnectionError, match="no answer"):
        trainer.training_step(failing=True)
    trainer.evaluation_loop()
    failed = trainer.worked
    trainer.work(7)
    step(trainer, clock)
    seconds = logged(trainer)
    assert sum(seconds[part] for part in PARTS) == trainer.worked
    assert seconds["rollout"] == 2 * STEP["rollout"]
    assert seconds["logps"] == STEP["logps"]
    # `training_step` of the failed batch ended as any other does.
    assert seconds["rest"] + seconds["optimizer"] == (
        failed - STEP["rollout"] + 7 + STEP["rest"] + STEP["optimizer"]
    )


class Asynchronous(Trainer):
    """`--async_generate`: a thread generates, and the next round waits for it."""

    vllm_mode = "server"

    def _fast_infer(self, failing: bool = False) -> None:
        self._wait_queue()
        self.work(3)
        thread = threading.Thread(target=self._infer_single_or_multi_turn)
        thread.start()
        thread.join()

    def _wait_queue(self) -> None:
        self.work(40)

    def _infer_single_or_multi_turn(self, failing: bool = False) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return "samples"


class NoExchange(RankGroup):
    """A clock must not exchange values: if one rank fails, the others would wait."""

    size = 2

    def all_gather(self, value: Any) -> list[Any]:
        raise AssertionError(value)

    gather = scatter = all_gather


def test_another_thread_is_left_alone() -> None:
    clock = begin(trainer := Asynchronous(ranks=NoExchange()))
    step(trainer, clock)
    seconds = logged(trainer)
    assert (seconds["generate"], seconds["rollout"], seconds["sleep"]) == (40, 2 + 3 + 40, 0)


class Waiting(Trainer):
    """Reports to the clock that other ranks took 3 seconds longer in each round."""

    def _infer_single_or_multi_turn(self, failing: bool = False) -> str:
        self.clock.record_wait(3.0)
        return super()._infer_single_or_multi_turn(failing)


def test_a_step_logs_how_long_ranks_waited_for_the_slowest() -> None:
    """The waits of its rounds add up. An evaluation is not timed; a step without a round has
    none."""
    clock = begin(trainer := Waiting(ranks=NoExchange()))
    trainer.clock = clock
    for num_rounds in (1, 2):
        for _ in range(num_rounds):
            trainer.training_step()
        trainer.evaluation_loop()
        clock.on_step_end(ARGS, STATE, CONTROL)
        assert logged(trainer)["wait"] == 3 * num_rounds
    step(alone := Trainer(), begin(alone))
    assert logged(alone) == STEP


def test_a_second_training_is_timed_once_and_the_trainer_left_as_it_was() -> None:
    clock = begin(trainer := Trainer(ranks=NoExchange()))
    own = dict(vars(trainer))
    trainer.training_step()
    clock.on_train_begin(ARGS, STATE, CONTROL)  # after a first training that failed
    num_reads = HOST.num_reads
    step(trainer, clock)
    # The clock is read at both ends of 11 methods, after the optimizer and at the end of the step.
    assert HOST.num_reads - num_reads == 24
    other = begin(trainer)  # as in a bench
    state: Any = SimpleNamespace(is_world_process_zero=False)
    for each in (clock, other):
        each.on_train_end(ARGS, state, CONTROL)
    assert set(own) - set(vars(trainer)) == {*METHODS} & set(dir(Trainer))
    assert trainer._infer_single_or_multi_turn() == "samples"


MEMORY = {
    "send": 12.5,
    "wake": 14.5,
    "generate": 114.5,
    "sleep": 130.5,
    "rewards": 1130.5,
    "logps": 6130.5,
    "batch": 6130.5,
    "loss": 6226.5,
    "optimizer": 6482.5,
}
"""The GiB at the end of a first step's parts, if the trainer takes 1 GiB in each second."""


def make_gpu_trainer(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> Trainer:
    """Return the trainer on a device with 1 GiB for each second of its work."""
    trainer.accelerator.device = torch.device("cuda", 3)

    def used_bytes(device: torch.device) -> int:
        assert device == torch.device("cuda", 3)
        return int(trainer.worked * 2**30)

    monkeypatch.setattr(memory, "used_bytes", used_bytes)
    return trainer


def test_memory_is_read_at_the_end_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most since the last round counts. An evaluation has no figures, a server no wake."""
    clock = begin(trainer := make_gpu_trainer(monkeypatch, Trainer()))
    step(trainer, clock)
    trainer.worked = 0
    trainer.training_step()
    assert clock.memory.take() == MEMORY
    trainer.evaluation_loop()
    assert clock.memory.take() == {}
    served = make_gpu_trainer(monkeypatch, Trainer(vllm_mode="server"))
    step(served, clock := begin(served))
    assert [*clock.memory.take()] == [part for part in MEMORY if part not in ("wake", "sleep")]


def test_the_log_has_the_memory_of_the_fullest_device() -> None:
    clock = begin(trainer := Trainer())
    clock.log_memory([{"loss": 1.0, "wake": 5.0}, {}, {"loss": 3.0}])
    clock.log_memory([{"loss": 2.0}])
    assert logged(trainer) == {"memory/wake": 5.0, "memory/loss": 3.0}
    clock.log_memory([{"loss": 2.0}])
    assert logged(trainer) == {"memory/loss": 2.0}
    step(trainer, clock)
    clock.log_memory([clock.memory.take()])
    assert logged(trainer) == STEP  # a CPU has no such figures


def test_a_counter_that_fails_is_read_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_gpu_trainer(monkeypatch, Trainer())
    calls = []

    def used_bytes(device: torch.device) -> int:
        calls.append(device)
        raise RuntimeError("not implemented")

    monkeypatch.setattr(memory, "used_bytes", used_bytes)
    step(trainer, clock := begin(trainer))
    assert logged(trainer) == STEP
    assert (len(calls), clock.memory.take()) == (1, {})
    [warning] = caplog.messages
    assert "`memory/*` of cuda:3" in warning
    assert "not implemented" in warning


def test_it_costs_less_than_a_thousandth_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 32 micro-batches calls 150 of the methods, and takes 5 seconds or more."""
    monkeypatch.setattr(step_clock, "perf_counter", time.perf_counter)
    trainer = Trainer()
    trainer._get_per_token_logps_and_entropies = lambda _: None  # type: ignore[method-assign]
    clock = StepClock(trainer)  # type: ignore[arg-type]
    costs = []
    for _ in range(5):  # another process may run in between
        clock.on_train_begin(ARGS, STATE, CONTROL)
        began = time.perf_counter()
        for _ in range(150):
            trainer._get_per_token_logps_and_entropies(0)
        clock.on_step_end(ARGS, STATE, CONTROL)
        costs.append(time.perf_counter() - began)
    assert min(costs) < 5e-3


def test_ms_swift_has_these_methods_and_their_parts_are_known() -> None:
    own = {"_rounded_logps"}  # of RolloutGRPOTrainer
    assert {*METHODS} - own <= {*dir(GRPOTrainer), *dir(GKDTrainer)}
    assert own <= {*dir(RolloutGRPOTrainer)}
    assert set(METHODS.values()) <= {*PARTS, *ROLLOUT_PARTS}
