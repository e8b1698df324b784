"""Pages in headless Chromium: filters, curves, a run that goes on, hostile text, small screens
(V2)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from swift_grpo_ext.tools.view.pages import write_page
from tests.rig.view.chrome import BROWSER, Chrome, open_chrome
from tests.rig.view.runs import HOSTILE, Writer, add_logs, add_tokenizer, make_rows, make_run

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
ROWS = ".sample"
VIEW = (
    "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main(['view', *sys.argv[1:]]))"
)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with open_chrome(tmp_path_factory.mktemp("profile")) as chrome:
        chrome.resize(1280)
        yield chrome


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to which tests append."""
    made = make_run(tmp_path_factory.mktemp("runs") / "one")
    add_logs(made, 1.0, 1.0, 1.0)
    return made


@pytest.fixture(scope="module")
def url(run_dir: Path) -> Iterator[str]:
    """Serve the run until Ctrl-C; return the address."""
    command = [sys.executable, "-c", VIEW, str(run_dir), "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


@pytest.fixture
def page(chrome: Chrome, url: str) -> Iterator[Chrome]:
    chrome.call("Page.navigate", url="about:blank")
    chrome.problems.clear()
    chrome.open(f"{url}0/samples")
    chrome.until(f"document.querySelectorAll('{ROWS}').length >= 20")
    yield chrome
    assert chrome.problems == []


def test_filters_groups_and_curves(page: Chrome) -> None:
    page.fill("input[name=text]", "i1 s1")
    page.click("form button")
    page.until("document.querySelector('#count').innerText.startsWith('2 /')")
    assert all("i1 s1" in text for text in page.texts(ROWS))
    page.click("summary")
    page.fill("select[name=phase]", "train")
    page.click("form button")
    page.until("location.search.includes('phase=train')")
    page.until("document.querySelector('details').open")
    assert {"reward ↓", "stop (17)"} <= {*page.texts("option")}
    page.click("#language")
    assert page.texts("nav a") == ["概览", "样本", "组"]
    page.click("#language")
    assert page.texts("nav a") == ["Overview", "Samples", "Groups"]
    page.click("nav a[href^=groups]")
    page.until("document.querySelectorAll('.groups a').length >= 2")
    page.fill("input[name=round]", "train.1.0")
    page.run("document.querySelector('form').requestSubmit()")
    page.until("document.querySelector('.groups a').innerText.includes('train.1.0')")
    page.click(".groups a:nth-child(2)")
    page.until("document.querySelectorAll('article').length >= 2")
    assert "Group 1" in page.texts("h2")[0]
    page.until("document.querySelector('.prompt img').naturalWidth === 56")
    page.click("h2 a[href$='group=0']")
    page.until("document.querySelector('h2').innerText.includes('Group 0')")
    assert "Question 0?" in page.texts(".messages")[0]
    page.click("nav a[href^=overview]")
    page.until("document.querySelector('[data-panel=grad_norm] polyline')")
    assert page.texts("[data-panel=grad_norm] figcaption") == ["Gradient norm\n0.375"]
    colours = "[...document.querySelectorAll('[data-panel=reward] polyline')]"
    assert page.run(f"{colours}.map(e => getComputedStyle(e).stroke)") == [
        *("rgb(0, 114, 178)", "rgb(196, 78, 0)", "rgb(0, 128, 93)"),
    ]


def test_a_run_that_goes_on_and_hostile_text(page: Chrome, run_dir: Path) -> None:
    rows = [replace(row, text=HOSTILE) for row in make_rows(4)]
    Writer(run_dir, session=1, start_step=4).write(rows)
    page.until("document.querySelector('#count').innerText === '24 / 24'")
    assert "onerror" in page.texts(f"{ROWS} .text")[0]
    page.click(ROWS)
    page.until("document.querySelector('article')")
    assert "<script>" in page.texts(".tokens")[0]
    assert page.run("window.stolen") is None
    assert page.run("document.querySelectorAll('main script, main img[src=x]').length") == 0


OVERFLOWING = """[...document.querySelectorAll("header, main, header *, main *")].filter(e => {
  if (e.closest("svg, select, .wide") || e.matches("input, br")) return false;
  if (!e.getClientRects().length) return false;  // hidden: the other language, another section
  const box = e.getBoundingClientRect(), around = e.parentElement.getBoundingClientRect();
  return e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline"
    || box.right > around.right + 1 || box.left < around.left - 1;
}).map(e => `${e.localName}.${e.className} of ${e.parentElement.className}`)"""
"""JavaScript: the elements that are narrower than their content, or stick out of their parent."""


def test_nothing_runs_over_its_box(page: Chrome, run_dir: Path, tmp_path: Path) -> None:
    """Long texts in English, in Chinese and without a space fit into lists and saved pages, on a
    telephone and on a wide screen."""
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
            fingerprint=f"long {row.sample_id.group}",
        )
        for row in make_rows(5, num_groups=9)
    ]
    functions = ["share_of_" + "answers_that_agree_" * 6, "回答与参考答案一致的比例" * 5]
    writer = Writer(run_dir, session=2, start_step=5)
    writer.write(rows, scored=False)
    writer.score(rows, reward=-1234.5678, rewards=[(name, 0.333333) for name in functions])
    page.until(f"document.querySelectorAll('{ROWS}').length >= 38")
    live = page.run("location.href").split("?")[0]
    saved = write_page([run_dir], tmp_path / "page.html", num_groups=20).as_uri()
    other = make_run(tmp_path / ("another_run_" * 9))
    both = write_page([run_dir, other], tmp_path / "both.html").as_uri()
    pages = {
        live: ROWS,
        live.replace("samples", "groups"): ".groups a",
        f"{saved}#overview": "main:target .panels figure",
        f"{saved}#group-train.5.0-1": "main:target article",
        f"{both}#runs": "main:target table",
    }
    for width in (400, 1920):
        page.resize(width)
        for url, found in pages.items():
            page.open(url)
            page.until(f"document.querySelector('{found}')")
            for language in ("en", "zh"):
                assert page.run("document.documentElement.lang") == language
                assert page.run("document.documentElement.scrollWidth") <= width, (url, language)
                assert page.run(OVERFLOWING) == [], (url, width, language)
                page.click("#language")
    page.resize(1280)


def test_a_saved_page(chrome: Chrome, tmp_path: Path) -> None:
    """The page opens from a file, without a server and without the run."""
    run_dir = make_run(tmp_path / "run")
    add_logs(run_dir, 1.0, 1.0)
    add_tokenizer(run_dir)
    page = write_page([run_dir], tmp_path / "page.html", num_groups=8)
    shutil.rmtree(run_dir)
    chrome.problems.clear()
    chrome.open(page.as_uri())
    chrome.until("document.querySelector('main:target polyline')")
    assert chrome.run("scrollY") == 0
    chrome.click("nav a[href='#groups']")
    images = "[...document.querySelectorAll('main:target .groups img')]"
    chrome.until(f"{images}.some(image => image.naturalWidth === 56)")
    chrome.click("main:target .groups a")
    chrome.until("document.querySelector('main:target .tokens')")
    token = "getComputedStyle(document.querySelector('main:target .tokens').children[1])"
    by_logprob = chrome.run(f"{token}.backgroundColor")
    chrome.click("main:target .by-gap")
    by_gap = chrome.run(f"{token}.backgroundColor")
    assert by_gap.startswith("rgba(150, 40, 160,")
    assert by_logprob != by_gap
    assert chrome.run("performance.getEntriesByType('resource').length") == 0
    assert chrome.problems == []
