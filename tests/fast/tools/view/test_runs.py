"""A run is read while it goes on; filters, orders and groups; a group's tokens, conversations and
images; the pages' words (V2)."""

import io
import json
import math
import os
import re
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, get_args

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.ExifTags import Base

from swift_grpo_ext.record.tables import SAMPLE_ID_COLUMNS, Fate
from swift_grpo_ext.sampling.seeding import PHASES, RoundId
from swift_grpo_ext.tools.view import pages, runs
from swift_grpo_ext.tools.view.group import (
    image_bytes,
    read_group,
    read_image,
    spans_of,
)
from swift_grpo_ext.tools.view.pages import render, write_page
from swift_grpo_ext.tools.view.runs import NotFoundError, Run, find_samples, list_groups
from tests.rig.record.rows import open_log, row_of, sample_id, score_of
from tests.rig.view.runs import (
    add_logs,
    add_tokenizer,
    make_conversations,
    make_rows,
    make_run,
    open_run,
    score,
    write,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = make_run(tmp_path_factory.mktemp("runs") / "a run")
    add_logs(folder, 1.0, 1.0, 1.0)
    add_tokenizer(folder)
    return open_run(folder)


def rewards_of(run: Run) -> list[float | None]:
    query = 'select reward from scored order by step, "group", "index", turn'
    return [row["reward"] for row in run.record.rows(query)]


def test_a_run_is_followed_from_before_its_first_round(tmp_path: Path) -> None:
    """The folder may be empty when it is opened; its training makes a version in it."""
    run = open_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No samples yet. The first appear when a round"):
        write_page([tmp_path], tmp_path / "page.html")
    for page in ("samples", "groups", "overview"):
        text = render([run], 0, page, {})
        assert f'<p><span lang="en">No {"step" if page == "overview" else "samples"} yet. ' in text
        assert "No monitor" not in text
    assert (run.record.is_whole, run.facts.num_rows, run.facts.rounds) == (True, 0, [])
    folder = tmp_path / "v0-20261128-093000"
    log = open_log(folder)
    write(log, make_rows(0))
    run.refresh()
    assert (run.run_dir, run.facts.num_rows) == (folder, 4)
    known = run.facts
    run.refresh()
    assert run.facts is known  # nothing is new
    rows = make_rows(1)
    write(log, rows, [])
    run.refresh()
    assert rewards_of(run) == [0, 0, 0, 1] + [None] * 4
    assert list_groups(run, RoundId("train", 1, 0))[0]["reward"] is None
    [fate] = run.record.rows("select distinct fate from scored where reward is null")
    assert fate == {"fate": "generated"}
    write(log, [], [*map(score, rows)])
    run.refresh()
    assert rewards_of(run) == [0, 0, 0, 1] * 2


def test_a_log_ends_and_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert (run.facts.step, run.facts.max_steps, run.facts.updated) == (0, 0, "")
    path = add_logs(tmp_path, 9.0, 2.0, 4.0)
    facts = run.facts
    assert (facts.has_ended, facts.step, facts.max_steps) == (True, 3, 100)
    assert facts.updated > "2026"
    with path.open("a", encoding="utf-8") as file:
        file.write('{"loss": 0.0, "global_step/max_steps": "4/100"}\n{"loss": 1')
    # The run was resumed, and a line is being written.
    assert (run.facts.has_ended, run.facts.step) == (False, 4)


def test_a_sample_as_a_list_shows_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_TEXT", 5)
    _, [sample] = find_samples(run, {"finish_reason": "length", "max_step": "1"})
    assert sample["seed"] == 2**62 + 100
    assert sample["rewards"] == {"Accuracy": 0.0, "Format": 1.0}
    assert (sample["round"], len(sample["media"])) == ("train.1.0", 1)
    assert (sample["text"], sample["question"]) == ("g0 i0", "<image>Question 0?")
    assert sample["columns"] == {"solution": "s0"}


# --- filters, orders and groups: the model is a list of rows in Python ---

Shown = dict[str, Any]  # a turn and its sample's score, by column

FUNCTIONS = ("it's", 'a "七" ]b')  # names are any text
COLUMNS = [*runs.RANGES, *(f"reward.{name}" for name in FUNCTIONS)]
FATES = get_args(Fate)
REWARDS = st.sampled_from([None, -0.5, 0.25, 1.0])
TEXTS = st.sampled_from(["Seven", "SEVEN 七", "a.c%", "abc", ""])
PROMPTS = TEXTS.map(lambda text: json.dumps([{"content": text}], ensure_ascii=False))
TURNS = st.fixed_dictionaries(
    {
        **{"text": TEXTS, "prompt": PROMPTS, "columns": st.sampled_from([None, '{"a": "seven"}'])},
        **{name: st.sampled_from([None, "stop"]) for name in ("finish_reason", "stop_reason")},
    }
)
SCORES = st.fixed_dictionaries(
    {
        **dict.fromkeys(("reward", "advantage", "gap_max"), REWARDS),
        "rewards": st.tuples(*(st.tuples(st.just(name), REWARDS) for name in FUNCTIONS)),
        **{"truncated": st.booleans(), "fate": st.sampled_from(FATES)},
    }
)
SAMPLES = st.tuples(st.lists(TURNS, min_size=1, max_size=2), SCORES | st.none())
NAMES = st.tuples(st.sampled_from(PHASES), *[st.integers(0, last) for last in (2, 1, 1)])
GROUPS = st.dictionaries(NAMES, st.lists(SAMPLES, min_size=1, max_size=3), min_size=1, max_size=4)
FILTERS = [
    *({f"{end}_{c}": bound} for c in COLUMNS for end in ("min", "max") for bound in ("0.25", "1")),
    *({"text": text, "where": w} for text in ("sEVEN", "七", "a.c") for w in runs.TEXTS),
    *({"sort": f"{sign}{column}"} for column in COLUMNS for sign in ("", "-")),
    *({"phase": "eval"}, {"finish_reason": "stop"}, {"stop_reason": "stop"}),
    *({"truncated": "false"}, {"fate": "trained"}, {"fate": "generated"}),
]
SEARCHES = st.lists(st.sampled_from(FILTERS), max_size=4).map(
    lambda filters: {name: value for each in filters for name, value in each.items()}
)


def passes(row: Shown, name: str, wanted: str, where: str) -> bool:
    """Return whether a row passes a filter; a value that is unknown passes none."""
    end, _, column = name.partition("_")
    if name in ("where", "sort"):
        return True
    if name == "text":
        return wanted.lower() in (row[where] or "").lower()
    if end not in ("min", "max"):
        return str(row.get(name)).lower() == wanted
    value, bound = row.get(column), float(wanted)
    return value is not None and (value >= bound if end == "min" else value <= bound)


def place_of(row: Shown, sort: str) -> tuple[Any, ...]:
    """Return the place of a row: the newest is the first if nothing else decides."""
    value = row.get(sort.removeprefix("-"))
    by_value = value is None, (value or 0) * (-1 if sort[:1] == "-" else 1)
    newest = -row["step"], row["phase"], -row["number"]
    return *by_value, *newest, row["group"], row["index"], row["turn"]


@settings(max_examples=15, phases=[Phase.generate])  # an example takes too long to shrink many
@given(groups=GROUPS, searches=st.lists(SEARCHES, min_size=4, max_size=4), offset=st.integers(0, 2))
def test_searches_and_groups_are_their_definitions(
    groups: dict[Any, list[Any]],
    searches: list[dict[str, str]],
    offset: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assume(any(values for samples in groups.values() for _, values in samples))
    rows, scores, model = [], [], list[Shown]()
    for (phase, step, number, group), samples in groups.items():
        for index, (turns, values) in enumerate(samples):
            name = sample_id(step, phase, number=number, group=group, index=index)
            known = {"fate": "generated"}
            if values:
                scores.append(score_of(name, **values))
                known = {**values, **{f"reward.{n}": value for n, value in values["rewards"]}}
            for turn, content in enumerate(turns):
                rows.append(row := row_of(replace(name, turn=turn), **content))
                counted = {"num_tokens": row.num_tokens}
                model.append({**asdict(row.sample_id), **counted, **content, **known})
    log = open_log(folder := tmp_path_factory.mktemp("run"))
    write(log, rows, scores)
    run = open_run(folder)
    for search in searches:
        sort, where = search.get("sort", ""), search.get("where", "text")
        wanted = [row for row in model if all(passes(row, *f, where) for f in search.items())]
        wanted.sort(key=lambda row: place_of(row, sort))
        count, found = find_samples(run, search)
        names = (*SAMPLE_ID_COLUMNS, "num_tokens", "text", "reward", "fate", "truncated")
        seen = [{name: row[name] for name in names} for row in found]
        assert seen == [{name: row.get(name) for name in names} for row in wanted]
        page = find_samples(run, {**search, "offset": str(offset)}, 2)
        assert (len(found), page) == (count, (count, found[offset : offset + 2]))
    rounds = {RoundId(*name[:3]) for name in groups}
    assert run.facts.rounds == sorted(rounds, key=lambda r: (-r.step, r.phase, -r.number))
    listed = [group for name in run.facts.rounds for group in list_groups(run, name)]
    by_name = {(*g["round"].split("."), g["group"]): g for g in listed}
    assert len(by_name) == len(listed) == len(groups)
    for (phase, step, number, name), samples in groups.items():
        group = by_name[phase, f"{step}", f"{number}", name]
        texts = {tuple(turn["text"] for turn in turns) for turns, _ in samples}
        assert (group["samples"], group["num_texts"]) == (len(samples), len(texts))
        assert group["rewards"] == [values and values["reward"] for _, values in samples]
        some = [reward for reward in group["rewards"] if reward is not None]
        expected = (fmean(some), pstdev(some)) if some else (None, None)
        assert (group["reward"], group["spread"]) == pytest.approx(expected)
    for name, menu in run.facts.menus.items():
        having = map(asdict, scores) if name in runs.MENUS["rewards"] else model
        values = [row[name] for row in having if row[name] is not None]
        assert menu == Counter(str(value).lower() for value in values)


# --- a group ---

TURN = {"token_ids": [1, 2], "logprobs": None, "mask": None, "gaps": {}, "num_shared": 0}
CONVERSATIONS = RoundId("train", 3, 0)


def test_spans_hold_whole_characters() -> None:
    content = "a七👍b".encode() + b"\xff"

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    logprobs = [-float(i) for i in range(len(content))]
    mask = [True] * 3 + [False] + [True] * 6
    gaps = {2: 0.5, 3: 0.25, 8: 0.125}
    turn = {"token_ids": [*content], "logprobs": logprobs, "mask": mask, "gaps": gaps}
    assert spans_of({**turn, "num_shared": 5}, decode) == [
        ("a", True, 0.0, 0.0, False),
        ("七", True, -6.0, 0.5, True),
        ("👍", False, -22.0, 0.0, False),
        ("b", False, -8.0, 0.125, False),
        ("\N{REPLACEMENT CHARACTER}", False, -9.0, 0.0, False),
    ]


def test_spans_of_odd_tokens() -> None:
    """Unknown and infinite log-probabilities are None; a first token keeps its space."""

    def decode(ids: list[int]) -> str:  # like sentencepiece, without the first space
        return "".join(f" w{i}" for i in ids)[1:]

    for logprobs in (None, [-math.inf, math.nan]):
        spans = spans_of({**TURN, "logprobs": logprobs}, decode)
        assert [(span.text, span.logprob) for span in spans] == [("w1", None), (" w2", None)]


def test_a_group(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"round": "train.1.0", "group": "1"}
    text = render([run], 0, "group", place)
    assert '<i class="shared" style="--p:0.10" title="-0.500">w7</i>' in text
    assert '<i style="--p:0.20" title="-1.000"> w1</i>' in text
    assert '<i class="shared" style="--p:0.05;--g:0.25" title="-0.250 ± 0.250"> w1</i>' in text
    page = text.partition("<main")[2].partition("</main>")[0]
    assert not any(word in page for word in ("Turn", "seconds", "masked"))
    monkeypatch.setattr(run, "decode", None)
    group = read_group(run, RoundId("train", 1, 0), 1)
    assert group["first"]["messages"] == [("user", "<image>Question 1?")]
    assert group["first"]["media"] == [str(run.run_dir / "images/1.png")]
    assert group["replay"] == f"swift-grpo-ext replay '{run.run_dir}' --round 1.0 --group 1"
    # Without a tokenizer, texts are compared in place of tokens.
    shown = [[span.text for span in turns[0]["spans"]] for turns in group["samples"]]
    assert shown == [["g1 i", "0 s1"], ["g1 i", "1 s1"]]


def test_a_conversation_turn_by_turn(run: Run) -> None:
    group = read_group(run, CONVERSATIONS, 1)
    assert group["has_one_prompt"]
    assert [len(turns) for turns in group["samples"]] == [1, 3]
    first, second, third = group["samples"][1]
    assert second["messages"] == [("tool", "<image>看这里 \\ud83d")]
    assert [span.is_masked for span in second["spans"]] == [False, True]
    # Position 4 of the sample is the second token of its second turn.
    gaps = [[span.gap for span in turn["spans"]] for turn in (first, second, third)]
    assert gaps == [[0.5, 0, 0], [0, 0.25], []]
    assert third["messages"] == [("tool", '{"tool_calls": [{"f": "找"}]}')]
    assert third["spans"] == []
    whole = render([run], 0, "group", {"round": "train.3.0", "group": "1"})
    text = whole[whole.index('id="sample-train.3.0-1-1"') :]
    image = "index=1&amp;turn=1&amp;number=0"
    places = [text.index(part) for part in ("</span> 2</h4>", image, "看这里", "找")]
    assert places == sorted(places)
    assert "<i>tool_seconds</i> 3" in text
    assert 'class=" masked"' in text
    assert "Struck out" in whole


def test_each_conversation_has_its_own_question_where_they_differ(tmp_path: Path) -> None:
    rows = make_conversations(0)
    rows = [replace(r, fingerprint=f"own {r.sample_id.index}.{r.sample_id.turn}") for r in rows]
    write(open_log(tmp_path), rows, [])
    page = render([open_run(tmp_path)], 0, "group", {"round": "train.0.0", "group": "0"})
    assert page.count("Question 0?") == 2


# --- images ---


def test_images_of_the_record(run: Run) -> None:
    """A turn has the media that it names. The record holds the picture that a tool made."""
    place = {"round": "train.3.0", "group": "1", "index": "1", "turn": "1", "number": "0"}
    with Image.open(io.BytesIO(read_image(run, place))) as crop:
        assert (crop.format, crop.size) == ("PNG", (8, 4))
    with Image.open(io.BytesIO(read_image(run, {**place, "turn": "0"}))) as shown:
        assert (shown.size, shown.getpixel((0, 0))) == ((56, 28), (200, 30, 0))
    for wrong in ({"turn": "2"}, {"number": "1"}, {"group": "7"}):
        with pytest.raises(NotFoundError, match="has no such medium"):
            read_image(run, {**place, **wrong})


def test_images_are_shown_upright_in_two_sizes(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    Image.new("RGB", (30, 10), "red").save(tmp_path / "a.jpg", exif=exif)
    Image.new("RGBA", (4096, 2048), "red").save(tmp_path / "a.tiff")
    for name, side, expected in (
        ("a.jpg", "full", (10, 30)),
        ("a.tiff", "full", (2048, 1024)),
        ("a.tiff", "small", (112, 56)),
    ):
        with Image.open(io.BytesIO(image_bytes(str(tmp_path / name), side))) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", expected)


def test_what_is_no_local_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 49)
    Image.new("RGB", (10, 10)).save(tmp_path / "large.png")
    (tmp_path / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "pipe.png")
    for name, message in {
        "https://example.com/a.png": "the record holds its address only",
        "gone.png": "gone.png is not on this machine",
        "pipe.png": "not on this machine",
        "text.png": "text.png is no image that can be read",
        "large.png": "large.png is no image that can be read \\(Image size",
    }.items():
        path = name if "://" in name else str(tmp_path / name)
        with pytest.raises(NotFoundError, match=message):
            image_bytes(path, "full")


# --- pages ---


def test_a_saved_page_is_whole(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    new = {"media": ["https://example.com/8.png"], "fingerprint": "new"}
    rows = [replace(row, **new) for row in make_rows(4)]
    write(open_log(run_dir, session=1, start_step=4), rows)
    text = write_page([run_dir], tmp_path / "page.html", 10).read_text(encoding="utf-8")
    addresses = re.findall(r'<[^a][^>]*(?:src|href)="([^"]*)', text)
    loaded = {address.partition(",")[0] for address in addresses}
    assert loaded == {"data:", "", "data:image/png;base64"}  # no URL
    assert "8.png" in text
    assert text.count("<script") == 1  # hostile text is text
    ids = {*re.findall(r'\bid="([^"]+)"', text)}
    assert {"overview", "groups", "group-train.4.0-1"} <= ids
    assert {*re.findall(r'<a [^>]*href="#([^"]+)"', text)} <= ids


def test_a_prompt_stands_once_above_its_samples(run: Run) -> None:
    page = render([run], 0, "samples", {"min_step": "1", "max_step": "1"})
    assert page.count("Question 1?") == 1
    assert page.count('class="sample"') == 4
    assert page.count('<b class="chip" style="--share:1.00">1</b>') == 1
    page = render([run], 0, "samples", {"text": "nowhere"})
    assert '<span id="count">0 / 20</span>' in page


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
