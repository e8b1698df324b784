"""The page in headless Chromium: filters, sorting, keys, a run that goes on, hostile text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from swift_grpo_ext.tools.view.offline import write_page
from tests.tools.view.chrome import Chrome, needs_browser
from tests.tools.view.runs import HOSTILE, Writer, make_rows, make_run

pytestmark = needs_browser
ROWS = "ol.samples li"
VIEW = (
    "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main(['view', *sys.argv[1:]]))"
)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with Chrome(tmp_path_factory.mktemp("profile"), "--lang=en-US") as chrome:
        chrome.resize(1280, 900)
        yield chrome


class Served:
    """Two runs behind one server."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, other = make_run(folder / "one"), make_run(folder / "two", num_rounds=2)
        command = [sys.executable, "-c", VIEW, str(self.run_dir), str(other), "--port", "0"]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.writer = Writer(self.run_dir, session=1, start_step=3)
        self.num_rounds = 3

    def write_round(self, text: str) -> None:
        rows = make_rows(self.num_rounds)
        self.writer.write([replace(row, text=text) for row in rows])
        self.num_rounds += 1


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("runs"))
    yield served
    served.process.terminate()
    served.process.wait()
    assert served.process.stdout is not None
    served.process.stdout.close()


@pytest.fixture
def page(chrome: Chrome, served: Served) -> Iterator[Chrome]:
    chrome.call("Page.navigate", url="about:blank")
    chrome.problems.clear()
    chrome.open(served.url)
    chrome.until(f"document.querySelectorAll('{ROWS}').length >= 12")
    yield chrome
    assert chrome.problems == []


def test_filter_and_sort(page: Chrome) -> None:
    page.fill("#search", "i1 s2")
    page.until("document.querySelector('#count').innerText.startsWith('2 of')")
    assert all("i1 s2" in text for text in page.texts(ROWS))
    page.click("#clear")
    page.until("document.querySelector('#search').value === ''")
    page.fill("select[name=sort]", "reward")
    page.until("location.hash.includes('sort=reward')")
    page.click("input[name=descending]")
    page.until(f"document.querySelector('{ROWS} .reward b').innerText === '1'")
    rewards = [float(text) for text in page.texts(f"{ROWS} .reward b")]
    assert rewards == sorted(rewards, reverse=True)
    page.fill("#search", "(")
    page.click("input[name=regex]")
    page.until("document.querySelector('[role=alert]')")
    assert "no regular expression" in page.texts("[role=alert]")[0]


def test_a_group_by_keys(page: Chrome) -> None:
    page.run("document.body.focus()")
    page.key("d")  # the most different group
    page.until("document.querySelectorAll('.completion').length >= 2")
    assert "Group 1" in page.texts("h1")[0]
    assert page.texts("#replay")[0].startswith("swift-grpo-ext replay ")
    page.until("document.querySelector('.images img').naturalWidth === 56")
    page.key("p")
    page.until("document.querySelector('h1').innerText.includes('Group 0')")
    assert "Question 0?" in page.texts(".prompt")[0]
    page.key("2")
    page.until("document.querySelectorAll('ol.groups li').length === 2")
    page.key("j")
    page.run("document.activeElement.click()")
    page.until("document.querySelector('.completion')")


def test_values_of_curves_by_keys(page: Chrome) -> None:
    page.key("3")
    page.until("document.querySelector('[data-panel=loss]')")
    page.run("document.querySelector('[data-panel=loss]').focus()")
    read = "document.querySelector('[data-panel=loss]').parentElement.querySelector('output')"
    page.key("Home")
    assert page.run(f"{read}.innerText") == "step 1: one loss 0.5000 · two loss 0.5000"
    page.key("ArrowRight")
    page.key("ArrowRight")
    assert page.run(f"{read}.innerText") == "step 3: one loss 0.1667"


def test_a_run_that_goes_on_and_hostile_text(page: Chrome, served: Served) -> None:
    before = page.texts("#count")[0]
    served.write_round(HOSTILE)
    page.until(f"document.querySelector('{ROWS} .text').innerText.includes('onerror')")
    assert page.texts("#count")[0] != before
    page.click(f"{ROWS} a")
    page.until("document.querySelector('.completion')")
    assert "<script>" in page.texts(".completion .tokens")[0]
    assert page.run("window.stolen") is None
    assert page.run("document.querySelectorAll('main script, main img[src=x]').length") == 0


def test_languages_themes_and_phones(page: Chrome) -> None:
    theme = page.run("document.documentElement.dataset.theme")
    page.click("#theme")
    assert {theme, page.run("document.documentElement.dataset.theme")} == {"light", "dark"}
    page.click("#language")
    page.until("document.documentElement.lang === 'zh'")
    assert page.texts("nav a") == ["样本", "轮次", "曲线"]
    page.resize(390, 844, phone=True)
    for name, found in (("samples", ROWS), ("rounds", "ol.groups"), ("curves", ".panels figure")):
        page.run(f"location.hash = '#{name}'")
        page.until(f"document.querySelector('{found}')")
        assert page.run("document.documentElement.scrollWidth - innerWidth") <= 0, name
    page.resize(1280, 900)
    page.click("#language")


