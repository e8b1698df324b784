"""Each second of a step belongs to the innermost running part of ms-swift's trainer (V5), and
memory is read at the end of each part. A run that hangs is reported. A real training's sum is in
`tests/stack/test_training.py`, and real stalls are in `tests/stack/test_failures.py`.
"""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from swift.rlhf_trainers import GKDTrainer, GRPOTrainer

from swift_grpo_ext.timing import memory, stalls, step_clock
from swift_grpo_ext.timing.stalls import StallReports, waiting
from swift_grpo_ext.timing.step_clock import METHODS, PARTS, ROLLOUT_PARTS
from swift_grpo_ext.training.trainer import RolloutGRPOTrainer
from tests.rig.timed import WORK, Trainer

STEP = {
    "rollout": 130.0,
    "wake": 4.0,
    "send": 8.0,
    "generate": 100.0,
    "sleep": 16.0,
    "rewards": 1000.0,
    "batch": 2000.0,
    "logps": 3000.0,
    "loss": 3064.0,
    "optimizer": 256.0,
    "rest": 0.5 + 512,
}
"""The seconds of a step's parts."""


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Any:
    def begin(trainer: Any) -> Any:
        monkeypatch.setattr(step_clock, "perf_counter", lambda: trainer.now)
        monkeypatch.setattr(memory, "used_bytes", lambda _: int(trainer.now * 2**30))
        trainer.begin()
        return trainer

    return begin


def test_time_belongs_to_the_innermost_part(begin: Any) -> None:
    """Two steps between two logs are averaged; gradients of the first are accumulated."""
    trainer = begin(Trainer())
    trainer.step()
    seconds = trainer.logged()
    assert seconds == STEP
    assert tuple(seconds) == (*PARTS, *ROLLOUT_PARTS)
    assert sum(STEP[part] for part in PARTS) == trainer.now
    trainer.now = 0.0
    trainer.clock.on_train_begin()  # after a first training that failed
    trainer.step(False, True)
    trainer.step()
    seconds = trainer.logged()
    assert seconds["loss"] == 1.5 * STEP["loss"]
    assert seconds["optimizer"] == STEP["optimizer"]
    assert seconds["rest"] == (3 * 0.5 + 5 + 2 * 512) / 2
    assert sum(seconds[part] for part in PARTS) == trainer.now / 2


def in_thread(trainer: Any) -> None:
    thread = threading.Thread(target=trainer._infer_single_or_multi_turn)
    thread.start()
    thread.join()


TWICE = {part: 2 * STEP[part] for part in ROLLOUT_PARTS}
SHARDED = Trainer(training_step=(*WORK["training_step"], lambda own: own.deepspeed.step()))
SHARDED.deepspeed = SimpleNamespace(step=lambda: SHARDED._work((128,)))
AHEAD = Trainer("server", _fast_infer=("_wait_queue", 3, in_thread), _wait_queue=(40,))


def test_where_time_of_other_trainers_belongs(begin: Any) -> None:
    for trainer, changes in (
        # A server's engine neither wakes nor sleeps.
        (Trainer("server"), {"wake": 0.0, "sleep": 0.0}),
        # Dynamic sampling generates once more while it scores.
        (
            Trainer(_score_completions=(1000, "_generate_completions", 1)),
            {"rewards": 1001, "rollout": 2 * STEP["rollout"] - 1, **TWICE},
        ),
        # DeepSpeed's optimizer steps within the last batch.
        (SHARDED, {"optimizer": STEP["optimizer"] + 128}),
        # An evaluation counts as rest of the next step.
        (
            Trainer(training_step=("evaluation_loop", *WORK["training_step"])),
            {"rest": STEP["rest"] + 10000 + STEP["rollout"]},
        ),
        # With `--async_generate` a thread generates, and the next round waits for it. The thread's
        # 100 seconds are in none of its own parts.
        (
            AHEAD,
            {"wake": 0.0, "send": 0.0, "sleep": 0.0, "generate": 40, "rollout": 2 + 3 + 40 + 100},
        ),
    ):
        begin(trainer).step()
        assert trainer.logged() == {**STEP, **changes}


MEMORY = {"send": 12.5, "wake": 14.5, "generate": 114.5, "sleep": 130.5, "rewards": 1130.5}
MEMORY |= {"logps": 6130.5, "batch": 6130.5, "loss": 9194.5, "optimizer": 9450.5}
"""The GiB at the end of a first step's parts, if the trainer takes 1 GiB in each second."""


def test_memory_is_read_at_the_end_of_each_part(
    begin: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The most since the last round counts, of the fullest device. A server has no wake, a CPU
    nothing. A counter that fails is read once."""
    trainer = begin(Trainer(device="cuda:3"))
    trainer.step()
    trainer.now = 0.0
    trainer.training_step()
    assert trainer.clock.memory.take() == MEMORY
    assert trainer.clock.memory.take() == {}
    trainer._metrics["train"].clear()
    trainer.clock.log_memory([{"loss": 1.0, "wake": 5.0}, {}, {"loss": 3.0}])
    trainer.clock.log_memory([{"loss": 2.0}])
    assert trainer.logged() == {"memory/wake": 5.0, "memory/loss": 3.0}
    for device, parts in (("cuda:3", MEMORY.keys() - {"wake", "sleep"}), ("cpu", set())):
        served = begin(Trainer("server", device))
        served.step()
        assert served.clock.memory.take().keys() == parts
    calls = []

    def used_bytes(device: torch.device) -> int:
        calls.append(device)
        raise RuntimeError("not implemented")

    monkeypatch.setattr(memory, "used_bytes", used_bytes)
    trainer.training_step()
    assert calls == [torch.device("cuda", 3)]
    [warning] = caplog.messages
    assert "`memory/*` of cuda:3" in warning
    assert "not implemented" in warning


def test_ms_swift_has_these_methods() -> None:
    own = {"_rounded_logps"}
    assert {*METHODS} - own <= {*dir(GRPOTrainer), *dir(GKDTrainer)}
    assert own <= {*dir(RolloutGRPOTrainer)}


def test_an_idle_server_reports_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "MINUTES", 0.2 / 60)
    for waits in (nullcontext(), waiting("replica 0.0: `infer`")):
        with StallReports(), waits:
            time.sleep(1.2)
        is_idle = isinstance(waits, nullcontext)
        assert ("rank 0: waits for replica" in capsys.readouterr().err) != is_idle
