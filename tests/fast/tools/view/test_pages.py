"""The HTML of pages: words, numbers, links, and the saved page (V2)."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view import pages
from swift_grpo_ext.tools.view.runs import Run
from tests.rig.view.runs import Writer, make_rows, make_run


def test_a_saved_page_is_whole(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    rows = [
        replace(r, media=["https://example.com/8.png"], fingerprint="new") for r in make_rows(4)
    ]
    Writer(run_dir, session=1, start_step=4).write(rows)
    text = pages.write_page([run_dir], tmp_path / "page.html", 10).read_text(encoding="utf-8")
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
    page = pages.render([run], 0, "samples", {"min_step": "1", "max_step": "1"})
    assert page.count("Question 1?") == 1
    assert page.count('class="sample"') == 4
    assert page.count('<b class="chip" style="--share:1.00">1</b>') == 1
    page = pages.render([run], 0, "samples", {"text": "nowhere"})
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
    text = pages.render([run], 0, "groups", {"round": "train.1.0"})
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
