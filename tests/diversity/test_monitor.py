"""The callback, between a trainer's rollouts and its log; on two ranks with real collectives."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import TrainerControl, TrainerState

from swift_grpo_ext.diversity.monitor import DiversityMonitor
from swift_grpo_ext.diversity.record import read_records
from swift_grpo_ext.diversity.sample import Sample
from swift_grpo_ext.record.rewards import RewardRow
from swift_grpo_ext.rollout.rank_group import training_ranks
from tests.arguments import training_arguments
from tests.diversity.samples import group_of, row_of, sample

LONG = list(range(60))


class Run:
    """The trainer's side of the callback: it draws, steps, evaluates and logs."""

    def __init__(self, folder: Path, rank: int = 0, **flags: Any) -> None:
        self.trainer = SimpleNamespace(
            sample_listeners=[],
            score_listeners=[],
            ranks=training_ranks(60),
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        )
        defaults = {"diversity_patience": 2, "temperature": 1.0, "rollout_seed_mode": "engine"}
        self.args = training_arguments(**defaults | {"output_dir": str(folder)} | flags)
        self.monitor = DiversityMonitor(self.args, self.trainer)
        self.state = TrainerState(is_world_process_zero=rank == 0)
        self.control = TrainerControl()
        self.monitor.on_train_begin(self.args, self.state, self.control)

    def draw(self, samples: list[Sample]) -> None:
        for listener in self.trainer.sample_listeners:
            listener([row_of(s) for s in samples])

    def score(self, samples: list[Sample], rewards: Sequence[float]) -> None:
        rows = [
            RewardRow(
                sample_id=s.origin.sample_id,
                reward=reward,
                rewards=[],
                truncated=False,
                replaced=False,
                fate="trained",
            )
            for s, reward in zip(samples, rewards, strict=True)
        ]
        for listener in self.trainer.score_listeners:
            listener(rows)

    def step(self, samples: list[Sample], rewards: Sequence[float] = ()) -> None:
        self.draw(samples)
        if rewards:
            self.score(samples, rewards)
        self.monitor.on_step_end(self.args, self.state, self.control)

    @property
    def logged(self) -> dict[str, list[float]]:
        return self.trainer._metrics["train"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged as a warning."""
    lines: list[str] = []
    monkeypatch.setattr("swift_grpo_ext.diversity.monitor.logger.warning", lines.append)
    return lines


def test_metrics_reach_the_log_once_a_round(tmp_path: Path, said: list[str]) -> None:
    run = Run(tmp_path)
    run.step(group_of([1, 2], [3], step=0))
    run.step([])
    run.step(group_of([1, 4], [1, 4], step=2))
    assert run.logged["diversity/unique_ratio"] == [1.0, 0.5]
    assert all(len(values) == 2 for values in run.logged.values())
    assert said == []
    assert [r.step for r in read_records(tmp_path)] == [0, 2]


def test_scores_reach_the_metrics(tmp_path: Path) -> None:
    run = Run(tmp_path, diversity_correct_reward=0.5)
    run.step(group_of([1], [2], [3], [4]), [0.5, 1.0, 0.0, 0.25])
    assert run.logged["diversity/pass_at_1"] == [0.5]
    assert run.logged["diversity/pass_at_2"] == [pytest.approx(5 / 6)]
    assert run.logged["diversity/equal_rewards"] == [0.0]
    run.step(group_of([1], [2], step=1))
    assert len(run.logged["diversity/pass_at_1"]) == 1  # nothing was scored


def test_rounds_are_analyzed_beside_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on during the analysis, and waits for it at its end."""
    may_go_on = threading.Event()
    run = Run(tmp_path, diversity_action="stop")
    analyze = run.monitor._analyzer.analyze

    def slow(*args: Any) -> list[Any]:
        assert may_go_on.wait(10)
        return analyze(*args)

    monkeypatch.setattr(run.monitor._analyzer, "analyze", slow)
    samples = group_of(LONG, LONG)
    run.draw(samples)
    run.score(samples, [1.0, 0.0])
    assert not run.logged
    may_go_on.set()
    run.step([])
    assert run.logged["diversity/unique_ratio"] == [0.5]
    assert run.control.should_training_stop


def test_an_analysis_that_fails_ends_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)

    def fail(*args: Any) -> None:
        raise ZeroDivisionError("no groups")

    monkeypatch.setattr(run.monitor._analyzer, "analyze", fail)
    samples = group_of([1], [2])
    run.draw(samples)
    run.score(samples, [1.0, 0.0])
    with pytest.raises(ZeroDivisionError, match="no groups"):
        run.step([])


