"""Images of a data set's rows are readable, or the row is named."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from swift.model import get_processor
from swift.template import get_template

from swift_grpo_ext.checks import rows
from swift_grpo_ext.checks.rows import (
    bad_media,
    check_duplicates,
    check_rows,
    encoding_error,
    prompt_of,
    unreadable,
)

PICTURE = "https://example.com/7.png"
DATA_URL = "data:image/png;base64," + "A" * 300


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "数字 七.png"
    Image.new("RGB", (28, 28)).save(path)
    return path


def said(data: Any, **options: Any) -> list[str]:
    settings = {"setting": "dataset", "expects_media": True, **options}
    return [f"{f.level}: {f.sentence}" for f in check_rows(data, **settings)]


def test_readable_in_every_form(png: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(png.parent))
    content = png.read_bytes()
    text = base64.b64encode(content).decode()
    forms = [str(png), f"file://{png}", png.name, content, text + "A" * 256, PICTURE]
    forms += [f"data:image/png;base64,{text}", Image.new("RGB", (1, 1))]
    forms += [{"bytes": None, "path": str(png)}, {"bytes": content, "path": None}]
    forms += [{"bytes": None, "path": None}]
    assert [unreadable(form) for form in forms] == [None] * len(forms)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("/none.png", "does not exist"),
        ("/", "is not a file"),
        ("a" * 255, "does not exist"),
        ("a" * 256, "is not an image that can be read"),  # long without a suffix: base64
        ("/none/" + "a" * 246 + ".png", "does not exist"),
        (b"", "is not an image that can be read"),
        (b"\x89PNG\r\n\x1a\n", "is not an image that can be read"),
    ],
)
def test_unreadable(image: Any, reason: str) -> None:
    assert str(unreadable(image)).startswith(reason)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": None}, None),
        ({"messages": []}, None),
        ({"images": PICTURE}, None),
        ({"images": "/none.png"}, "image '/none.png' does not exist"),
        ({"images": {"path": "/none.png", "bytes": None}}, "image '/none.png' does not exist"),
        ({"images": ["/a" + "b" * 200 + ".png"]}, "image '/abbb"),
        ({"images": [DATA_URL]}, f"image '{DATA_URL[:255]}' is not an image"),
    ],
)
def test_images_of_a_row(row: Any, reason: str | None) -> None:
    assert str(bad_media(row)).startswith(str(reason))


def test_marks_of_the_answer_do_not_count() -> None:
    answer = {"role": "assistant", "content": "<image>"}
    question = {"role": "user", "content": "Which?"}
    assert bad_media({"messages": [question, answer]}) is None
    assert bad_media({"messages": [answer, question]}) == "1 <image> marks stand for 0 images"
    row = {"messages": [question, answer], "solution": "7"}
    assert prompt_of(row) == {"messages": [question], "solution": "7"}
    assert row["messages"] == [question, answer]
    assert prompt_of({"messages": [question]}) == {"messages": [question]}


def test_a_bad_row_is_named(png: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("text")
    system = {"role": "system", "content": "Look."}
    messages = [system, {"role": "user", "content": "<image><image>哪个数字?" + 99 * "x"}]
    good, bad = {"path": str(png)}, {"path": str(tmp_path / "bad.png")}
    data = [{"messages": messages, "images": images} for images in ([good] * 2, [good, bad])]
    asks = r"in the row that asks '<image><image>哪个数字\?x{41}'"
    named = rf"{asks}, image '.*bad\.png' is not an image"
    [refused] = said([*data, data[1]])
    assert re.match(rf"error: --dataset: {named}.*\. Correct.*strategy delete", refused)
    [warned] = said([*data, data[1]], deletes_bad_rows=True)
    assert re.match(f"warning: --dataset: 2 of 3 rows .* the first: {named}", warned)
    [lacking] = said([{"messages": messages, "images": [good]}])
    assert "2 <image> marks stand for 1 images" in lacking
    assert said([{"messages": messages, "images": [good] * 3}]) == []  # ms-swift adds the marks


def test_a_data_set_without_media() -> None:
    empty: list[dict[str, Any]] = [{}, {"images": None}, {"videos": []}]
    [warned] = said(empty, setting="val_dataset")
    assert warned.startswith("warning: --val_dataset: no row holds `images`")
    assert said(empty, expects_media=False) == []
    assert said([*empty, {"audios": [PICTURE]}]) == []  # one row is enough


def test_rows_of_large_data_sets_are_chosen_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stride of 50 took every 50th row, which lacked its image, for the whole data set."""
    opened: list[int] = []
    monkeypatch.setattr(rows, "MAX_IMAGES_OPENED", 20)
    monkeypatch.setattr(rows, "unreadable", opened.append)
    data = [{"images": [] if i % 50 == 0 else [i]} for i in range(1000)]
    assert said(data) == []
    first, opened[:] = list(opened), []
    assert said(data) == []
    assert opened == first == sorted(set(first))
    assert 15 <= len(first) <= 20
    assert len({i % 50 for i in first}) > 10
    opened.clear()
    assert said(data[:20]) == []
    assert opened == list(range(1, 20))


def test_duplicates() -> None:
    asks = [{"messages": [{"role": "user", "content": text}]} for text in "aab"]
    answered = {"messages": [*asks[0]["messages"], {"role": "assistant", "content": "7"}]}
    [warned] = check_duplicates([*asks, answered], setting="dataset")
    assert warned.level == "warning"
    assert warned.text.startswith("2 of 4 rows repeat a prompt")
    assert list(check_duplicates(asks[1:], setting="dataset")) == []


def test_a_prompt_that_cannot_be_encoded(assets: Path, png: Path) -> None:
    processor = get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")
    template = get_template(processor, template_type="qwen2_5_vl", max_length=100)
    question = {"role": "user", "content": "Which?"}
    answered = {"messages": [question, {"role": "assistant", "content": "7 " * 50}]}
    assert encoding_error(template, answered) is None
    assert len(answered["messages"]) == 2
    assert encoding_error(template, {"messages": []}) == "it has no messages"
    missing = encoding_error(template, {"messages": [question], "images": ["/none.png"]})
    assert missing == "image '/none.png' does not exist"
    long = {"messages": [question], "images": [str(png)] * 20}
    assert str(encoding_error(template, long)).startswith("MaxLengthError: ")
