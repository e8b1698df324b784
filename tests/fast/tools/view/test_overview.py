"""The overview shows curves, verdict, alarms and worst groups (D5), of one run or several."""

import json
import shutil
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from starlette.testclient import TestClient

from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.tools.diff import differing_settings
from swift_grpo_ext.tools.view import overview
from swift_grpo_ext.tools.view.pages import render, write_page
from swift_grpo_ext.tools.view.runs import Run
from swift_grpo_ext.tools.view.server import make_app
from tests.rig.diversity.samples import frozen_rounds, group_of
from tests.rig.diversity.samples import make_run as make_watched_run
from tests.rig.record.rows import open_log
from tests.rig.view.runs import add_logs, add_tokenizer, make_rows, open_run, write

# --- curves ---


def test_what_was_logged(tmp_path: Path) -> None:
    """A resumed session replaces the steps that it repeats. Broken lines and values that are no
    number are left out. Parts below 2% of a step have no curve."""
    path = add_logs(tmp_path, 1.0, 1.0, 1.0)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 1.0, "global\n')
    add_logs(tmp_path, 8.0, 2.0)
    panels = overview.make_panels(Run(tmp_path).facts)
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
    parts = ["rollout", "batch", "logps", "loss", "wake", "send", "generate"]
    assert list(seconds) == ["step", *(f"time/{part}" for part in parts)]
    assert seconds["step"] == [(2, pytest.approx(2.0))]  # the first step is left out
    assert seconds["time/generate"] == [(2, pytest.approx(0.6))]


def test_a_chart() -> None:
    """Curves of unequal lengths share an axis with round numbers. An alarm is shaded, and a single
    point is a dot."""
    curves = {"reward": [(1, 0.0), (9, 1.0)], "eval_reward": [(5, 0.5)]}
    alarm = MagicMock(verdict="broken", steps_done=9)
    [chart, short] = overview.draw({"reward": curves, "loss": {"loss": [(9, 0.0)]}}, [[alarm]])
    reward, evaluated = chart["curves"]
    assert reward == {"name": "reward", "line": "68.2,172.2 391.8,15.8", "last": 1.0}
    assert evaluated["line"] == "230.0,94.0 230.0,94.0"
    assert chart["value_ticks"] == [(0.0, 172.2), (0.5, 94.0), (1.0, 15.8)]
    assert chart["step_ticks"] == short["step_ticks"] == [(5.0, 230.0)]
    assert chart["bands"] == short["bands"] == [("broken", 371.6, 412)]
    for low, high, expected in ((-3e-6, 5e-6, [-2e-6, 0, 2e-6, 4e-6]), (1, 9, [2, 4, 6, 8])):
        assert overview.ticks(low, high) == pytest.approx(expected)
    for value in (0.0, -2.0, 1e-9, 1e12):  # a level curve stands in the middle
        [chart] = overview.draw({"loss": {"loss": [(3, value), (4, value)]}})
        assert chart["curves"][0]["line"] == "139.0,94.0 321.0,94.0"


# --- the monitor ---


