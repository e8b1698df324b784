"""Rows whose images cannot be read, or whose prompts cannot be encoded, are named."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from swift.dataset import load_dataset
from swift.model import get_processor
from swift.template import get_template

from swift_grpo_ext.checks import rows as checked
from swift_grpo_ext.checks.rows import (
    check_rows,
    encoding_error,
    name_of,
    place_of,
    prompt_of,
    row_fault,
    unreadable,
)
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.upstream.placeholders import placeholder_texts

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
    forms += [f" {png} "]
    Image.new("L", (1, 1)).save(tiny := png.with_name("tiny.png"))
    short = base64.b64encode(tiny.read_bytes()).decode()
    assert len(short) < 255  # as short as a name
    forms += [short]
    assert [unreadable(form) for form in forms] == [None] * len(forms)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("/none.png", "does not exist"),
        ("/", "is not a file"),
        ("a" * 255, "does not exist"),
        ("a" * 256, "is not an image that can be read"),  # without a dot: base64
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
        ({"images": "/none.png"}, "images: '/none.png' does not exist"),
        ({"images": {"path": "/none.png", "bytes": None}}, "images: '/none.png' does not exist"),
        ({"images": ["/a" + "b" * 200 + ".png"]}, "images[0]: '/abbb"),
        (
            {"images": [PICTURE, DATA_URL]},
            f"images[1]: '{DATA_URL[:60]}'... (322 characters) is not an image",
        ),
    ],
)
def test_images_of_a_row(row: Any, reason: str | None) -> None:
    assert str(row_fault(row)).startswith(str(reason))


def test_a_mark_that_is_a_token_of_the_model(assets: Path) -> None:
    """LLaVA's `<image>` is one: a surplus one cannot stay text."""
    processor = get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")
    template = get_template(processor, template_type="qwen2_5_vl")
    rows = [
        {"messages": [{"role": "user", "content": "<image>Which?"}], "images": [PICTURE]},
        {"messages": [{"role": "user", "content": "What is <image>?"}]},
    ]
    known = placeholder_texts(template)
    assert "<|image_pad|>" in known
    assert "<image>" not in known
    assert row_fault(rows[1], known) is None
    template.tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert placeholder_texts(template) == sorted([*known, "<image>"])
    [refused] = said(rows, placeholders=placeholder_texts(template))
    assert (
        "'What is <image>?': messages: 1 <image> marks stand for 0 images; expected equal numbers"
        in refused
    )


def test_the_answer_is_no_part_of_the_prompt() -> None:
    answer = {"role": "assistant", "content": "<image>"}
    question = {"role": "user", "content": "Which?"}
    row = {"messages": [question, answer], "solution": "7"}
    assert row_fault(row, ["<image>"]) is None
    assert prompt_of(row) == {"messages": [question], "solution": "7"}
    assert row["messages"] == [question, answer]
    assert prompt_of({"messages": [question]}) == {"messages": [question]}


