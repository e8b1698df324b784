"""The HTML of pages: words, numbers, and the saved page."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view.pages import (
    HERE,
    groups_values,
    number,
    render,
    word,
    words,
    write_page,
)
from swift_grpo_ext.tools.view.runs import Run
from tests.rig.diversity.runs import frozen_rounds
from tests.rig.diversity.runs import make_run as make_watched_run
from tests.rig.view.runs import (
    HOSTILE,
    Writer,
    add_tokenizer,
    make_rows,
    make_run,
)


class Page(HTMLParser):
    """Lists the tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_saved_page_is_whole_and_safe(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    rows = [replace(row, text=f"{HOSTILE}</script>") for row in make_rows(3)]
    rows = [replace(r, media=["https://example.com/8.png"], fingerprint="new") for r in rows]
    Writer(run_dir, session=1, start_step=3).write(rows)
    path = write_page([run_dir], tmp_path / "page.html", 8)
    text = path.read_text(encoding="utf-8")
    tags = Page(text).tags
    assert [tag for tag, _ in tags].count("script") == 1
    loaded = {values.get("src") for tag, values in tags if tag != "a"}
    loaded |= {values["href"] for tag, values in tags if tag == "link"}
    loaded = {address.partition(",")[0] for address in loaded if address is not None}
    assert loaded == {"data:", "", "data:image/png;base64"}  # the URL is named, not fetched
    assert not any("srcset" in values for _, values in tags)
    ids = {values["id"] for _, values in tags if "id" in values}
    assert {"overview", "groups", "group-train.3.0-1"} <= ids
    assert {f"{values['href']}"[1:] for tag, values in tags if tag == "a"} <= ids
    assert "8.png" in text


def test_a_saved_page_of_a_run_with_frozen_noise(tmp_path: Path) -> None:
    make_watched_run(tmp_path, frozen_rounds())
    text = write_page([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'class="verdict broken"' in text
    overview = text.partition('id="overview"')[2].partition("</main>")[0]
    assert overview.count('<rect class="broken" x="290.7" width="121.3"') == overview.count("<svg")
    assert overview.count("<article") == 4
    assert 'id="group-train.2.0-0"' in text


def test_tokens_carry_their_values(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", 1)
    add_tokenizer(run_dir)
    text = write_page([run_dir], tmp_path / "page.html").read_text(encoding="utf-8")
    assert '<i class="shared" style="--p:0.10" title="-0.500">w7</i>' in text
    assert '<i style="--p:0.20" title="-1.000"> w1</i>' in text
    assert '<i class="shared" style="--p:0.05;--g:0.25" title="-0.250 ± 0.250"> w1</i>' in text


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No samples yet. The first appear when a round"):
        write_page([tmp_path], tmp_path / "page.html")
    run = Run(tmp_path)
    run.refresh()
    for page in ("samples", "groups", "overview"):
        text = render([run], 0, page, {})
        assert f'<p><span lang="en">No {"step" if page == "overview" else "samples"} yet. ' in text
        assert "No monitor" not in text


def test_a_folder_that_is_not_there_yet_is_followed_into_its_version(tmp_path: Path) -> None:
    run = Run(tmp_path / "new")
    run.refresh()
    assert not run.facts.has_begun
    made = make_run(tmp_path / "new/v0-20261128-093000")
    run.refresh()
    assert (run.run_dir, run.facts.num_rows) == (made, 12)


def test_a_prompt_stands_once_above_its_samples(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path))
    run.refresh()
    page = render([run], 0, "samples", {"min_step": "1", "max_step": "1"})
    assert page.count("Question 1?") == 1
    assert page.count('class="sample"') == 4
    assert page.count('<b class="chip" style="--share:1.00">1</b>') == 1
    assert '<span id="count">0 / 12</span>' in render([run], 0, "samples", {"text": "nowhere"})


def test_rounds_lead_to_their_neighbours(tmp_path: Path) -> None:
    make_run(tmp_path)
    run = Run(tmp_path)
    run.refresh()
    first, second, third = (RoundId("train", step, 0) for step in range(3))
    rounds = {
        "0": ([], first, [second]),
        "1": ([first], second, [third]),
        "2": ([second], third, []),
    }
    for step, beside in rounds.items():
        assert groups_values(run, {"round": f"train.{step}.0"})["rounds"] == beside
    assert groups_values(run, {})["rounds"] == rounds["2"]  # the newest is the first
    text = render([run], 0, "groups", {"round": "train.1.0"})
    assert {"round=train.0.0", "round=train.2.0"} <= {*re.findall(r'href="groups\?(.*?)"', text)}


def test_all_words_are_there_in_both_languages() -> None:
    """Each key in a template has words, and all words are used and exist in Chinese."""
    chinese = re.compile(r"[一-鿿]")
    assert {k for k, (_, text) in words().items() if not chinese.search(text)} == {"language"}
    texts = [path.read_text(encoding="utf-8") for path in (HERE / "templates").iterdir()]
    keys = {key for text in texts for key in re.findall(r'"(\w+)"', text)}
    own = json.loads((HERE / "words.json").read_text(encoding="utf-8"))
    by_value = re.compile("panel_.*|summary_.*|by_.*|overview|samples|groups|runs|none")
    assert {key for key in own if not by_value.fullmatch(key)} - keys == set()
    named = {key for text in texts for key in re.findall(r'\bt\("(\w+)"[,)]', text)}
    assert named - set(words()) == set()
    assert str(word("step")) == '<span lang="en">Step</span><span lang="zh">步</span>'


def test_numbers() -> None:
    values = [None, 0, 12345.0, -0.5, 0.00051, math.inf, 2**62, "stop", 1 / 3]
    expected = ["–", "0", "12,345", "-0.5", "0.00051", "inf", str(2**62), "stop", "0.3333"]
    assert [number(v) for v in values] == expected
