"""The report of a run: one page that opens offline, its words, curves and groups."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from swift_grpo_ext.diversity import charts, series
from swift_grpo_ext.diversity.aligned import common, thumbnails, worst_groups
from swift_grpo_ext.diversity.report import alarm_streaks, overall_verdict, read_words, write_report
from swift_grpo_ext.diversity.series import read_log, thin
from tests.diversity.runs import frozen_rounds, make_run
from tests.diversity.samples import group_of


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with frozen noise."""
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, frozen_rounds())
    return write_report(folder)[0].read_text(encoding="utf-8")


class Page(HTMLParser):
    """Every tag that is opened, and every address that is fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "data")]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "seven.png"
    Image.new("RGBA", (640, 320), "red").save(path)
    return path


def test_page_is_whole_offline_and_safe(tmp_path: Path, picture: Path) -> None:
    run = tmp_path / "run"
    make_run(run, frozen_rounds(), media=[str(picture), "https://example.com/8.png"])
    page, png = write_report(run, tmp_path / "out")
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.addresses
    assert all(address.startswith("data:image/jpeg") for address in parsed.addresses)
    assert "url(" not in text
    assert "@import" not in text
    assert parsed.tags.count("script") == 1  # ours: none of a completion's
    assert "&lt;script&gt;alert(&#39;数字&#39;)" in text
    assert page.stat().st_size < 1_000_000
    with Image.open(png) as image:
        assert image.width > 800
    assert "https://example.com/8.png" in text  # named, not fetched


def test_page_says_what_happened(page: str) -> None:
    assert 'class="card verdict broken"' in page
    assert "broken randomness in train round 2.0" in page
    assert page.count('class="mark broken"') == len(charts_in(page))
    assert 'class="completion earlier"' in page
    assert "<b>train round 0.0</b>" in page
    assert re.search(r"train 2\.0</td>", page)


def charts_in(text: str) -> list[ElementTree.Element]:
    """The charts, which must be well-formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]


def test_charts_share_one_axis_of_time(page: str) -> None:
    found = charts_in(page)
    assert found[0].get("data-panel") == "reward"
    assert {(svg.get("data-first"), svg.get("data-last")) for svg in found} == {("1", "3")}
    for svg in found:
        for line in svg.iter("polyline"):
            places = [tuple(map(float, p.split(","))) for p in (line.get("points") or "").split()]
            assert all(0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in places)


def test_all_words_are_there_in_both_languages(page: str) -> None:
    words = read_words()
    assert set(re.findall(r'data-t="(\w+)"', page)) <= set(words)
    assert all(len(pair) == 2 and all(pair) for pair in words.values())
    chinese = re.compile(r"[一-鿿]")
    exempt = {"title", "language", "of", "col_log10_p", "col_vendi"}
    assert all(chinese.search(pair[1]) for key, pair in words.items() if key not in exempt)


def test_equal_completions_stand_once(tmp_path: Path) -> None:
    records = make_run(tmp_path, [group_of([1], [1], [1], [2], text="seven")])
    (group,), problem = worst_groups(tmp_path, records)
    assert problem == ""
    assert [len(c.samples) for c in group.completions] == [3, 1]
    assert group.completions[0].shared == "seven"
    assert group.prompt == "user: <image>Which digit?"


def test_a_run_without_samples_says_so(tmp_path: Path) -> None:
    records = make_run(tmp_path, [group_of([1], [1])])
    for path in (tmp_path / "samples").iterdir():
        path.unlink()
    groups, problem = worst_groups(tmp_path, records)
    assert groups == []
    assert "holds no group 0" in problem
    assert problem in write_report(tmp_path)[0].read_text(encoding="utf-8").replace("&#39;", "'")


def test_a_run_without_monitor_shows_its_rewards(tmp_path: Path) -> None:
    make_run(tmp_path, frozen_rounds())
    (tmp_path / "diversity.jsonl").unlink()
    text = write_report(tmp_path)[0].read_text(encoding="utf-8")
    assert 'data-t="summary_none"' in text
    assert 'data-panel="reward"' in text


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--callbacks diversity"):
        write_report(tmp_path)


def test_verdict_of_a_run(tmp_path: Path) -> None:
    collapsed = [group_of(*[[1, s]] * 4, step=s, bits=0.01) for s in range(3)]
    records = make_run(tmp_path, collapsed)
    assert overall_verdict(records) == "collapse"
    assert overall_verdict(records[:1]) == "healthy"  # one odd round is no alarm
    assert overall_verdict([]) == "none"


def test_alarms_in_a_row_are_one(tmp_path: Path) -> None:
    rounds = [group_of(*[[1, s]] * 4, step=s, bits=0.01) for s in range(5)]
    rounds[3] = group_of([1], [2], [3], [4], step=3)
    rounds += [group_of(*[list(range(60))] * 2, step=s) for s in (5, 6)]
    found = alarm_streaks(make_run(tmp_path, rounds))
    assert [(a["kind"], a["rounds"]) for a in found] == [("collapse", 2), ("broken", 2)]
    assert found[0]["text"].startswith("collapsed policy, 3 rounds in a row to train round 2.0")
    assert found[1]["text"].startswith("broken randomness in train round 5.0")


def test_log_of_a_resumed_run(tmp_path: Path) -> None:
    """The steps that it took again count as the second time."""
    taken = [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.7)]
    lines = [{"loss": 0, "reward": r, "global_step/max_steps": f"{s}/9"} for s, r in taken]
    text = "\n".join([*map(json.dumps, lines), '{"eval_loss": 1}', '{"loss": 0, "re'])
    (tmp_path / "logging.jsonl").write_text(text)
    assert [(row["step"], row["reward"]) for row in read_log(tmp_path)] == [(1, 0.1), (2, 0.7)]


def test_long_runs_stay_small(tmp_path: Path) -> None:
    points = [(float(i), float(i % 2)) for i in range(10_000)]
    thinned = thin(points)
    assert len(thinned) == series.MAX_POINTS
    assert thinned[0][0] == pytest.approx(9.5)
    assert {y for _, y in thinned} == {0.5}
    assert thin(points[:7]) == points[:7]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1]), (0, 10, [0, 5, 10]), (1, 3, [1, 1.5, 2, 2.5, 3]), (-3, 0, [-3, -1, 0])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    found = charts.ticks(low, high)
    assert set(expected) <= set(found)
    assert len(found) <= 7
    assert all(tick == int(tick) for tick in charts.ticks(low, high, whole=True))


@pytest.mark.parametrize(("a", "b", "length"), [("", "a", 0), ("ab", "ac", 1), ("ab", "abc", 2)])
def test_common_beginnings(a: str, b: str, length: int) -> None:
    assert common(a, b) == length


def test_bad_images_are_named(tmp_path: Path, picture: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    images, names = thumbnails([str(picture), str(bad), "gone.png", "x" * 5000, "a\0b"])
    assert len(images) == 1
    assert names == [str(bad), "gone.png", "x" * 5000, "a\0b"]
