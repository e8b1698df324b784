"""The overview of a run: curves, verdict, alarms, worst groups."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.tools.view.overview import (
    alarm_streaks,
    make_panels,
    mean_of_last,
    overall_verdict,
    overview_values,
    worst_groups,
)
from swift_grpo_ext.tools.view.pages import render
from swift_grpo_ext.tools.view.runs import Run
from tests.rig.diversity.runs import frozen_rounds
from tests.rig.diversity.runs import make_run as make_watched_run
from tests.rig.diversity.samples import group_of
from tests.rig.view.runs import add_logs, add_tokenizer


def test_panels_of_the_monitor(tmp_path: Path) -> None:
    records = make_watched_run(tmp_path, frozen_rounds())
    run = Run(tmp_path)
    run.refresh()
    panels = make_panels(run.facts)
    expected = [(step + 1, records[step].metrics["vendi"]) for step in range(3)]
    assert panels["diversity/vendi"] == {"diversity/vendi": expected}
    assert panels["diversity/log10_p"]["diversity/log10_p"][2] == (3, records[2].log10_p)
    assert all(name.startswith("diversity/") for name in panels)
    assert [chart["title"] for chart in overview_values(run)["charts"]] == [*panels]


def test_the_mean_of_the_last_steps() -> None:
    assert mean_of_last([(step, float(step)) for step in range(1, 41)]) == 30.5
    assert mean_of_last([]) is None


def test_what_was_logged(tmp_path: Path) -> None:
    """A resumed session replaces the steps that it repeats. Broken lines and values that are no
    number are left out. Parts below 2% of a step have no curve."""
    path = add_logs(tmp_path, 1.0, 1.0, 1.0)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 1.0, "global\n')
    add_logs(tmp_path, 8.0, 2.0)
    panels = make_panels(Run(tmp_path).facts)
    seconds = panels.pop("seconds")
    assert panels == {
        "reward": {
            "reward": [(1, 0.25), (2, 0.5)],
            "rewards/Format/mean": [(1, 1.0), (2, 1.0)],
            "eval_reward": [(1, 0.5), (2, 0.5), (3, 0.5)],
        },
        "length": {"completions/mean_length": [(1, 3.0), (2, 3.0)]},
        "loss": {"loss": [(1, 0.0), (2, 0.0)]},
        "grad_norm": {"grad_norm": [(1, 0.125), (2, 0.25)]},
        "memory": {"memory/wake": [(1, 40.0)], "memory/loss": [(1, 64.0), (2, 64.0)]},
    }
    parts = ["rollout", "wake", "send", "generate", "batch", "logps", "loss"]
    assert list(seconds) == ["step", *(f"time/{part}" for part in parts)]
    assert seconds["step"] == [(2, pytest.approx(2.0))]  # the first step is left out
    assert seconds["time/generate"] == [(2, pytest.approx(0.6))]


def collapsed(step: int) -> list[SampleRow]:
    """Return a round with four equal samples whose surprisal makes that likely."""
    return group_of(*[[1, step]] * 4, step=step, bits=0.01)


def test_alarms_in_a_row_are_one(tmp_path: Path) -> None:
    """Rounds before an alarm's third round are not shaded, as they are not logged. Spans count
    steps done."""
    rounds = [collapsed(step) for step in range(6)]
    rounds[4] = group_of([1], [2], [3], [4], step=4)
    rounds += [group_of(*[list(range(60))] * 2, step=step) for step in (6, 7)]
    rounds.insert(0, group_of(*[list(range(90))] * 2, phase="eval", prompt="other"))
    records = make_watched_run(tmp_path, rounds)
    shown = [
        (rounds[0].round.phase, rounds[0].verdict, [record.steps_done for record in rounds])
        for rounds in alarm_streaks(records)
    ]
    assert shown == [
        ("train", "collapse", [3, 4]), ("train", "broken", [7, 8]), ("eval", "broken", [0])
    ]  # fmt: skip
    records = [record for record in records if record.round.phase == "train"]
    logged = [record.steps_done for record in records if record.scalars()["diversity/collapse"]]
    assert logged == [3, 4]
    run = Run(tmp_path)
    run.refresh()
    text = render([run], 0, "overview", {})
    for part in (
        *("train 3–4: ", "repeat another of their group", "train 7–8: ", "样本共用了随机噪声"),
        *("set --rollout_seed_mode sample", "the first 60 tokens", "eval 0: "),
    ):
        assert part in text
    verdicts = [overall_verdict(records[:end]) for end in (0, 1, 3, 8)]
    assert verdicts == ["none", "healthy", "collapse", "broken"]  # one odd round is no alarm


def test_the_worst_groups_of_alarms(tmp_path: Path) -> None:
    """Each round with an alarm has its worst group, with the samples that share most tokens."""
    rounds = [group_of([9], [8], [7], [6], step=step) for step in range(2)]
    rounds += [collapsed(step) for step in (2, 3)]
    rounds.append(group_of([5], *[[1, 2, 3]] * 79, step=4, bits=0.01))
    make_watched_run(tmp_path, rounds)
    add_tokenizer(tmp_path)
    run = Run(tmp_path)
    run.refresh()
    [group] = worst_groups(run)  # other groups caused no alarm
    assert group["first"]["round"] == "train.4.0"
    assert [turns[0]["index"] for turns in group["samples"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(turns[0]["spans"][0].is_shared for turns in group["samples"])
    shutil.rmtree(tmp_path / "samples")  # the bound on the record's size removes the oldest rounds
    lost = Run(tmp_path)
    lost.refresh()
    assert worst_groups(lost) == []
