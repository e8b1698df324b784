"""Images of a data set's rows: found, readable, or named."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.checks import rows
from swift_grpo_ext.checks.rows import (
    bad_media,
    check_duplicates,
    check_rows,
    prompt_of,
    question_of,
    unreadable,
)


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "数字 七.png"
    Image.new("RGB", (28, 28)).save(path)
    return path


def as_bytes(path: Path) -> bytes:
    return path.read_bytes()


def test_readable_in_every_form(png: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = base64.b64encode(as_bytes(png)).decode() + "A" * 256
    assert unreadable(str(png)) is None
    assert unreadable({"bytes": None, "path": str(png)}) is None
    assert unreadable({"bytes": as_bytes(png), "path": None}) is None
    assert unreadable(f"data:image/png;base64,{base64.b64encode(as_bytes(png)).decode()}") is None
    assert unreadable(text) is None
    assert unreadable("https://example.com/7.png") is None  # only a look-up would tell
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(png.parent))
    assert unreadable(png.name) is None


def test_a_missing_file(tmp_path: Path) -> None:
    assert unreadable(str(tmp_path / "none.png")) == "does not exist"


def test_a_folder_is_no_image(tmp_path: Path) -> None:
    assert unreadable(str(tmp_path)) == "is not a file"


def test_long_text_without_a_suffix_is_base64(png: Path) -> None:
    assert unreadable("a" * 255) == "does not exist"
    assert "is not an image that can be read" in str(unreadable("a" * 256))
    named = "/none/" + "a" * 246
    assert unreadable(f"{named}.png") == "does not exist"


def test_only_long_checks_show_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: list[bool] = []

    def bar(items: Any, *, desc: str, disable: bool) -> Any:
        assert desc.endswith("--dataset")
        hidden.append(disable)
        return items

    monkeypatch.setattr(rows, "tqdm", bar)
    for number in (1_999, 2_000):
        data = [{"messages": []}] * number
        assert found(data, expects_media=False) == []
        list(check_duplicates(data, setting="dataset"))
    assert hidden == [True, True, False, False]


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n"])
def test_not_an_image(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.png"
    path.write_bytes(content)
    reason = unreadable(str(path))
    assert reason is not None
    assert "is not an image that can be read" in reason


def found(data: Any, **options: Any) -> list[str]:
    return [str(f) for f in check_rows(data, **{"setting": "dataset", **options})]


def test_a_bad_row_is_named(png: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_text("text")
    messages = [{"role": "user", "content": "<image><image>哪个数字?"}]
    good_row = {"messages": messages, "images": [{"path": str(png)}] * 2}
    bad_row = {"messages": messages, "images": [{"path": str(png)}, {"path": str(bad)}]}
    data = [good_row, bad_row, bad_row]
    named = r"in the row that asks '<image><image>哪个数字\?', image '.*bad\.png' is not an image"
    [refused] = found(data, expects_media=True)
    assert re.match(rf"error: dataset: {named}.*\. Correct.*--truncation_strategy delete", refused)
    lacking = {**good_row, "images": [{"path": str(png)}]}
    assert "2 <image> marks stand for 1 images" in found([lacking], expects_media=True)[0]
    more = {**good_row, "images": [{"path": str(png)}] * 3}
    assert found([more], expects_media=True) == []
    [warned] = found(data, expects_media=True, deletes_bad_rows=True)
    assert re.match(f"warning: dataset: 2 of 3 rows .* the first: {named}", warned)


def test_marks_of_the_answer_do_not_count() -> None:
    answer = {"role": "assistant", "content": "<image>"}
    question = {"role": "user", "content": "Which?"}
    assert bad_media({"messages": [question, answer]}) is None
    assert bad_media({"messages": [answer, question]}) == "1 <image> marks stand for 0 images"
    row = {"messages": [question, answer], "solution": "7"}
    assert prompt_of(row) == {"messages": [question], "solution": "7"}
    assert row["messages"] == [question, answer]
    assert prompt_of({"messages": [question]}) == {"messages": [question]}


@pytest.mark.parametrize("row", [{}, {"images": None}, {"images": []}, {"images": 7}, "text"])
def test_a_data_set_without_images(row: Any) -> None:
    last = found([row, row], setting="val_dataset", expects_media=True)[-1]
    assert re.match(r"warning: val_dataset: no row holds `images`.*--columns", last)
    sound = isinstance(row, dict) and row.get("images") != 7
    assert (found([row, row], expects_media=False) == []) is sound


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (7, "there is 7, which is no row"),
        ({"messages": "Hi"}, "`messages` is 'Hi'; expected a list such as"),
        ({"messages": ["Hi"]}, "`messages` is ['Hi']; expected a list such as"),
        ({"messages": []}, None),
        ({"messages": None}, None),
        ({"images": 7}, "`images` is 7; expected a list of paths"),
        ({"audios": 7}, "`audios` is 7; expected a list of paths"),
        ({"videos": {}}, None),
        ({"images": "https://example.com/7.png"}, None),
        ({"images": "/none.png"}, "image '/none.png' does not exist"),
        ({"images": {"path": "/none.png", "bytes": None}}, "image '/none.png' does not exist"),
    ],
)
def test_rows_that_are_none(row: Any, reason: str | None) -> None:
    said = bad_media(row)
    assert said == reason or (reason and said and said.startswith(reason))


@pytest.mark.parametrize("kind", ["images", "videos", "audios"])
def test_one_row_with_media_is_enough(kind: str) -> None:
    assert found([{}, {kind: ["https://example.com/a"]}, {}], expects_media=True) == []


def test_questions_are_cut_short() -> None:
    messages = [{"role": "user", "content": "first"}, {"role": "user", "content": "x" * 61}]
    assert question_of({"messages": messages}) == "x" * 60
    assert question_of({}) == question_of({"messages": [{}]}) == ""
    assert question_of(7) == ""  # type: ignore[arg-type]


def test_sources_are_cut_short() -> None:
    text = "data:image/png;base64," + "A" * 300
    assert bad_media({"images": [text]}) is not None
    assert f"image '{text[:40]}...'" in str(bad_media({"images": [text]}))
    assert "image '/a" in str(bad_media({"images": ["/a" + "b" * 200 + ".png"]}))


def test_large_data_sets_are_drawn_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stride of 50 took every 50th row, which lacked its image, for the whole data set."""
    opened: list[int] = []
    monkeypatch.setattr(rows, "MAX_IMAGES_OPENED", 20)
    monkeypatch.setattr(rows, "unreadable", opened.append)
    data = [{"images": [] if i % 50 == 0 else [i]} for i in range(1000)]
    assert found(data, expects_media=True) == []
    first, opened[:] = list(opened), []
    assert found(data, expects_media=True) == []
    assert opened == first == sorted(set(first))
    assert 15 <= len(first) <= 20
    assert len({i % 50 for i in first}) > 10
    opened.clear()
    assert found(data[:20], expects_media=True) == []
    assert opened == list(range(1, 20))


def test_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_IMAGES_OPENED", 2)
    asks = [{"messages": [{"role": "user", "content": text}]} for text in "aab"]
    answered = {"messages": [*asks[0]["messages"], {"role": "assistant", "content": "7"}]}
    data = [*asks, answered]

    def look(data: Any) -> list[str]:
        return [str(f) for f in check_duplicates(data, setting="dataset")]

    assert look(asks[1:]) == []
    [warned] = look(asks[:2])
    assert warned.startswith("warning: dataset: 1 of 2 rows repeat a prompt")
    monkeypatch.setattr(rows, "MAX_IMAGES_OPENED", 4)
    [warned] = look(data)  # the answers of rows do not count
    assert warned.startswith("warning: dataset: 2 of 4 rows repeat a prompt")


def test_in_memory_images_are_left_to_ms_swift() -> None:
    assert unreadable(Image.new("RGB", (1, 1))) is None
    assert unreadable({"bytes": io.BytesIO().getvalue() or None, "path": None}) is None