def test_evaluation_is_logged_as_such(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.draw(group_of([1], [2], phase="eval"))
    run.monitor.on_prediction_step(run.args, run.state, run.control)
    assert run.trainer._metrics["eval"]["diversity/unique_ratio"] == [1.0]
    assert not run.logged


def test_an_alarm_of_an_evaluation_stops_too(tmp_path: Path) -> None:
    run = Run(tmp_path, diversity_action="stop")
    run.draw(group_of(LONG, LONG, phase="eval"))
    run.monitor.on_prediction_step(run.args, run.state, run.control)
    assert (run.control.should_save, run.control.should_training_stop) == (True, True)


def test_alarms_are_said_once_until_they_end(tmp_path: Path, said: list[str]) -> None:
    run = Run(tmp_path)
    for step in (0, 1):
        run.step(group_of(LONG, LONG, step=step))
    assert len(said) == 1
    assert "broken randomness in train round 0.0" in said[0]
    assert "replica 'rank 0'" in said[0]
    run.step(group_of([1], [2], step=2))
    run.step(group_of([*LONG, 3], [*LONG, 3], step=3))
    assert len(said) == 2
    assert not run.control.should_training_stop
    run.monitor.on_train_end(run.args, run.state, run.control)
    assert said[-1].startswith("diversity: 3 rounds of this session with broken randomness")


def test_log_says_nothing_but_records(tmp_path: Path, said: list[str]) -> None:
    run = Run(tmp_path, diversity_action="log")
    run.step(group_of(LONG, LONG))
    assert said == []
    assert read_records(tmp_path)[0].alarm is not None


def test_stop_saves_and_stops(tmp_path: Path) -> None:
    run = Run(tmp_path, diversity_action="stop")
    run.step(group_of([1], [2]))
    assert not run.control.should_training_stop
    run.step(group_of(LONG, LONG, step=1))
    assert (run.control.should_save, run.control.should_training_stop) == (True, True)


@pytest.mark.parametrize("patience", [0, 3])
def test_a_collapse_stops_when_patience_ends(
    patience: int, tmp_path: Path, said: list[str]
) -> None:
    run = Run(tmp_path, diversity_action="stop", diversity_patience=patience)
    for step in range(3):
        assert not run.control.should_training_stop
        run.step(group_of(*[[1, 2]] * 4, step=step, bits=0.01))
    assert run.control.should_training_stop == (patience == 3)
    assert len(said) == (patience == 3)
    if not patience:
        return
    assert "collapsed policy" in said[0]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [({"temperature": 0.0}, "decodes greedily"), ({"use_vllm": False}, "no log-probabilities")],
)
def test_what_cannot_be_tested_is_said_at_the_start(
    flags: dict[str, Any], reason: str, tmp_path: Path, said: list[str]
) -> None:
    run = Run(tmp_path, **flags)
    assert len(said) == 1
    assert reason in said[0]
    run.step(group_of(LONG, LONG, LONG, bits=None if "use_vllm" in flags else 1.0))
    assert read_records(tmp_path)[0].verdict == "unknown"
    assert len(said) == 1


def test_replicas_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    """ms-swift's own rollouts do not name them."""
    run = Run(tmp_path, vllm_tensor_parallel_size=2)
    run.step([sample(LONG, index=i, rank=i, replica="") for i in range(3)])
    (collision,) = read_records(tmp_path)[0].collisions
    assert sorted(s["replica"] for s in collision["samples"]) == ["rank 0", "rank 0", "rank 2"]


