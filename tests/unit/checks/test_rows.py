"""A row whose images cannot be read, whose prompt cannot be encoded, or that ms-swift leaves out,
is named with its field and fault (M1, G4)."""

from __future__ import annotations

import io
import re
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from swift.dataset import load_dataset
from swift.model import get_processor
from swift.template import get_template

from swift_grpo_ext.checks import rows as checked
from swift_grpo_ext.checks.finding import Finding, collected
from swift_grpo_ext.checks.left_out import left_out_rows_named
from swift_grpo_ext.checks.rows import (
    check_rows,
    encoding_error,
    name_of,
    place_of,
    row_fault,
    unreadable,
)
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.upstream.placeholders import placeholder_texts
from tests.rig import checks
from tests.rig.rounds import write_lines

PICTURE = "https://example.com/7.png"
DATA_URL = "data:image/png;base64," + "A" * 300


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "数字 七.png"
    Image.new("RGB", (28, 28)).save(path)
    return path


@pytest.fixture(scope="module")
def template(assets: Path) -> Any:
    processor = get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")
    return get_template(processor, template_type="qwen2_5_vl", max_length=100)


def asks(text: str | None, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **columns}


ANSWER = {"role": "assistant", "content": "7"}


def said(data: Any, **options: Any) -> list[str]:
    return checks.said(check_rows(data, **{"setting": "dataset", "expects_media": True, **options}))