OVERFLOWING = """[...document.querySelectorAll("header, main, header *, main *")].filter(e => {
  if (e.closest("svg, select") || e.matches("input, br")) return false;
  const box = e.getBoundingClientRect(), around = e.parentElement.getBoundingClientRect();
  return e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline"
    || box.right > around.right + 1 || box.left < around.left - 1;
}).map(e => `${e.localName}.${e.className} of ${e.parentElement.className}`)"""
"""Elements whose content is wider than they are, or which stick out of what they are in."""


@pytest.fixture(scope="module")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of texts that are long: English, Chinese, without a space."""
    run_dir = make_run(tmp_path_factory.mktemp("runs") / f"{'run-' * 12}of-{'long' * 12}")
    Image.new("RGB", (2400, 60)).save(run_dir / "images/wide.png")
    texts = "All work and no play. " * 30, "这是一个很长的回答，里面没有空格。" * 20, "x" * 600
    rows = [
        replace(
            row,
            text=texts[row.sample_id.index % 3],
            prompt=json.dumps([{"role": "user", "content": texts[row.sample_id.group % 3]}]),
            stop_reason=f"</{'answer' * 20}>",
            media=[f"{run_dir}/images/wide.png", f"{'folder' * 40}/{'图' * 60}.png"],
            replica="server 12 " + "replica" * 20,
        )
        for row in make_rows(3, num_groups=9)
    ]
    writer = Writer(run_dir, session=1, start_step=3)
    writer.write(rows, scored=False)
    names = [
        "Accuracy",
        "the_share_of_" + "answers_that_agree_" * 6,
        "回答与参考答案一致的比例" * 5,
    ]
    writer.score(rows, reward=-1234.5678, rewards=[(name, 0.333333) for name in names])
    return write_page([run_dir], run_dir / "page.html", num_groups=20).as_uri()


@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_nothing_runs_over_its_box(width: int, wordy: str, chrome: Chrome) -> None:
    chrome.resize(width, 900)
    chrome.open(wordy)
    pages = {
        "samples": ROWS, "rounds": "ol.groups li", "curves": ".panels figure",
        "group?round=train.3.0&group=1&index=0": ".completion",
    }  # fmt: skip
    for language in ("en", "zh"):
        while chrome.run("document.documentElement.lang") != language:
            chrome.click("#language")
        for page, found in pages.items():
            chrome.run(f"location.hash = '#{page}'")
            chrome.until(f"document.querySelector('{found}')")
            where = (page, language, width)
            assert chrome.run("document.documentElement.scrollWidth") <= width, where
            assert chrome.run(OVERFLOWING) == [], where
    chrome.click("#language")
    chrome.resize(1280, 900)


def test_tokens_are_coloured_by_their_own_gap(chrome: Chrome, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    words = {f"w{number}": number for number in range(8)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    (run_dir / "checkpoint-1").mkdir()
    tokenizer.save(str(run_dir / "checkpoint-1/tokenizer.json"))
    chrome.open(write_page([run_dir], tmp_path / "page.html").as_uri())
    chrome.run("location.hash = '#group?run=0&round=train.1.0&group=1'")
    chrome.click("input[name=colour][value=gap]")
    depths = "[...document.querySelector('.tokens').children].map(e => e.style.cssText)"
    assert chrome.run(depths) == [f"--depth: {gap:.3f};" for gap in (0, 0.25, 0)]
    chrome.run("document.querySelector('.tokens').children[1].click()")
    assert chrome.texts("#token")[0].endswith("gap 0.250 nats")


def test_a_saved_page(chrome: Chrome, tmp_path: Path) -> None:
    """The same page from a file, without a server; filters work on what it holds."""
    run_dir = make_run(tmp_path / "run")
    Writer(run_dir, session=1, start_step=3).write(
        [replace(row, text=f"{HOSTILE}</script>") for row in make_rows(3)]
    )
    page = write_page([run_dir], tmp_path / "page.html", num_groups=6)
    shutil.rmtree(run_dir)
    chrome.problems.clear()
    chrome.open(page.as_uri())
    chrome.until(f"document.querySelectorAll('{ROWS}').length >= 10")
    chrome.until("document.querySelector('ol.samples img').naturalWidth === 56")
    chrome.fill("#search", "i1")
    chrome.until(f"document.querySelectorAll('{ROWS}').length < 10")
    assert all("i1" in text for text in chrome.texts(f"{ROWS} .text"))
    chrome.click("#clear")
    chrome.until("document.querySelector('#search').value === ''")
    chrome.click("#different")
    chrome.until("document.querySelector('.completion')")
    assert chrome.texts("h1") == ["Round train.3.0 · Group 1"]  # of equals, the newest
    chrome.run("location.hash = '#curves'")
    chrome.until("document.querySelector('[data-panel=loss]')")
    assert chrome.run("window.stolen") is None
    assert chrome.run("performance.getEntriesByType('resource').length") == 0
    assert chrome.problems == []
