"""The report of a run: one page that opens offline, its words, curves and groups."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from swift_grpo_ext.diversity.alarms import read_words
from swift_grpo_ext.diversity.record import read_records
from swift_grpo_ext.tools.view import charts
from swift_grpo_ext.tools.view.charts import read_log, thin
from swift_grpo_ext.tools.view.report import (
    alarm_spans,
    overall_verdict,
    thumbnails,
    worst_groups,
    write_report,
)
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


class Reader(HTMLParser):
    """What someone reads who chose a language: text, and the tags that are open around it."""

    VOID = ("meta", "img", "br", "line", "path", "use")

    def __init__(self, page: str, language: str) -> None:
        super().__init__()
        self.language = language
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.parts: list[str] = []
        self.cards_before_charts = 0
        self.images: list[str | None] = []
        self.folded: list[str] = []
        self.has_charts = False
        self.feed(page)
        self.text = " ".join("".join(self.parts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.has_charts |= tag == "svg"
        self.cards_before_charts += not self.has_charts and "card" in (values.get("class") or "")
        if tag == "img":
            self.images.append(values.get("alt"))
        if tag not in self.VOID:
            self.open.append((tag, values))

    def handle_endtag(self, tag: str) -> None:
        if tag in [name for name, _ in self.open]:
            while self.open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self.open]
        languages = [
            values["lang"] for tag, values in self.open if tag == "span" if "lang" in values
        ]
        if {"style", "script", "title"} & set(tags) or set(languages) - {self.language}:
            return
        self.parts.append(data)
        if "details" in tags and "summary" not in tags:
            self.folded.append(data)


def test_page_is_whole_offline_and_safe(tmp_path: Path, picture: Path) -> None:
    run = tmp_path / "run"
    make_run(run, frozen_rounds(), media=[str(picture), "https://example.com/8.png"])
    page, png = write_report(run, tmp_path / "out")
    text = page.read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.addresses
    assert all(address.startswith("data:image/jpeg") for address in parsed.addresses)
    assert not re.search(r"url\((?!#)", text)  # within the page only
    assert "@import" not in text
    assert parsed.tags.count("script") == 1  # ours: none of a completion's
    assert "&lt;script&gt;alert(&#39;数字&#39;)" in text
    assert page.stat().st_size < 1_000_000
    with Image.open(png) as image:
        assert image.width > 800
    assert "https://example.com/8.png" in text  # named, not fetched


def test_page_says_what_happened(page: str) -> None:
    assert 'class="card verdict broken"' in page
    assert page.count("-broken-0") == len(charts_in(page))  # shaded in each
    assert 'class="completion earlier"' in page
    assert "<b>train round 0.0</b>" in page
    assert re.search(r"train 2\.0</td>", page)


def charts_in(text: str) -> list[ElementTree.Element]:
    """The charts, which must be well-formed."""
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_charts_share_one_axis_of_steps(page: str) -> None:
    """The steps 1 and 3 lie at the same places in all charts."""
    found, places = charts_in(page), []
    assert found[0].get("data-panel") == "reward"
    for svg in found:
        ticks = {
            text.text: text.get("x") or text.get("transform")
            for group in svg.iter("{http://www.w3.org/2000/svg}g")
            if (group.get("id") or "").startswith("xtick")
            for text in group.iter("{http://www.w3.org/2000/svg}text")
        }
        assert {"1", "3"} <= set(ticks)
        places.append(ticks)
    assert all(ticks == places[0] for ticks in places)


def test_all_words_are_there_in_both_languages() -> None:
    words = read_words()
    assert all(len(pair) == 2 and all(pair) for pair in words.values())
    chinese = re.compile(r"[一-鿿]")
    exempt = {"language", "of", "log10_p"}
    same = "curve_(vendi|self_bleu|distinct_.|pass_at_.*|-log10 p)$"
    exempt |= {key for key in words if re.match(same, key)}
    assert all(chinese.search(pair[1]) for key, pair in words.items() if key not in exempt)


def test_equal_completions_stand_once(tmp_path: Path) -> None:
    records = make_run(tmp_path, [group_of([1], [1], [1], [2], text="seven")])
    (group,), problem = worst_groups(tmp_path, records)
    assert problem == ""
    assert [len(c.rows) for c in group.completions] == [3, 1]
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
    assert read_words()["summary_none"][1] in text
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
    """Rounds that patience waited for belong to their collapse; spans are in steps done."""
    rounds = [group_of(*[[1, s]] * 4, step=s, bits=0.01) for s in range(5)]
    rounds[3] = group_of([1], [2], [3], [4], step=3)
    rounds += [group_of(*[list(range(60))] * 2, step=s) for s in (5, 6)]
    records = make_run(tmp_path, rounds)
    assert [bool(r.alarm) for r in records] == [False, True, True, False, False, True, True]
    spans = [(s.kind, s.first, s.last) for s in alarm_spans(records)]
    assert spans == [("collapse", 1, 3), ("broken", 6, 7)]


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
    assert len(thinned) == charts.MAX_POINTS
    assert thinned[0][0] == pytest.approx(9.5)
    assert {y for _, y in thinned} == {0.5}
    assert thin(points[:7]) == points[:7]


def test_bad_images_are_named(tmp_path: Path, picture: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    images, names = thumbnails([str(picture), str(bad), "gone.png", "x" * 5000, "a\0b"])
    assert len(images) == 1
    assert names == [str(bad), "gone.png", "x" * 5000, "a\0b"]


# --- what readers stumbled over ---


@pytest.fixture(scope="module")
def collapsed_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run that collapses for 19 rounds, with 2 rounds' patience, and then breaks."""
    folder = tmp_path_factory.mktemp("run")
    rounds = [group_of(*[[1, s]] * 4, step=s, bits=0.01) for s in range(19)]
    rounds += [group_of(*[list(range(60))] * 2, step=19)]
    make_run(folder, rounds)
    return write_report(folder)[0].read_text(encoding="utf-8")