@pytest.mark.parametrize(
    ("flags", "replicas"),
    [
        ({"vllm_mode": "server"}, ["", "", ""]),
        ({"use_vllm": False, "vllm_tensor_parallel_size": 2}, ["rank 0", "rank 1", "rank 2"]),
        ({"use_vllm": False, "vllm_mode": "server"}, ["rank 0", "rank 1", "rank 2"]),
    ],
)
def test_engines_that_no_rank_stands_for(
    flags: dict[str, Any], replicas: list[str], tmp_path: Path
) -> None:
    run = Run(tmp_path, **flags)
    run.step([sample(LONG, index=i, rank=i, replica="") for i in range(3)])
    (collision,) = read_records(tmp_path)[0].collisions
    assert [s["replica"] for s in collision["samples"]] == replicas
    assert [s["rank"] for s in collision["samples"]] == [0, 1, 2]


def test_a_name_that_the_engine_gave_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step([sample(LONG, index=i, rank=i, replica="server 1 replica 0") for i in range(2)])
    (collision,) = read_records(tmp_path)[0].collisions
    assert {s["replica"] for s in collision["samples"]} == {"server 1 replica 0"}


def test_a_resumed_session_replaces_from_its_step_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for step in range(3):
        run.step(group_of([step], [9], step=step))
    run.state.global_step = 2
    run.monitor.on_train_begin(run.args, run.state, run.control)
    assert [r.step for r in read_records(tmp_path)] == [0, 1]


def test_only_rank_0_writes(tmp_path: Path, said: list[str]) -> None:
    run = Run(tmp_path, rank=1, temperature=0.0)
    run.step(group_of([1], [2]))
    assert list(tmp_path.iterdir()) == []
    assert said == []
    assert run.logged["diversity/unique_ratio"] == [1.0]


def test_samples_of_the_last_step_are_analyzed_too(tmp_path: Path, said: list[str]) -> None:
    run = Run(tmp_path, diversity_action="log")
    run.draw(group_of(LONG, LONG))
    run.draw(group_of(*[[1, 2]] * 4, bits=0.01, step=1))
    run.draw(group_of(*[[1, 3]] * 4, bits=0.01, step=2))
    run.monitor.on_train_end(run.args, run.state, run.control)
    assert [r.verdict for r in read_records(tmp_path)] == ["broken", "collapse", "collapse"]
    assert said == [
        "diversity: 1 rounds of this session with broken randomness, 1 with a collapsed policy: "
        f"`swift-grpo-ext report {tmp_path}` shows them."
    ]


def test_a_run_without_alarms_ends_in_silence(tmp_path: Path, said: list[str]) -> None:
    run = Run(tmp_path)
    run.step(group_of([1], [2]))
    run.monitor.on_train_end(run.args, run.state, run.control)
    assert said == []


def test_an_alarm_that_changes_is_said_again(tmp_path: Path, said: list[str]) -> None:
    run = Run(tmp_path, diversity_patience=1)
    collapsed = [group_of(*[[1, 2]] * 4, step=step, bits=0.01) for step in (0, 1)]
    for samples in (*collapsed, group_of(LONG, LONG, step=2)):
        run.step(samples)
    assert [words.split(" in train")[0] for words in said] == [
        *("diversity: collapsed policy", "diversity: broken randomness")
    ]
    assert all(words.endswith(" (Said once; see diversity.jsonl.)") for words in said)


def test_a_stop_is_not_undone_by_a_sound_round_of_the_same_step(tmp_path: Path) -> None:
    run = Run(tmp_path, diversity_action="stop")
    run.draw(group_of(LONG, LONG))
    run.step(group_of([1], [2], step=1))
    assert (run.control.should_save, run.control.should_training_stop) == (True, True)


