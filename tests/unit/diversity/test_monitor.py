"""`--callbacks diversity` logs, records and acts on the measurements of each round, on all ranks
together (D1, D3); also for ms-swift's own rollouts."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from swift_grpo_ext.diversity.analyzer import RoundAnalyzer
from swift_grpo_ext.monitor import DiversityMonitor
from swift_grpo_ext.ranks import RankGroup, RolloutError
from swift_grpo_ext.record.recorder import SampleRecorder
from swift_grpo_ext.record.tables import DiversityRow, SampleRow
from tests.rig.arguments import training_arguments
from tests.rig.diversity.samples import LONG, group_of, sample
from tests.rig.ranks import ThreadRanks, run_rank_groups
from tests.rig.record.rows import read_diversity, score_of


class Run:
    """The trainer's side of the callback: it generates, scores, steps and logs."""

    def __init__(self, folder: Path, ranks: RankGroup | None = None, **flags: Any) -> None:
        ranks = ranks or RankGroup()
        self.recorder = SampleRecorder(str(folder), ranks, kept="none", keeps_diversity=True)
        self.recorder.open(start_step=0)
        self.trainer = SimpleNamespace(
            recorder=self.recorder,
            score_listeners=[],
            ranks=ranks,
            _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        )
        defaults = {"temperature": 1.0, "rollout_seed_mode": "engine", "output_dir": str(folder)}
        self.args = training_arguments(**defaults | flags)
        self.monitor = DiversityMonitor(self.args, self.trainer)

    def arrive(self, *turns: list[SampleRow]) -> None:
        for turn in turns:
            self.recorder.append(turn)

    def score(self, samples: list[SampleRow], rewards: Sequence[float]) -> None:
        rows = [score_of(s.sample_id, r) for s, r in zip(samples, rewards, strict=False)]
        shares = self.trainer.ranks.all_gather(rows)
        for listener in self.trainer.score_listeners:
            listener([row for share in shares for row in share])

    def step(self, samples: list[SampleRow], rewards: Sequence[float] = ()) -> bool:
        """Generate, score and step; return whether the run has to save and to stop."""
        self.arrive(samples)
        self.recorder.write()
        if rewards:
            self.score(samples, rewards)
        control = TrainerControl()
        self.monitor.on_step_end(self.args, TrainerState(), control)
        assert control.should_save == control.should_training_stop
        return control.should_training_stop

    @property
    def logged(self) -> dict[str, list[float]]:
        return self.trainer._metrics["train"]

    @property
    def records(self) -> list[DiversityRow]:
        self.recorder.flush()
        return read_diversity(self.args.output_dir)


def test_metrics_and_scores_reach_the_log_once_a_round(tmp_path: Path, warnings: list[str]) -> None:
    """A turn without an answer had no room for it: the turn before counts for the sample."""
    run, first = Run(tmp_path), group_of([1], [2], [3], [4])
    run.step([*first, *group_of([], [], [], [], turn=1)], [1.0, 2.0, 0.0, 0.25])
    run.step([])
    run.step(group_of([1, 4], [1, 4], step=2))  # nothing was scored
    run.arrive(group_of([1], [2], phase="eval"))
    run.recorder.write()
    run.monitor.on_prediction_step(run.args, TrainerState(), TrainerControl())
    assert run.logged["diversity/unique_ratio"] == [1.0, 0.5]
    assert run.logged["diversity/pass_at_1"] == [0.5]
    assert run.logged["diversity/equal_rewards"] == [0.0]
    assert run.trainer._metrics["eval"]["diversity/unique_ratio"] == [1.0]
    assert [(*r.round, r.num_samples) for r in run.records] == [
        *(("eval", 0, 0, 2), ("train", 0, 0, 4), ("train", 2, 0, 2))
    ]  # fmt: skip
    assert not [*(tmp_path / "samples").glob("*.parquet")]  # with `--sample_log none`
    assert warnings == []


def test_alarms_stop_a_run_and_are_said_once_until_they_end_or_change(
    tmp_path: Path, warnings: list[str]
) -> None:
    """A sound round of the same step does not undo an alarm. Collapsed rounds of evaluations count
    apart."""
    run = Run(tmp_path, diversity_action="stop")
    rounds = [group_of(LONG, LONG) + group_of([1], [2], phase="eval")]
    rounds += [group_of(LONG, LONG, step=1), group_of([1], [2], step=2)]
    rounds += [group_of([*LONG, 3], [*LONG, 3], step=3)]
    for step in (4, 5, 6, 7):
        collapsed = {"step": step, "bits": 0.01}
        rounds.append(group_of(*[[1, 2]] * 4, **collapsed))
        rounds[-1] += group_of(*[[1, 2]] * 4, **collapsed, phase="eval") if step < 6 else []
    stops = [run.step(samples) for samples in rounds]
    assert stops == [True, True, False, True, False, False, True, True]
    assert [line.split(": ")[1] for line in warnings] == [
        "broken randomness in train round 0.0",
        "broken randomness in train round 3.0",
        "collapsed policy in train round 6.0, 3 rounds in a row",
    ]
    assert all(f"`swift-grpo-ext view {tmp_path}`" in line for line in warnings)
    has_collapsed = [record.scalars()["diversity/collapse"] for record in run.records]
    assert has_collapsed == [False] * 9 + [True] * 2


