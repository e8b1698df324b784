"""The report in a real browser: sorting, languages, themes, reading values off the curves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.tools.view.report import write_report
from tests.diversity.runs import frozen_rounds, make_run
from tests.diversity.samples import group_of

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")

DRIVE = """
<script>
const seen = {};
const rows = () => [...document.querySelectorAll("#rounds tbody tr")];
const column = (i) => rows().map((row) => row.cells[i].innerText);
const text = () => document.querySelector("main h2").innerText;
seen.problems = [];
addEventListener("error", (e) => seen.problems.push(e.message));
seen.language = [document.documentElement.lang, text()];
document.getElementById("language").click();
seen.other = [document.documentElement.lang, text()];
seen.rounds = column(0);
const head = document.querySelectorAll("#rounds th button")[2];
head.click(); seen.ascending = column(2);
head.click(); seen.descending = column(2);
const svg = document.querySelector("svg[data-panel=collision]"), box = svg.getBoundingClientRect();
const cursor = svg.querySelector(".cursor");
seen.cursor = [getComputedStyle(cursor).display];
const at = {clientX: box.left + box.width * 0.97, clientY: box.top + 20};
svg.dispatchEvent(new PointerEvent("pointermove", at));
seen.cursor.push(getComputedStyle(cursor).display);
seen.value = svg.parentElement.querySelector("output").innerText;
seen.first_chart = document.querySelector("svg").getBoundingClientRect().top;
seen.wide = document.documentElement.scrollWidth - innerWidth;
const theme = document.documentElement.dataset.theme;
document.getElementById("theme").click();
seen.themes = [theme, document.documentElement.dataset.theme];
document.body.dataset.seen = JSON.stringify(seen);
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, frozen_rounds())
    return write_report(folder)[0]


def browse(page: Path, *argv: str) -> str:
    """What the browser prints."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1280,900", *argv]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120,
                          check=True)  # fmt: skip
    return done.stdout


def drive(page: Path, *argv: str) -> dict[str, Any]:
    driven = page.with_name("driven.html")
    text = page.read_text(encoding="utf-8").replace("</body>", DRIVE + "</body>")
    driven.write_text(text, encoding="utf-8")
    found = re.search(r'data-seen="([^"]*)"', browse(driven, "--dump-dom", *argv))
    assert found, "the page's script failed"
    seen: dict[str, Any] = json.loads(unescape(found[1]))
    return seen


def test_page_works(page: Path) -> None:
    seen = drive(page, "--lang=en-US")
    assert seen["problems"] == []
    assert seen["language"] == ["en", "Alarms"]
    assert seen["other"] == ["zh", "告警"]
    assert seen["rounds"] == ["train 0.0", "train 1.0", "train 2.0"]
    numbers = [float(value) for value in seen["ascending"]]
    assert numbers == sorted(numbers)
    assert seen["descending"] == seen["ascending"][::-1]
    assert seen["cursor"] == ["none", "inline"]
    assert float(seen["value"]) == pytest.approx(-numbers[0], rel=1e-3)
    assert seen["wide"] <= 0
    assert sorted(seen["themes"]) == ["dark", "light"]


def test_phones_see_a_chart_on_the_first_screen(tmp_path: Path) -> None:
    """A sound run on 500 x 900 CSS pixels, the least width of a window; nothing is cut off."""
    make_run(tmp_path, [group_of([1], [2], [3], step=step) for step in range(3)])
    seen = drive(write_report(tmp_path)[0], "--lang=en-US", "--window-size=500,900")
    assert seen["first_chart"] < 600
    assert seen["wide"] <= 0


def test_light_and_dark(page: Path, tmp_path: Path) -> None:
    """The page follows what the system prefers."""
    corners = []
    for scheme in ("1", "0"):  # Blink's names for light and dark
        shot = tmp_path / f"{scheme}.png"
        browse(page, f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}")
        with Image.open(shot) as image:
            corners.append(image.convert("L").getpixel((3, 3)))
    light, dark = corners
    assert light > 230
    assert dark < 50