def test_images_of_a_row(png: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_forms.py` has the other forms."""
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(png.parent))
    for image in (png.name, png.read_bytes(), Image.new("RGB", (1, 1)), PICTURE):
        assert unreadable(image) is None
    fault = row_fault({"images": [PICTURE, DATA_URL]})
    assert str(fault).startswith(f"images[1]: '{DATA_URL[:60]}'... (322 character")


def test_a_mark_that_is_a_token_of_the_model(template: Any) -> None:
    """LLaVA's `<image>` is one: a surplus one cannot stay text."""
    rows = [asks("<image>Which?", images=[PICTURE]), asks("What is <image>?")]
    known = placeholder_texts(template)
    assert "<|image_pad|>" in known
    assert "<image>" not in known
    assert row_fault(rows[1], known) is None
    template = deepcopy(template)
    template.tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert placeholder_texts(template) == sorted([*known, "<image>"])
    [refused] = said(rows, placeholders=placeholder_texts(template))
    expected = "messages: 1 <image> marks stand for 0 images; expected equal numbers"
    assert f"'What is <image>?': {expected}" in refused


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_row_is_named_by_its_number_in_its_file(suffix: str, tmp_path: Path) -> None:
    """All rows ask the same, and ms-swift shuffles them."""
    question = "<image>How many, 多少?"
    pairs = [("a.png", "3"), ("b.png", "7"), ("c.png", "3"), ("b.png", "8"), ("d.png", "4")]
    path = tmp_path / f"rows.{suffix}"
    rows = pd.DataFrame([{"query": question, "images": i, "solution": s} for i, s in pairs])
    if suffix == "csv":
        rows.to_csv(path, index=False)
    else:
        rows.to_json(path, orient="records", lines=suffix == "jsonl")
    shuffled, _ = load_dataset([str(path)], shuffle=True, remove_unused_columns=False)
    assert sorted(map(place_of, shuffled)) == [f"row {n + 1} of {path}" for n in range(len(rows))]
    shown = name_of(next(row for row in shuffled if str(row["solution"]) == "8"))
    assert shown == f"row 4 of {path} (which asks {question!r})"
    sample = RolloutSample.from_row(next(row for row in shuffled if str(row["solution"]) == "7"))
    assert place_of(sample) == f"row 2 of {path}"
    sample.images = ["none.png"]
    assert name_of(sample).startswith("the row that asks ")
    path.unlink()
    assert place_of(shuffled[0]) == ""


def test_a_prompt_that_cannot_be_encoded(template: Any, png: Path) -> None:
    """A row's own answer counts in distillation only. A teacher's view is encoded too."""
    question = asks("Which?")["messages"]
    answered = {"messages": [*question, {**ANSWER, "content": "7 " * 50}]}
    assert encoding_error(template, answered) is None
    assert len(answered["messages"]) == 2
    template.set_mode("train")
    whole = encoding_error(template, answered, strip_response=False)
    assert str(whole).startswith("MaxLengthError: ")
    short = {"messages": [*question, ANSWER]}
    assert encoding_error(template, short, 10, strip_response=False) is None  # no engine draws
    assert encoding_error(template, {"messages": []}) == "it has no messages"
    (cut := png.with_name("cut.png")).write_bytes(png.read_bytes()[:-40])
    content = [{"bytes": cut.read_bytes(), "path": None}]  # as Parquet has them
    for columns, fault in (
        ({"teacher_prompt": "a b " * 100}, "MaxLengthError: "),
        ({"teacher_images": [str(png), str(cut)]}, f"teacher_images[1]: '{cut}' is not an image"),
        ({"images": content}, "images[0]: <"),
    ):
        row = asks("Which?", **{"images": [str(png)], **columns})
        assert str(encoding_error(template, row)).startswith(fault)


# --- data sets ---


def test_a_bad_row_is_named(png: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("text")
    row = asks("<image><image>哪个数字?" + 99 * "x")
    row["messages"].insert(0, {"role": "system", "content": "Look."})
    good, bad = {"path": str(png)}, {"path": str(tmp_path / "bad.png")}
    data = [{**row, "images": images} for images in ([good] * 2, [good, bad], [good, bad])]
    question = r"the row that asks '<image><image>哪个数字\?x{41}'"
    named = rf"{question}: images\[1\]: '.*bad\.png' is not an image"
    [refused] = said(data)
    assert re.match(rf"error: --dataset: {named}.*\. Correct.*strategy delete", refused)
    warned, _ = said(data, deletes_bad_rows=True)
    assert re.match(f"warning: --dataset: 2 of 3 rows .* The first: {named}", warned)


def test_marks_without_media() -> None:
    """ms-swift leaves them as text: with a misspelt column a row is trained on without its
    image."""
    asked = asks("<image>Which digit?")
    fine = {**asked, "images": [PICTURE]}
    warned, _ = said([fine, {**asked, "image_path": PICTURE}, asked])
    assert warned.startswith(
        "warning: --dataset: 2 of 3 rows have marks without media, which stay text. The first: the "
        "row that asks '<image>Which digit?': messages: 1 <image> marks stand for 0 images."
    )
    assert said([fine, asks("What is the tag <video>?")]) == []


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


def test_content_in_rows_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit each rank read 42 GB of 20,000 rows of 1 MB."""
    rows = []
    for color in ("red", "red", "blue", "blue"):
        Image.new("RGB", (200, 200), color).save(content := io.BytesIO(), "bmp")
        rows.append(asks("<image>Which?", images=[{"bytes": content.getvalue(), "path": None}]))
    for limit, expected in ((2**31, "2 of 4 rows"), (2 * 120_000, "1 of 2 rows")):
        monkeypatch.setattr(checked, "MAX_CONTENT", limit)
        [warned] = said(rows)
        assert warned.startswith(f"warning: --dataset: {expected} repeat an earlier row's prompt")


# --- rows that ms-swift leaves out ---

BOXES = {"ref": ["a"], "bbox": [[1, 2, 3, 4]]}
HALF = [asks("Which?", objects=objects) for objects in (BOXES, {}) * 3]
SOME = "warning: Data set {0}: ms-swift leaves out "
EMPTY = "KeyError: 'bbox' (objects: {{}}; expected {{"


def test_rows_that_a_training_leaves_out(tmp_path: Path) -> None:
    cases: list[tuple[Any, ...]] = [
        ([asks("?"), asks("?", objects=None), asks("?", objects=BOXES)], {}, None),
        (HALF, {"num_proc": 2}, SOME + "3 of 6 rows; the first is row 2 of {0}..." + EMPTY),
        (HALF[1::2], {}, "error: Data set {0}: no row is left of 3; the first is row 1 of {0}"),
        ([HALF[0], asks(None)], {}, SOME + "...: AssertionError: message: {{'role': 'user', 'cont"),
        ([HALF[0], {"messages": []}], {}, SOME + "...: MessagesPreprocessor returns no row for it"),
    ]
    for number, (rows, options, expected) in enumerate(cases):
        path = write_lines(tmp_path / f"{number}.jsonl", rows)
        found: list[Finding] = []
        with collected(found.append), left_out_rows_named(), suppress(ZeroDivisionError):
            load_dataset([str(path)], remove_unused_columns=False, shuffle=True, **options)
        checks.assert_says(found, expected and expected.format(path))
        assert "(objects" not in "".join(checks.said(found)) or "objects" in rows[-1]
