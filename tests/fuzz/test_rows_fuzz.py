"""Rows as a data set may hold them, sound or not: named errors only, and none takes long."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from swift_grpo_ext.checks.rows import bad_media, check_rows, prompt_of, question_of, unreadable
from swift_grpo_ext.sampling.prompt_hash import (
    PROMPT_FIELDS,
    count_duplicates,
    prompt_hash,
    prompt_hashes,
)
from tests.fuzz.cases import fuzz, json_like, no_hang, words

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")  # PIL's


def saved(form: str, mode: str = "RGB") -> bytes:
    content = io.BytesIO()
    Image.new(mode, (5, 3)).save(content, form)
    return content.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A header that claims any size."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    size, check = struct.pack(">I", 13), struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + size + chunk + check


SOUND = [saved(form) for form in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")]
CLAIMS = [png_of(20_000, 1), png_of(2**31 - 1, 2**31 - 1), png_of(0, 0)]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """The bytes of an image, of which some are others, or the end is missing."""
    content = bytearray(draw(st.sampled_from(SOUND + CLAIMS)))
    for _ in range(draw(st.integers(0, 4))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.integers(0, len(content)))])


contents = damaged() | st.binary(max_size=40) | st.sampled_from(SOUND)
base64s = contents.map(lambda content: base64.b64encode(content).decode())
names = st.one_of(
    words,
    st.sampled_from(["", ".", "/", "~nobody-of-this-name/a.png", "a\0.png", "x" * 300, "x" * 5000]),
    st.sampled_from(["file://", "file:///no.png", "http://", "https://x", "data:", "data:,"]),
    base64s,
    base64s.map(lambda text: f"data:image/png;base64,{text}"),
    words.map(lambda text: f"data:image/png;base64,{text}"),
    words.map(lambda text: text + "A" * 300),
)
odd = st.one_of(
    st.binary(max_size=8).map(bytearray),
    st.sampled_from([Image.new("P", (2, 2)), Image.new("RGB", (2, 2))]),
    st.sampled_from([np.zeros((2, 2, 3), np.uint8), np.array([1, 2]), np.array(7), np.float32(1)]),
    st.builds(set),
    st.builds(object),
)
images = st.one_of(
    names,
    contents,
    st.fixed_dictionaries({"bytes": st.none() | contents | odd, "path": st.none() | names}),
    json_like,
    odd,
)
texts = words | st.lists(st.sampled_from(["<image>", "<video>", "哪个?"])).map("".join)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | json_like,
        "content": texts | json_like,
    },
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(messages | json_like, max_size=4) | json_like | odd,
        "images": st.lists(images, max_size=4) | images,
        "videos": json_like | odd,
        "audios": json_like | odd,
        "tools": json_like | odd,
        "objects": json_like | odd,
        "solution": json_like,
    },
)


@fuzz
@given(images)
@example("~nobody-of-this-name/a.png")
@example("data:image/png;base64,A")
@example("é" * 300)
@example({"bytes": np.array([1, 2]), "path": None})
def test_an_image_is_readable_or_the_reason_is_said(image: Any) -> None:
    with no_hang():
        reason = unreadable(image)
    assert reason is None or reason.startswith(("does not exist", "is not a"))


@pytest.mark.parametrize("root", ["", "pictures"])
def test_names_that_are_no_files(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nobody writes to would be waited for, for ever."""
    monkeypatch.setenv("ROOT_IMAGE_DIR", root)
    os.mkfifo(tmp_path / "pipe.png")
    with no_hang():
        assert unreadable(str(tmp_path / "pipe.png")) == "is not a file"
        assert unreadable(str(tmp_path)) == "is not a file"
        assert unreadable("/dev/zero") == "is not a file"
        assert unreadable("x" * 5000 + ".png") is not None


@fuzz
@given(rows | json_like)
@example({"messages": 7})
@example({"messages": [7]})
@example({"images": 7})
@example(None)
def test_what_is_wrong_with_a_row_is_said(row: Any) -> None:
    with no_hang():
        reason = bad_media(row)
        question = question_of(row)
    assert reason is None or reason
    assert isinstance(question, str)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        (7, "there is 7, which is no row"),
        ({"messages": "hi"}, "`messages` is 'hi'; expected a list such as"),
        ({"messages": ["hi"]}, "`messages` is ['hi']; expected"),
        ({"images": 7}, "`images` is 7; expected a list of paths"),
        ({"images": "no.png"}, "image 'no.png' does not exist"),
        ({"images": ["data:image/png;base64,A"]}, "is not an image that can be read"),
        ({"images": [png_of(2**31 - 1, 2**31 - 1)]}, "is not an image that can be read"),
    ],
)
def test_reasons(row: Any, named: str) -> None:
    reason = bad_media(row)
    assert reason is not None
    assert named in reason


@fuzz
@given(rows)
def test_a_prompt_is_its_row_without_the_answer(row: dict[str, Any]) -> None:
    with no_hang():
        prompt = prompt_of(row)
    assert {k: v for k, v in prompt.items() if k != "messages"} == {
        k: v for k, v in row.items() if k != "messages"
    }
    again = prompt_of(prompt)["messages"]
    assert len(again) <= len(prompt["messages"]) <= len(again) + 1


def refusal_of(data: list[Any], **options: bool) -> str | None:
    findings = check_rows(data, setting="dataset", **options)
    return next((finding.sentence for finding in findings if finding.level == "error"), None)


@fuzz
@given(st.lists(rows, max_size=4), st.booleans(), st.booleans())
def test_a_data_set_is_sound_or_refused_by_name(
    data: list[Any], expects_media: bool, deletes: bool
) -> None:
    with no_hang():
        refusal = refusal_of(data, expects_media=expects_media, deletes_bad_rows=deletes)
    if refusal is None:
        assert deletes or not any(map(bad_media, data))
    else:
        assert refusal.startswith("--dataset: ")


@fuzz
@given(rows)
def test_a_row_has_a_prompt_hash(row: dict[str, Any]) -> None:
    with no_hang():
        found = prompt_hash(row)
    assert len(found) == 32
    assert prompt_hash({**row, "solution": "another", "index": 1}) == found
    assert prompt_hash({k: v for k, v in row.items() if k in PROMPT_FIELDS}) == found


@fuzz
@given(st.lists(rows, max_size=3), st.data())
def test_neighbours_have_the_fingerprints_of_single_rows(
    data: list[Any], draw: st.DataObject
) -> None:
    repeated = [row for row in data for _ in range(draw.draw(st.integers(1, 2)))]
    with no_hang():
        found = prompt_hashes(repeated)
    assert found == [prompt_hash(row) for row in repeated]
    assert count_duplicates(found) >= len(repeated) - len(data)


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0, False), (0.0, -0.0), ([1], [True])]
)
def test_equal_numbers_of_other_types_are_other_prompts(one: Any, other: Any) -> None:
    """Python calls them equal; a template writes them differently."""
    data = [{"objects": {"value": one}}, {"objects": {"value": other}}]
    assert len(set(prompt_hashes(data))) == 2


def test_what_has_no_content_is_refused_by_name() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    circular: dict[str, Any] = {}
    circular["objects"] = circular
    for value in (deep, {b"bytes": 1}, {1: 0, "1": 0}, circular):
        with pytest.raises(ValueError, match=r"fields objects cannot be told from others"):
            prompt_hash({"objects": {"value": value}})
