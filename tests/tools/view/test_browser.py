"""The pages in headless Chromium: filters, keys, a run that goes on, hostile text, phones."""

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

from swift_grpo_ext.tools.view.pages import write_page
from tests.tools.view.chrome import Chrome, needs_browser
from tests.tools.view.runs import HOSTILE, Writer, add_tokenizer, make_rows, make_run

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


def test_filters_and_groups(page: Chrome) -> None:
    page.fill("input[name=text]", "i1 s2")
    page.until("document.querySelector('#count').innerText.startsWith('2 of')")
    assert all("i1 s2" in text for text in page.texts(ROWS))
    page.click("summary")
    page.fill("select[name=phase]", "train")
    page.until("location.search.includes('phase=train')")
    assert "in_prompt" not in page.run("location.search")
    page.until("document.querySelector('details').open")
    page.key("2")
    page.until("document.querySelectorAll('ol.groups li').length >= 2")
    page.click("ol.groups li:nth-child(2) a")
    page.until("document.querySelectorAll('.completion').length >= 2")
    assert "Group 1" in page.texts("h1")[0]
    page.until("document.querySelector('.images img').naturalWidth === 56")
    page.key("p")
    page.until("document.querySelector('h1').innerText.includes('Group 0')")
    assert "Question 0?" in page.texts(".prompt")[0]


def test_values_of_curves(page: Chrome) -> None:
    page.key("3")
    page.until("document.querySelector('[data-panel=length]')")
    page.run("""(svg => { const box = svg.getBoundingClientRect(); svg.dispatchEvent(
        new PointerEvent('pointermove', {clientX: box.left + box.width / 2})) })(
        document.querySelector('[data-panel=length] svg'))""")
    assert page.texts("[data-panel=length] output") == ["2 · one length 3 · two length 3"]


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


OVERFLOWING = """[...document.querySelectorAll("header, main, header *, main *")].filter(e => {
  if (e.closest("svg, select") || e.matches("input, br")) return false;
  if (!e.getClientRects().length) return false;  // the other language, another section
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
            fingerprint=f"new {row.sample_id.group}",
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
        "overview-0": ".panels figure", "groups-0": "ol.groups li",
        "group-0-train.3.0-1": ".completion",
    }  # fmt: skip
    for language in ("en", "zh"):
        while chrome.run("document.documentElement.lang") != language:
            chrome.click("#language")
        for page, found in pages.items():
            chrome.run(f"location.hash = '#{page}'")
            chrome.until(f"document.querySelector('main:target {found}')")
            where = (page, language, width)
            assert chrome.run("document.documentElement.scrollWidth") <= width, where
            assert chrome.run(OVERFLOWING) == [], where
    chrome.click("#language")
    chrome.resize(1280, 900)


def test_lists_fit_a_phone(page: Chrome) -> None:
    page.resize(400, 844, phone=True)
    page.click("#language")
    for key, found in (("1", ROWS), ("2", "ol.groups li")):
        page.key(key)
        page.until(f"document.querySelector('{found}')")
        assert page.run("document.documentElement.scrollWidth") <= 400
        assert page.texts("nav a[data-key]") == ["样本", "组", "概览"]
        assert page.run(OVERFLOWING) == []
    page.click("#language")
    page.resize(1280, 900)


def test_a_saved_page(chrome: Chrome, tmp_path: Path) -> None:
    """The page opens from a file, without a server and without the run."""
    run_dir = make_run(tmp_path / "run")
    add_tokenizer(run_dir)
    rows = [replace(row, text=f"{HOSTILE}</script>") for row in make_rows(3)]
    Writer(run_dir, session=1, start_step=3).write(rows)
    page = write_page([run_dir], tmp_path / "page.html", num_groups=6)
    shutil.rmtree(run_dir)
    chrome.problems.clear()
    chrome.open(page.as_uri())
    chrome.until("document.querySelector('main:target .verdict')")
    chrome.key("2")
    images = "[...document.querySelectorAll('main:target ol.groups img')]"
    chrome.until(f"{images}.some(image => image.naturalWidth === 56)")
    chrome.click("main:target ol.groups a")
    chrome.until("document.querySelector('main:target .tokens')")
    token = "getComputedStyle(document.querySelector('main:target .tokens').children[1])"
    by_logprob = chrome.run(f"{token}.backgroundColor")
    chrome.click("main:target .by-gap")
    by_gap = chrome.run(f"{token}.backgroundColor")
    assert by_gap.startswith("rgba(150, 40, 160,")
    assert by_logprob != by_gap
    assert chrome.run("window.stolen") is None
    assert chrome.run("performance.getEntriesByType('resource').length") == 0
    assert chrome.problems == []
