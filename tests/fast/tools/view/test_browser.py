"""Pages in headless Chromium: filters, curves, a run that goes on, and hostile text (V2)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rig.record.rows import open_log
from tests.rig.view.chrome import BROWSER, Chrome, open_chrome
from tests.rig.view.runs import HOSTILE, add_logs, make_rows, make_run, write

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")
ROWS = ".sample"
VIEW = (
    "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main(['view', *sys.argv[1:]]))"
)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with open_chrome(tmp_path_factory.mktemp("profile")) as chrome:
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


def test_filters_languages_images_and_curves(page: Chrome, url: str) -> None:
    page.run("document.querySelector('input[name=text]').value = 'i1 s1'")
    page.run("document.querySelector('select[name=phase]').value = 'train'")
    page.click("form button")
    page.until("document.querySelector('#count').innerText.startsWith('2 /')")
    assert all("i1 s1" in text for text in page.texts(ROWS))
    page.until("document.querySelector('details').open")  # it has the filter of phases
    assert {"reward ↓", "stop (17)"} <= {*page.texts("option")}
    page.click("#language")
    assert page.texts("nav a") == ["概览", "样本", "组"]
    page.click("#language")
    assert page.texts("nav a") == ["Overview", "Samples", "Groups"]
    page.open(f"{url}0/groups?round=train.1.0")
    page.click(".groups a:nth-child(2)")
    page.until("document.querySelector('.prompt img')?.naturalWidth === 56")
    page.open(f"{url}0/overview")
    page.until("document.querySelector('[data-panel=grad_norm] polyline')")
    assert page.texts("[data-panel=grad_norm] figcaption") == ["Gradient norm\n0.375"]
    colours = "[...document.querySelectorAll('[data-panel=reward] polyline')]"
    assert page.run(f"{colours}.map(e => getComputedStyle(e).stroke)") == [
        *("rgb(0, 114, 178)", "rgb(196, 78, 0)", "rgb(0, 128, 93)"),
    ]


def test_a_run_that_goes_on_and_hostile_text(page: Chrome, run_dir: Path) -> None:
    rows = [replace(row, text=HOSTILE) for row in make_rows(4)]
    write(open_log(run_dir, session=1, start_step=4), rows)
    page.until("document.querySelector('#count').innerText === '24 / 24'")
    assert "onerror" in page.texts(f"{ROWS} .text")[0]
    page.click(ROWS)
    page.until("document.querySelector('article')")
    assert "<script>" in page.texts(".tokens")[0]
    assert page.run("window.stolen") is None
    assert page.run("document.querySelectorAll('main script, main img[src=x]').length") == 0
