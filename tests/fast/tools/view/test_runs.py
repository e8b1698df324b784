"""A run is read while it goes on; filters, orders and groups; the pages' words, numbers and links
(V2)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view import pages, runs
from swift_grpo_ext.tools.view.pages import render, write_page
from swift_grpo_ext.tools.view.runs import Run, find_samples, list_groups
from tests.rig.view.runs import Writer, add_logs, make_rows, make_run, open_run, score


def rewards_of(run: Run) -> list[float | None]:
    query = 'select reward from scored order by step, "group", "index", turn'
    return [row["reward"] for row in run.record.rows(query)]


def test_a_run_is_followed_from_before_its_first_round(tmp_path: Path) -> None:
    """The folder may be empty when it is opened; its training makes a version in it."""
    run = open_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No samples yet. The first appear when a round"):
        write_page([tmp_path], tmp_path / "page.html")
    for page in ("samples", "groups", "overview"):
        text = render([run], 0, page, {})
        assert f'<p><span lang="en">No {"step" if page == "overview" else "samples"} yet. ' in text
        assert "No monitor" not in text
    assert (run.record.is_whole, run.facts.num_rows, run.facts.rounds) == (True, 0, [])
    folder = tmp_path / "v0-20261128-093000"
    writer = Writer(folder)
    writer.write(make_rows(0))
    run.refresh()
    assert (run.run_dir, run.facts.num_rows) == (folder, 4)
    known = run.facts
    run.refresh()
    assert run.facts is known  # nothing is new
    rows = make_rows(1)
    writer.write(rows, scored=False)
    run.refresh()
    assert rewards_of(run) == [0, 0, 0, 1] + [None] * 4
    assert list_groups(run, RoundId("train", 1, 0))[0]["reward"] is None
    [fate] = run.record.rows("select distinct fate from scored where reward is null")
    assert fate == {"fate": "generated"}
    writer.score(rows)
    run.refresh()
    assert rewards_of(run) == [0, 0, 0, 1] * 2


def test_rounds_come_newest_first_and_a_resumed_session_supersedes(tmp_path: Path) -> None:
    run, read = Run(make_run(tmp_path)), []
    while not run.record.is_whole:  # what is read is shown meanwhile: samples, then scores
        run.refresh(seconds=0)
        read.append([name.step for name in run.facts.rounds])
    assert read == [[*range(3, step - 1, -1)] for step in (3, 3, 2, 2, 1, 1, 0, 0)]
    assert [*run.facts.ranges][-2:] == ["reward.Accuracy", "reward.Format"]
    Writer(tmp_path, session=1, start_step=1).write(make_rows(1, num_groups=1))
    run.refresh()
    assert run.facts.rounds == [("train", step, 0) for step in (1, 0)]
    assert len(rewards_of(run)) == 4 + 2


def test_a_log_ends_and_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert (run.facts.step, run.facts.max_steps, run.facts.updated) == (0, 0, "")
    path = add_logs(tmp_path, 9.0, 2.0, 4.0)
    facts = run.facts
    assert (facts.has_ended, facts.step, facts.max_steps) == (True, 3, 100)
    assert facts.updated > "2026"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 0.0, "global_step/max_steps": "4/100"}\n{"loss": 1')
    # The run was resumed, and a line is being written.
    assert (run.facts.has_ended, run.facts.step) == (False, 4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"min_step": "1", "min_reward": "0.5", "max_step": "1"}, "1.1.1"),
        ({"max_step": "0", "max_reward": "0.5"}, "0.0.0 0.0.1 0.1.0"),
        ({"min_step": "2", "truncated": "false"}, "3.0.0 3.1.0 2.0.0 2.1.0"),
        ({"finish_reason": "length", "max_step": "2"}, "1.0.0"),
        ({"text": "G1 I0"}, "3.1.0 2.1.0 1.1.0 0.1.0"),
        ({"text": "a.c"}, "2.1.1"),
        ({"text": "question 1", "where": "prompt", "max_step": "0"}, "0.1.0 0.1.1"),
        ({"text": '"s1', "where": "columns", "max_step": "0"}, "0.1.0 0.1.1"),
        ({"min_reward.Accuracy": "1", "max_step": "1", "max_reward.Format": "1"}, "1.1.1 0.1.1"),
        ({"max_step": "0", "sort": "-reward.Accuracy"}, "0.1.1 0.0.0 0.0.1 0.1.0"),
        ({"max_step": "1", "text": "i1", "sort": "-reward"}, "1.1.1 0.1.1 1.0.1 0.0.1"),
        ({"min_step": "2", "max_step": "2", "sort": "reward"}, "2.0.0 2.0.1 2.1.0 2.1.1"),
        ({"text": "第二轮"}, "3.0.1 3.1.1"),
    ],
)
def test_filters_and_orders(run: Run, values: dict[str, str], expected: str) -> None:
    """Step, group and index of the samples that match, in order."""
    count, samples = find_samples(run, values)
    assert [f"{s['step']}.{s['group']}.{s['index']}" for s in samples] == expected.split()
    assert count == len(samples)
    assert find_samples(run, {**values, "offset": "1"}, 1) == (count, samples[1:2])


def test_a_sample_as_a_list_shows_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_TEXT", 5)
    _, [sample] = find_samples(run, {"finish_reason": "length", "max_step": "1"})
    assert sample["seed"] == 2**62 + 100
    assert sample["rewards"] == {"Accuracy": 0.0, "Format": 1.0}
    assert (sample["round"], len(sample["media"])) == ("train.1.0", 1)
    assert (sample["text"], sample["question"]) == ("g0 i0", "<image>Question 0?")
    assert sample["columns"] == {"solution": "s0"}
    assert run.facts.menus["finish_reason"] == {"stop": 17, "length": 3}
    assert run.facts.menus["truncated"] == {"false": 8, "true": 7}
    assert run.facts.menus["stop_reason"] == {}


def test_groups_of_a_round(run: Run) -> None:
    _, scored = list_groups(run, RoundId("train", 1, 0))
    expected = {
        **{"round": "train.1.0", "group": 1, "index": 0, "question": "<image>Question 1?"},
        **{"columns": {"solution": "s1"}, "media": [str(run.run_dir / "images/1.png")]},
        **{"samples": 2, "num_texts": 2, "rewards": [0.0, 1.0], "reward": 0.5, "spread": 0.5},
    }
    assert {name: scored[name] for name in expected} == expected
    _, partly_scored = list_groups(run, RoundId("train", 2, 0))
    assert (partly_scored["rewards"], partly_scored["spread"]) == ([0.0, None], 0.0)
    _, conversations = list_groups(run, RoundId("train", 3, 0))  # each counts once
    assert (conversations["samples"], conversations["num_texts"]) == (2, 2)
    assert (conversations["rewards"], conversations["reward"]) == ([0.0, 1.0], 0.5)


def test_names_of_functions_are_text(tmp_path: Path) -> None:
    names = ["it's", 'a "name"', "准确", "a]b"]
    rows, writer = make_rows(0), Writer(tmp_path)
    writer.write(rows, scored=False)
    rewards = [(name, 0.5) for name in names]
    writer.append_scores([replace(score(row, 1.0), rewards=rewards) for row in rows])
    run = open_run(tmp_path)
    for name in names:
        assert find_samples(run, {f"min_reward.{name}": "0.5", "sort": f"reward.{name}"})[0] == 4


# --- pages ---


def test_a_saved_page_is_whole(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    rows = [
        replace(r, media=["https://example.com/8.png"], fingerprint="new") for r in make_rows(4)
    ]
    Writer(run_dir, session=1, start_step=4).write(rows)
    text = write_page([run_dir], tmp_path / "page.html", 10).read_text(encoding="utf-8")
    loaded = {
        address.partition(",")[0]
        for address in re.findall(r'<[^a][^>]*(?:src|href)="([^"]*)', text)
    }
    assert loaded == {"data:", "", "data:image/png;base64"}  # no URL
    assert "8.png" in text
    assert text.count("<script") == 1  # hostile text is text
    ids = {*re.findall(r'\bid="([^"]+)"', text)}
    assert {"overview", "groups", "group-train.4.0-1"} <= ids
    assert {*re.findall(r'<a [^>]*href="#([^"]+)"', text)} <= ids


def test_a_prompt_stands_once_above_its_samples(run: Run) -> None:
    page = render([run], 0, "samples", {"min_step": "1", "max_step": "1"})
    assert page.count("Question 1?") == 1
    assert page.count('class="sample"') == 4
    assert page.count('<b class="chip" style="--share:1.00">1</b>') == 1
    page = render([run], 0, "samples", {"text": "nowhere"})
    assert '<span id="count">0 / 20</span>' in page


def test_rounds_lead_to_their_neighbours(run: Run) -> None:
    names = [RoundId("train", step, 0) for step in range(4)]
    rounds = {
        "0": ([], names[0], [names[1]]),
        "1": ([names[0]], names[1], [names[2]]),
        "3": ([names[2]], names[3], []),
    }
    for step, beside in rounds.items():
        assert pages.groups_values(run, {"round": f"train.{step}.0"})["rounds"] == beside
    assert pages.groups_values(run, {})["rounds"] == rounds["3"]  # the newest is the first
    text = render([run], 0, "groups", {"round": "train.1.0"})
    assert {"round=train.0.0", "round=train.2.0"} <= {*re.findall(r'href="groups\?(.*?)"', text)}


def test_all_words_are_there_in_both_languages() -> None:
    """Each key in a template has words, and all words are used and exist in Chinese."""
    chinese = re.compile(r"[一-鿿]")
    assert {k for k, (_, text) in pages.words().items() if not chinese.search(text)} == {"language"}
    texts = [path.read_text(encoding="utf-8") for path in (pages.HERE / "templates").iterdir()]
    keys = {key for text in texts for key in re.findall(r'"(\w+)"', text)}
    own = json.loads((pages.HERE / "words.json").read_text(encoding="utf-8"))
    by_value = re.compile("panel_.*|summary_.*|by_.*|overview|samples|groups|runs|none")
    assert {key for key in own if not by_value.fullmatch(key)} - keys == set()
    named = {key for text in texts for key in re.findall(r'\bt\("(\w+)"[,)]', text)}
    assert named - set(pages.words()) == set()
    assert str(pages.word("step")) == '<span lang="en">Step</span><span lang="zh">步</span>'


def test_numbers() -> None:
    values = [None, 0, 12345.0, -0.5, 0.00051, math.inf, 2**62, "stop", 1 / 3]
    expected = ["–", "0", "12,345", "-0.5", "0.00051", "inf", str(2**62), "stop", "0.3333"]
    assert [pages.number(v) for v in values] == expected