def test_a_bad_row_is_named(png: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("text")
    system = {"role": "system", "content": "Look."}
    messages = [system, {"role": "user", "content": "<image><image>哪个数字?" + 99 * "x"}]
    good, bad = {"path": str(png)}, {"path": str(tmp_path / "bad.png")}
    data = [{"messages": messages, "images": images} for images in ([good] * 2, [good, bad])]
    asks = r"the row that asks '<image><image>哪个数字\?x{41}'"
    named = rf"{asks}: images\[1\]: '.*bad\.png' is not an image"
    [refused] = said([*data, data[1]])
    assert re.match(rf"error: --dataset: {named}.*\. Correct.*strategy delete", refused)
    warned, _ = said([*data, data[1]], deletes_bad_rows=True)
    assert re.match(f"warning: --dataset: 2 of 3 rows .* The first: {named}", warned)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_row_is_named_by_its_number_in_its_file(suffix: str, tmp_path: Path) -> None:
    """All rows ask the same, and ms-swift shuffles them."""
    asks = "<image>How many, 多少?"
    images = ["a.png", "b.png", "c.png", "b.png", "d.png"]
    answers = ["3", "7", "3", "8", "4"]
    pairs = list(zip(images, answers, strict=True))
    rows: list[dict[str, Any]] = [{"query": asks, "images": i, "solution": s} for i, s in pairs]
    if suffix != "csv":
        asked = {"messages": [{"role": "user", "content": asks}]}
        rows = [{**asked, "images": [i], "solution": s} for i, s in pairs]
        rows.append({**asked, "images": [], "solution": "4"})
    path = tmp_path / f"rows.{suffix}"
    if suffix == "csv":
        pd.DataFrame(rows).to_csv(path, index=False)
    else:
        lines = "\n".join(map(json.dumps, rows))
        path.write_text(lines if suffix == "jsonl" else f"[{lines.replace(chr(10), ', ')}]")
    shuffled, _ = load_dataset([str(path)], shuffle=True, remove_unused_columns=False)
    assert sorted(map(place_of, shuffled)) == [f"row {n + 1} of {path}" for n in range(len(rows))]
    shown = name_of(next(row for row in shuffled if str(row["solution"]) == "8"))
    assert shown == f"row 4 of {path} (which asks {asks!r})"
    sample = RolloutSample.from_row(next(row for row in shuffled if str(row["solution"]) == "7"))
    assert place_of(sample) == f"row 2 of {path}"
    sample.images = ["none.png"]
    assert name_of(sample).startswith("the row that asks ")
    path.unlink()
    assert place_of(shuffled[0]) == ""


def test_a_data_set_without_media() -> None:
    empties: list[dict[str, Any]] = [{}, {"images": None}, {"videos": []}]
    empty = [
        {**columns, "messages": [{"role": "user", "content": str(number)}]}
        for number, columns in enumerate(empties)
    ]
    [warned] = said(empty, setting="val_dataset")
    assert warned.startswith("warning: --val_dataset: no row holds `images`")
    assert said(empty, expects_media=False) == []
    assert said([*empty, {"audios": [PICTURE]}]) == []  # one row is enough


def test_marks_without_media() -> None:
    """ms-swift leaves them as text: with a misspelt column a row is trained on without its
    image."""
    asked = {"messages": [{"role": "user", "content": "<image>Which digit?"}]}
    fine = {**asked, "images": [PICTURE]}
    warned, _ = said([fine, {**asked, "image_path": PICTURE}, asked])
    assert warned.startswith(
        "warning: --dataset: 2 of 3 rows have marks without media, which stay text. The first: the "
        "row that asks '<image>Which digit?': messages: 1 <image> marks stand for 0 images."
    )
    tag = {"messages": [{"role": "user", "content": "What is the tag <video>?"}]}
    assert said([fine, tag]) == []


def test_rows_of_large_data_sets_are_chosen_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 50th row lacks its image here: a stride of 50 would see no other rows."""
    opened: list[str] = []
    monkeypatch.setattr(checked, "MAX_ROWS", 20)
    monkeypatch.setattr(checked, "unreadable", lambda image, **_: opened.append(image))
    data = [{"images": [] if i % 50 == 0 else [f"{i:03}.png"]} for i in range(1000)]
    assert said(data) == []
    first, opened[:] = list(opened), []
    assert said(data) == []
    assert opened == first
    assert len(set(first)) == len(first)
    assert 15 <= len(first) <= 20
    assert len({int(name[:3]) % 50 for name in first}) > 10
    opened.clear()
    assert said(data[:20]) == []
    assert opened == [f"{i:03}.png" for i in range(1, 20)]


def test_duplicates() -> None:
    asks = [{"messages": [{"role": "user", "content": text}]} for text in "aab"]
    answered = {"messages": [*asks[0]["messages"], {"role": "assistant", "content": "7"}]}
    [warned] = said([*asks, answered], expects_media=False)
    assert warned.startswith("warning: --dataset: 2 of 4 rows repeat an earlier row's prompt")
    assert said(asks[1:], expects_media=False) == []


def test_content_in_rows_is_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit each rank read 42 GB of 20,000 rows of 1 MB."""
    rows = []
    for color in ("red", "red", "blue", "blue"):
        Image.new("RGB", (200, 200), color).save(buffer := io.BytesIO(), "bmp")
        message = {"role": "user", "content": "<image>Which?"}
        rows.append({"messages": [message], "images": [{"bytes": buffer.getvalue()}]})
    pd.DataFrame(rows).to_parquet(path := tmp_path / "rows.parquet")
    data, _ = load_dataset([str(path)], remove_unused_columns=False)
    for limit, expected in ((2**31, "2 of 4 rows"), (2 * 120_000, "1 of 2 rows")):
        monkeypatch.setattr(checked, "MAX_CONTENT", limit)
        [warned] = said(data)
        assert warned.startswith(f"warning: --dataset: {expected} repeat an earlier row's prompt")


def test_a_prompt_that_cannot_be_encoded(assets: Path, png: Path) -> None:
    processor = get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")
    template = get_template(processor, template_type="qwen2_5_vl", max_length=100)
    question = {"role": "user", "content": "Which?"}
    answered = {"messages": [question, {"role": "assistant", "content": "7 " * 50}]}
    assert encoding_error(template, answered) is None
    assert len(answered["messages"]) == 2
    template.set_mode("train")  # as in distillation, for the answers of its data
    whole = encoding_error(template, answered, strip_response=False)
    assert str(whole).startswith("MaxLengthError: ")
    short = {"messages": [question, {"role": "assistant", "content": "7"}]}
    assert encoding_error(template, short, 10, strip_response=False) is None  # no engine draws
    assert encoding_error(template, {"messages": []}) == "it has no messages"
    missing = encoding_error(template, {"messages": [question], "images": ["/none.png"]})
    assert missing == "images[0]: '/none.png' does not exist"
    long = {"messages": [question], "images": [str(png)] * 20}
    assert str(encoding_error(template, long)).startswith("MaxLengthError: ")
    # What a teacher is shown is encoded too.
    told = {"messages": [question], "teacher_prompt": "a b " * 100}
    assert str(encoding_error(template, told)).startswith("MaxLengthError: ")
    (cut := png.with_name("cut.png")).write_bytes(png.read_bytes()[:-40])
    seen = {"messages": [question], "images": [str(png)], "teacher_images": [str(png), str(cut)]}
    fault = str(encoding_error(template, seen))
    assert fault.startswith(f"teacher_images[1]: '{cut}' is not an image that can be read (")
    assert encoding_error(template, {**seen, "teacher_images": None}) is None