def test_temperatures_that_vllm_takes_for_zero(tmp_path: Path) -> None:
    for number, (temperature, verdict) in enumerate([(0.9e-5, "unknown"), (1e-5, "broken")]):
        run = Run(tmp_path / str(number), temperature=temperature)
        run.step(group_of(LONG, LONG))
        assert read_records(tmp_path / str(number))[0].verdict == verdict


def test_flags_reach_the_analysis(tmp_path: Path) -> None:
    """A pair of 20 bits, whose p is 1.91e-6; and whose remedy the seed mode decides."""
    for number, (alarm_p, mode) in enumerate([(1.90e-6, "engine"), (1.92e-6, "sample")]):
        flags = {"diversity_alarm_p": alarm_p, "rollout_seed_mode": mode}
        run = Run(tmp_path / str(number), **flags)
        run.step([sample(LONG[:20], index=i, seed=i) for i in (0, 1)])
    first, second = (read_records(tmp_path / str(number))[0] for number in (0, 1))
    assert (first.verdict, first.remedy) == ("collapse", "")
    assert (second.verdict, second.remedy) == ("broken", "remedy_ignored_seeds")


def test_a_failure_of_one_rank_is_its_own_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.monitor._file._path = tmp_path
    with pytest.raises(IsADirectoryError):
        run.step(group_of([1], [2]))


def test_other_trainers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"this is a SimpleNamespace,.*Leave it out"):
        DiversityMonitor(SimpleNamespace(), SimpleNamespace())


# --- two ranks ---


def on_ranks(work: Callable[[int, str], None], folder: Path) -> None:
    # Forked: the imports of a fresh process would take a quarter of a minute.
    mp.start_processes(_rank, (work, str(folder)), nprocs=2, start_method="fork")


def _rank(rank: int, work: Callable[[int, str], None], folder: str) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        work(rank, folder)
    finally:
        dist.destroy_process_group()


def copies_across_ranks(rank: int, folder: str) -> None:
    """A group on two ranks, each with its own half; in round 1 both ranks drew the same."""
    run = Run(Path(folder) / "run", rank, diversity_action="stop")
    stops = []
    for step in range(2):
        ids = [i + 100 * rank * (1 - step) + 1000 * step for i in LONG]
        run.step([sample(ids, index=rank, rank=rank, step=step, replica="")], [float(rank)])
        stops.append((run.control.should_save, run.control.should_training_stop))
    result = {"stops": stops, "unique": run.logged["diversity/unique_ratio"]}
    result["passed"] = run.logged["diversity/pass_at_1"]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))


def test_all_ranks_stop_together(tmp_path: Path) -> None:
    on_ranks(copies_across_ranks, tmp_path)
    results = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in (0, 1)]
    assert results[0] == results[1]
    assert results[0]["stops"] == [[False, False], [True, True]]
    assert results[0]["unique"] == [1.0, 0.5]
    assert results[0]["passed"] == [0.5, 0.5]
    records = read_records(tmp_path / "run")
    assert [r.verdict for r in records] == ["healthy", "broken"]
    assert "(rank 0, replica 'rank 0')" in (records[1].alarm or "")
    assert "(rank 1, replica 'rank 1')" in (records[1].alarm or "")


def fail_on_main(rank: int, folder: str) -> None:
    """The main rank cannot write; no rank may wait for ever."""
    run = Run(Path(folder) / "run", rank)
    if rank == 0:
        (Path(folder) / "run/diversity.jsonl").unlink()
        (Path(folder) / "run/diversity.jsonl").mkdir()
    try:
        run.step([sample(LONG, index=rank)])
    except (OSError, RuntimeError) as e:
        Path(folder, f"rank{rank}.txt").write_text(f"{type(e).__name__}: {e}")


def test_a_failure_ends_all_ranks(tmp_path: Path) -> None:
    on_ranks(fail_on_main, tmp_path)
    assert (tmp_path / "rank0.txt").read_text().startswith("IsADirectoryError")
    words = (tmp_path / "rank1.txt").read_text()
    assert words.startswith("RuntimeError: --callbacks diversity failed on rank 0: IsADirectory")
