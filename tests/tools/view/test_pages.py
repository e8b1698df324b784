"""Pages as HTML: the words, numbers, and the page that is saved."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.pages import (
    HERE,
    groups_values,
    number,
    overview_values,
    pair,
    render,
    samples_values,
    word,
    words,
    write_page,
)
from tests.diversity.runs import frozen_rounds
from tests.diversity.runs import make_run as make_watched_run
from tests.tools.view.runs import (
    HOSTILE,
    Writer,
    add_logs,
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
    path = write_page([run_dir], tmp_path / "page.html", 6)
    text = path.read_text(encoding="utf-8")
    tags = Page(text).tags
    assert [tag for tag, _ in tags].count("script") == 2
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
    shaded = json.loads(text.partition("data-alarms='")[2].partition("'")[0])
    assert {(alarm["kind"], alarm["first_step"]) for alarm in shaded} == {("broken", 3)}
    assert "Sample 0" in text
    assert 'class="completion earlier"' in text


def test_the_overview_says_what_would_save_time(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    settings = {"use_vllm": True, "vllm_mode": "server", "multi_turn_scheduler": None}
    for is_asynchronous in (False, True):
        settings["async_generate"] = is_asynchronous
        (run_dir / "args.json").write_text(json.dumps(settings), encoding="utf-8")
        add_logs(run_dir, 9.0, 4.0)
        text = write_page([run_dir], tmp_path / "page.html").read_text(encoding="utf-8")
        panel = text.partition('data-panel="time"')[2].partition("</figure>")[0]
        assert panel.count('"name"') == 7
        assert "Step 1 took 9 s and is cut" in panel
        told = "time/rollout is 50% of a step"
        assert (told in text, "--async_generate" in text) == (not is_asynchronous,) * 2


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
    run = RunView(tmp_path)
    run.refresh()
    for page, values, told in (
        ("samples", samples_values(run, {}), "No samples yet. "),
        ("groups", groups_values(run, {}), "No samples yet. "),
        ("overview", overview_values(run), "No step yet. "),
    ):
        text = render(page, run, **values)
        assert f'<p><span lang="en">{told}' in text
        assert "waiting for the first step" in text
        assert "Nobody watches" not in text


def test_a_folder_that_is_not_there_yet_is_followed_into_its_version(tmp_path: Path) -> None:
    run = RunView(tmp_path / "new")
    run.refresh()
    assert run.log.state == "waiting"
    made = make_run(tmp_path / "new/v0-20261128-093000")
    run.refresh()
    assert (run.run_dir, run.facts.num_rows) == (made, 12)


def test_a_prompt_stands_once_above_its_samples(tmp_path: Path) -> None:
    run = RunView(make_run(tmp_path))
    run.refresh()
    page = render("samples", run, **samples_values(run, {"steps": "1"}))
    assert page.count("Question 1?") == 1
    assert "&lt;image&gt;" not in page
    assert page.count('<tr class="sample">') == 4
    assert page.count('<b class="chip" style="--share:1.00">1</b>') == 1
    page = render("samples", run, **samples_values(run, {"text": "nowhere"}))
    assert "No sample matches these filters." in page


def test_rounds_lead_to_their_neighbours(tmp_path: Path) -> None:
    make_run(tmp_path)
    run = RunView(tmp_path)
    run.refresh()
    names = groups_values(run, {})["names"]
    assert len(names) > 2
    for at, name in enumerate(names):  # the newest is the first
        values = groups_values(run, {"round": name})
        assert values["later"] == (names[at - 1] if at else None)
        assert values["earlier"] == next(iter(names[at + 1 :]), None)


def test_all_words_are_there_in_both_languages() -> None:
    """Each key that a template names has words, and each pair has Chinese in it."""
    chinese = re.compile(r"[一-鿿]")
    same = {"language", "completion", "prompt", "what_prompt", "of", "token", "unit_tokens"}
    same |= {"unit_nats", "unit_p"}
    assert {k for k, (_, text) in words().items() if not chinese.search(text)} == same
    texts = [path.read_text(encoding="utf-8") for path in (HERE / "templates").iterdir()]
    asked = {key for text in texts for key in re.findall(r'\bt\("(\w+)"\)', text)}
    assert asked - set(words()) == set()
    assert str(word("of")) == '<span lang="en">of</span><span lang="zh">/</span>'
    assert word("x") == "x"
    assert (pair("reward"), pair("reward.x")) == (["Reward", "奖励"], ["x", "x"])
    assert "3 s" in word("first_cut", step=1, seconds="3")


def test_numbers() -> None:
    values = [None, 0, 12345.0, -0.5, 0.00051, math.inf]
    assert [number(v) for v in values] == ["–", "0", "12,345", "-0.500", "5.1e-04", "inf"]