@pytest.mark.parametrize(
    ("flags", "is_said"),
    [
        ({"temperature": 0.9e-5}, True),  # vLLM takes it for 0
        ({"temperature": 1e-5}, False),
        ({"use_vllm": False}, True),
    ],
)
def test_what_cannot_be_tested_is_said_at_the_start(
    flags: dict[str, Any], is_said: bool, tmp_path: Path, warnings: list[str]
) -> None:
    run = Run(tmp_path, rollout_seed_mode="sample", **flags)
    assert ["cannot test the noise of greedy decoding" in line for line in warnings] == [
        True
    ] * is_said
    stops = run.step(group_of(LONG, LONG, LONG, bits=None if "use_vllm" in flags else 1.0))
    assert not stops  # with `--diversity_action warn`, the default
    found = run.records[0].verdict, run.records[0].remedy
    assert found == (("unknown", "") if is_said else ("broken", "remedy_ignored_seeds"))


@pytest.mark.parametrize(
    ("flags", "given", "replicas"),
    [
        # ms-swift's own rollouts name no engine.
        ({}, "", ["rank 0", "rank 1", "rank 2"]),
        ({"vllm_tensor_parallel_size": 2}, "", ["rank 0", "rank 0", "rank 2"]),
        ({"vllm_mode": "server"}, "", ["", "", ""]),
        ({"use_vllm": False, "vllm_tensor_parallel_size": 2}, "", ["rank 0", "rank 1", "rank 2"]),
        ({}, "server 1 replica 0", ["server 1 replica 0"] * 3),
    ],
)
def test_replicas_are_named_in_the_record(
    flags: dict[str, Any], given: str, replicas: list[str], tmp_path: Path, warnings: list[str]
) -> None:
    """With `--diversity_action log` an alarm is only recorded."""
    run = Run(tmp_path, diversity_action="log", **flags)
    warnings.clear()  # of `--use_vllm false`
    stops = run.step([sample(LONG, index=i, rank=i, replica=given) for i in range(3)])
    [record] = run.records
    [collision] = record.collisions
    assert [s["replica"] for s in collision["samples"]] == replicas
    assert record.alarm
    assert (record.remedy, stops, warnings) == ("remedy_seed_mode", False, [])


def test_a_round_that_is_generated_ahead_is_analyzed_once_and_whole(tmp_path: Path) -> None:
    """With `--async_generate` the next round may arrive before a round is gathered, or before it is
    scored."""
    run = Run(tmp_path, async_generate=True, vllm_mode="server")

    def turns_of(phase: str, step: int, group: int = 0) -> list[list[SampleRow]]:
        """Two turns of a group and half a group."""

        def turn_of(**place: Any) -> list[SampleRow]:
            half = group_of([1, 4], [2, 4], group=group + 1, **place)
            return group_of([1], [2], [3], group=group, **place) + half

        return [turn_of(phase=phase, step=step, turn=turn) for turn in (0, 1)]

    def use(turns: list[list[SampleRow]], ahead: list[list[SampleRow]], *, early: bool) -> None:
        """Gather, score and step; the batch that is drawn ahead arrives before, or meanwhile."""
        run.arrive(*(ahead if early else ()))
        run.recorder.write()
        run.arrive(*(() if early else ahead))
        run.score(turns[0], [1.0, 0.0, 0.0, 0.0, 0.0])
        run.monitor.on_step_end(run.args, TrainerState(), TrainerControl())

    first, second, third = (turns_of("train", step) for step in range(3))
    batches = [turns_of("eval", 1, group) for group in (0, 2, 4)]
    run.arrive(*first)  # before the training begins
    use(first, second, early=True)
    run.arrive(*batches[0])
    use(batches[0], batches[1], early=True)
    use(batches[1], batches[2], early=False)  # no evaluation uses the third
    use(second, third, early=False)
    assert [(*r.round[:2], r.num_samples, r.num_groups) for r in run.records] == [
        *(("train", 0, 10, 4), ("eval", 1, 10, 4), ("eval", 1, 10, 4), ("train", 1, 10, 4))
    ]  # fmt: skip
    assert run.logged["diversity/pass_at_1"] == [pytest.approx(1 / 6)] * 2


def test_other_trainers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SimpleNamespace has none\. Leave it out"):
        DiversityMonitor(SimpleNamespace(), SimpleNamespace())


def test_all_ranks_stop_or_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has half of a group. In round 1 both generate the same. Round 2 cannot be
    analyzed."""

    def work(ranks: ThreadRanks) -> tuple[list[bool], list[float], list[float]]:
        run = Run(tmp_path, ranks, diversity_action="stop")
        stops = []
        for step in range(2):
            ids = [i + 100 * ranks.rank * (1 - step) + 1000 * step for i in LONG]
            own = [sample(ids, index=ranks.rank, rank=ranks.rank, step=step, replica="")]
            stops.append(run.step(own, [float(ranks.rank)]))
        run.recorder.flush()
        monkeypatch.setattr(RoundAnalyzer, "analyze", None)
        kind = RolloutError if ranks.rank else RuntimeError
        with pytest.raises(kind, match="--callbacks diversity: TypeError: 'NoneType' object"):
            run.step([sample(LONG, index=ranks.rank, step=2)])
        return stops, run.logged["diversity/unique_ratio"], run.logged["diversity/pass_at_1"]

    assert run_rank_groups(2, work) == [([False, True], [1.0, 0.5], [0.5, 0.5])] * 2
    healthy, broken = read_diversity(tmp_path)
    assert (healthy.verdict, broken.verdict) == ("healthy", "broken")
    assert "(rank 0, replica 'rank 0')" in (broken.alarm or "")
    assert "(rank 1, replica 'rank 1')" in (broken.alarm or "")