def test_an_alarm_counts_its_rounds_once(collapsed_page: str) -> None:
    text = Reader(collapsed_page, "en").text
    assert "collapsed policy train round 0.0 to 18.0 (19 rounds):" in text
    assert "in a row" not in text


def test_an_alarm_names_its_kind_once(collapsed_page: str) -> None:
    text = Reader(collapsed_page, "en").text
    assert "broken randomness train round 19.0: samples share noise" in text
    assert "broken randomness broken randomness" not in text


def test_the_remedy_comes_before_the_list_of_samples(page: str) -> None:
    reader = Reader(page, "en")
    alarm = reader.text.partition("samples share noise")[2]
    assert alarm.index("Remedy: set --rollout_seed_mode sample") < 40
    assert "are those of train round 0.0" in " ".join(reader.folded)
    assert "Remedy" not in " ".join(reader.folded)


def test_alarms_and_legends_are_chinese_on_the_chinese_page(collapsed_page: str) -> None:
    text = Reader(collapsed_page, "zh").text
    for words in ("样本共用了随机噪声", "本可不同的样本中有", "办法：", "唯一比例", "组内相似度"):
        assert words in text
    for words in ("samples", "Remedy", "unique ratio", "rounds", "repeat"):
        assert words not in text
    english = Reader(collapsed_page, "en").text
    assert not re.search(r"[一-鿿]", english.replace("中文", ""))


def test_alarms_are_shaded_once_a_streak(collapsed_page: str) -> None:
    ids = [e.get("id") or "" for svg in charts_in(collapsed_page)[:1] for e in svg.iter()]
    assert [i for i in ids if i.startswith("reward-")] == ["reward-collapse-0", "reward-broken-1"]


def test_a_healthy_page_folds_its_groups(tmp_path: Path) -> None:
    make_run(tmp_path, [group_of([1], [1], [1], [2], text="seven")])
    reader = Reader(write_report(tmp_path)[0].read_text(encoding="utf-8"), "en")
    assert "seven" in reader.folded
    assert reader.text.count("seven") == reader.folded.count("seven")


def test_charts_begin_high_on_the_page(page: str) -> None:
    """Before them: the verdict and the alarms."""
    assert Reader(page, "en").cards_before_charts == 3  # with the first chart's own


def test_the_page_has_a_main_part_and_named_images(tmp_path: Path, picture: Path) -> None:
    make_run(tmp_path, frozen_rounds(), media=[str(picture)])
    page = write_report(tmp_path)[0].read_text(encoding="utf-8")
    assert page.count("<main>") == page.count("</main>") == 1
    images = Reader(page, "en").images
    assert images
    assert set(images) == {"prompt: seven.png"}


# --- damaged files ---


def test_damaged_lines_are_named_and_the_others_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = make_run(tmp_path, frozen_rounds())
    for name in ("diversity.jsonl", "logging.jsonl"):
        path = tmp_path / name
        lines = path.read_bytes().splitlines(keepends=True)
        spoilt = [b"\xff\xfe\n", b"[1]\n", b"{}}\n", b'{"start_step": "x"}\n', b'{"phase": 1}\n']
        spoilt += [lines[1].replace(b'"step": ', b'"step": 0.5, "x": ')]
        path.write_bytes(b"".join([lines[0], *spoilt, *lines[1:], lines[-1][:9]]))
    assert read_records(tmp_path) == records
    [message] = caplog.messages
    assert message == (
        f"{tmp_path / 'diversity.jsonl'}: the lines 2, 3, 4, 5, 6 and 2 more are damaged or "
        "incomplete, and are left out."
    )
    caplog.clear()
    assert len(write_report(tmp_path)) == 2
    log = tmp_path / "logging.jsonl"
    assert (
        f"{log}: the lines 2, 3, 4, 10 are damaged or incomplete, and are left out." in caplog.text
    )


def test_a_report_of_a_damaged_sample_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_run(tmp_path, frozen_rounds())
    [path] = (tmp_path / "samples").iterdir()
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)
    assert len(write_report(tmp_path)) == 2
    assert f"{path} is damaged in its first bytes" in caplog.text
