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
from swift_grpo_ext.checks.rows import check_rows, unreadable


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


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n"])
def test_not_an_image(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text.png"
    path.write_bytes(content)
    reason = unreadable(str(path))
    assert reason is not None
    assert "is not an image that can be read" in reason


def test_a_bad_row_is_named(png: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.png"
    bad.write_text("text")
    messages = [{"role": "user", "content": "<image><image>哪个数字?"}]
    good_row = {"messages": messages, "images": [{"path": str(png)}] * 2}
    bad_row = {"messages": messages, "images": [{"path": str(png)}, {"path": str(bad)}]}
    data = [good_row, bad_row]
    named = r"in the row .*哪个数字.* image '.*bad\.png' is not an"
    with pytest.raises(ValueError, match=rf"--dataset: {named}.*--truncation_strategy delete"):
        check_rows(data, setting="--dataset", needs_media=True)
    lacking = {**good_row, "images": [{"path": str(png)}]}
    with pytest.raises(ValueError, match="2 <image> marks stand for 1 images"):
        check_rows([lacking], setting="--dataset", needs_media=True)
    warnings: list[str] = []
    monkeypatch.setattr(rows.logger, "warning", warnings.append)
    check_rows(data, setting="--dataset", needs_media=True, deletes_bad_rows=True)
    assert re.search(f"1 of 2 rows .*{named}", warnings[0])


@pytest.mark.parametrize("row", [{}, {"images": None}, {"images": []}])
def test_a_data_set_without_images(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"--val_dataset: no row holds `images`.*--require_images"):
        check_rows([row, row], setting="--val_dataset", needs_media=True)
    check_rows([row, row], setting="--val_dataset", needs_media=False)


def test_rows_with_videos_only_hold_media() -> None:
    check_rows([{"videos": ["a.mp4"]}], setting="--dataset", needs_media=True)


def test_large_data_sets_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(rows, "MAX_IMAGES_OPENED", 10)
    monkeypatch.setattr(rows, "unreadable", opened.append)
    check_rows([{"images": [i]} for i in range(95)], setting="--dataset", needs_media=True)
    assert opened == list(range(0, 95, 10))


def test_in_memory_images_are_left_to_ms_swift() -> None:
    assert unreadable(Image.new("RGB", (1, 1))) is None
    assert unreadable({"bytes": io.BytesIO().getvalue() or None, "path": None}) is None
