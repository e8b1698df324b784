"""Several runs side by side, and two of them paired."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from swift_grpo_ext.tools.diff import differing_settings
from swift_grpo_ext.tools.view.pages import write_page
from swift_grpo_ext.tools.view.runs import Run
from swift_grpo_ext.tools.view.server import make_app
from swift_grpo_ext.tools.view.several import pair_values, runs_values
from tests.tools.view.runs import Writer, add_logs, make_rows, score

A_AND_B = {"b": "1"}


def make_pair(folder: Path) -> list[Run]:
    """Two runs of three and two steps, the second with another text and other rewards in step 1;
    group 2 has the same rewards in both."""
    runs = []
    for number, num_steps in enumerate((3, 2)):
        run_dir = folder / f"run-{number}" / "v0"
        run_dir.mkdir(parents=True)
        writer = Writer(run_dir)
        for step in range(num_steps):
            rows = make_rows(step, num_groups=3)
            if number and step:
                rows[3] = replace(rows[3], text="else")
            writer.write(rows, scored=False)
            own = 1.0 * number * step
            scores = [score(row, 0.5 if row.sample_id.group == 2 else own) for row in rows]
            writer.append_scores(scores)
        settings = {"seed": number, "output_dir": str(run_dir), **({"new": 1} if number else {})}
        (run_dir / "args.json").write_text(json.dumps(settings))
        add_logs(run_dir, *[1.0] * num_steps)
        runs.append(Run(run_dir))
        runs[-1].refresh()
    return runs


def test_runs_side_by_side(tmp_path: Path) -> None:
    values = runs_values(make_pair(tmp_path))
    names = [f"{tmp_path}/run-{number}/v0" for number in range(2)]
    assert [row["name"] for row in values["rows"]] == names
    assert [(row["step"], row["samples"]) for row in values["rows"]] == [(3, 18), (2, 12)]
    assert [row["reward"] for row in values["rows"]] == pytest.approx([1 / 6, 0.5])
    assert values["settings"] == {"seed": (0, 1)}  # one run alone has the setting `new`


def test_settings_that_a_run_lacks_differ() -> None:
    assert differing_settings({"a": 1, "b": 2}, {"a": 1}, {"a": 1, "b": 2}) == {"b": (2, None, 2)}
    assert differing_settings({"a": 1}, {}) == {}


def test_a_pair(tmp_path: Path) -> None:
    runs = make_pair(tmp_path)
    values = pair_values(runs, A_AND_B)
    assert values["diff"].num_samples == 9
    assert values["diff"].difference.what == "text"
    assert values["parted"].endswith('text is "g1 i1 s1" in A and "else" in B')
    assert values["problem"] == ""
    assert values["comparison"].difference == pytest.approx(1 / 3)
    assert [prompt["means"] for prompt in values["prompts"]] == [(0.0, 0.5), (0.0, 0.5)]
    first = values["prompts"][0]
    assert [sample["question"] for sample in first["samples"]] == ["<image>Question 0?"] * 2
    assert [sample["round"] for sample in first["samples"]] == ["train.2.0", "train.1.0"]
    (tmp_path / "empty").mkdir()
    values = pair_values([runs[0], Run(tmp_path / "empty")], A_AND_B)
    assert "no round in common" in values["problem"]
    assert "prompts" not in values


def test_pages_of_several_runs(tmp_path: Path) -> None:
    runs = make_pair(tmp_path)
    with TestClient(make_app(runs, "T0ken"), base_url="http://127.0.0.1/T0ken/") as client:
        start = client.get("")
        assert start.url == client.get("runs").url
        pair = client.get("pair?b=1")
        assert "B - A +0.333 [" in pair.text
        assert "2 of the 3 prompts that both runs met: those whose mean" in pair.text
        assert "train round 1.0, group 1, sample 1: " in pair.text
        [(number, link)] = set(re.findall(r'href="(1)/(group\?[^"]*group=0)"', pair.text))
        group = client.get(f"{number}/{link.replace('&amp;', '&')}")
        assert group.status_code == 200
        assert 'href="../runs"' in group.text
        assert client.get("pair?b=7").status_code == 404
        assert client.get("state").text.count(" ") == 3
    text = write_page([run.run_dir for run in runs], tmp_path / "page.html").read_text()
    assert 'id="runs"' in text
    assert "B - A +0.333 [" in text
    links = {*re.findall('href="(.*?)"', text.partition("<main")[2])}
    assert links == {"#pair"}