def test_frozen_noise(tmp_path: Path) -> None:
    records = make_watched_run(tmp_path, frozen_rounds())
    run = open_run(tmp_path)
    panels = overview.make_panels(run.facts)
    expected = [(step + 1, records[step].metrics["vendi"]) for step in range(3)]
    assert panels["diversity/vendi"] == {"diversity/vendi": expected}
    assert panels["diversity/log10_p"]["diversity/log10_p"][2] == (3, records[2].log10_p)
    assert all(name.startswith("diversity/") for name in panels)
    assert [chart["title"] for chart in overview.overview_values(run)["charts"]] == [*panels]
    text = write_page([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'class="verdict broken"' in text
    shown = text.partition('id="overview"')[2].partition("</main>")[0]
    assert shown.count('<rect class="broken" x="290.7" width="121.3"') == shown.count("<svg")
    assert shown.count("<article") == 4
    assert 'id="group-train.2.0-0"' in text


def collapsed(step: int) -> list[SampleRow]:
    """Return four equal samples whose surprisal makes that likely."""
    return group_of(*[[1, step]] * 4, step=step, bits=0.01)


def test_alarms_in_a_row_are_one(tmp_path: Path) -> None:
    """Rounds before an alarm's third round are not shaded, as they are not logged. Spans count
    steps done."""
    rounds = [collapsed(step) for step in range(6)]
    rounds[4] = group_of([1], [2], [3], [4], step=4)
    rounds += [group_of(*[list(range(60))] * 2, step=step) for step in (6, 7)]
    rounds.insert(0, group_of(*[list(range(90))] * 2, phase="eval", prompt="other"))
    records = make_watched_run(tmp_path, rounds)
    streaks = overview.alarm_streaks(records)
    assert [[record.steps_done for record in streak] for streak in streaks] == [[3, 4], [7, 8], [0]]
    records = [record for record in records if record.round.phase == "train"]
    text = render([open_run(tmp_path)], 0, "overview", {})
    for part in (
        *("train 3–4: ", "repeat another of their group", "train 7–8: ", "样本共用了随机噪声"),
        *("set --rollout_seed_mode sample", "the first 60 tokens", "eval 0: "),
    ):
        assert part in text
    verdicts = [overview.overall_verdict(records[:end]) for end in (0, 1, 3, 8)]
    assert verdicts == ["none", "healthy", "collapse", "broken"]  # one odd round is no alarm


def test_the_worst_groups_of_alarms(tmp_path: Path) -> None:
    """Each round with an alarm has its worst group, with the samples that share most tokens."""
    rounds = [group_of([9], [8], [7], [6], step=step) for step in range(2)]
    rounds += [collapsed(step) for step in (2, 3)]
    rounds.append(group_of([5], *[[1, 2, 3]] * 79, step=4, bits=0.01))
    make_watched_run(tmp_path, rounds)
    add_tokenizer(tmp_path)
    [group] = overview.worst_groups(open_run(tmp_path))  # other groups caused no alarm
    assert group["first"]["round"] == "train.4.0"
    assert [turns[0]["index"] for turns in group["samples"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(turns[0]["spans"][0].is_shared for turns in group["samples"])
    shutil.rmtree(tmp_path / "samples")  # the bound on the record's size removes the oldest rounds
    assert overview.worst_groups(open_run(tmp_path)) == []


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    runs = []
    for number, num_steps in enumerate((3, 2)):
        write(open_log(folder := tmp_path / f"run-{number}"), make_rows(0))
        settings = {"seed": number, "output_dir": str(folder)}
        (folder / "args.json").write_text(json.dumps(settings))
        add_logs(folder, *[1.0] * num_steps)
        runs.append(open_run(folder))
    values = overview.runs_values(runs)
    assert [row[0].facts.step for row in values["rows"]] == [3, 2]
    assert [row[1] for row in values["rows"]] == [0.5, 0.375]
    assert values["settings"] == {"seed": (0, 1)}
    [chart] = overview.runs_values([Run(tmp_path), *runs])["charts"]  # one has no rewards yet
    assert [curve["name"] for curve in chart["curves"]] == [str(run.run_dir) for run in runs]
    with TestClient(make_app(runs, "T0ken"), base_url="http://127.0.0.1/T0ken/") as client:
        start = client.get("")
        assert start.url == client.get("runs").url
        assert f"swift-grpo-ext diff {runs[0].run_dir} {runs[1].run_dir}<" in start.text
        assert 'href="1/overview"' in start.text
        assert 'href="../runs"' in client.get("1/overview").text
        assert client.get("2/overview").status_code == 404
        assert client.get("state").text == " ".join(client.get(f"{n}/state").text for n in (0, 1))
    text = write_page([run.run_dir for run in runs], tmp_path / "page.html").read_text()
    assert str(runs[1].run_dir) in text.partition('id="runs"')[2]
    assert 'href="' not in text.partition("<main")[2]
    # A setting that a run lacks differs; a run without any says nothing.
    assert differing_settings({"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}) == {"b": (2, None, 2)}
    assert differing_settings({"a": 1}, {}) == {}
