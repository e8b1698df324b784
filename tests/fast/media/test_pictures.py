"""The record has a small copy of each image that a scheduler adds (V1)."""

from __future__ import annotations

import base64
import io
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.media.pictures import SIDE, media_name, picture_of

IMAGE = Image.effect_noise((700, 300), 60).convert("RGB")


def png(image: Image.Image = IMAGE) -> bytes:
    image.save(content := io.BytesIO(), "png")
    return content.getvalue()


@pytest.mark.parametrize(
    "medium",
    [
        IMAGE,
        png(),
        {"bytes": png(), "path": None},
        base64.b64encode(png()).decode(),
        "data:image/png;base64," + base64.b64encode(png()).decode(),
    ],
    ids=["PIL", "bytes", "dictionary", "base64", "data URL"],
)
def test_an_image_is_kept_small_and_has_the_name_of_its_pixels(medium: Any) -> None:
    picture = picture_of(medium)
    assert picture.name == media_name(IMAGE)
    assert picture.webp is not None
    shown = Image.open(io.BytesIO(picture.webp))
    assert (shown.format, shown.size) == ("WEBP", (SIDE, 110))
    assert len(picture.webp) < 20_000
    assert IMAGE.size == (700, 300)  # as it was


@pytest.mark.parametrize(
    "medium", ["http://a/b.png", "crops/1.png", "abcd", b"no image", {"path": "a.png"}, 7]
)
def test_what_is_no_image_or_has_a_path_has_its_name(medium: Any) -> None:
    assert picture_of(medium) == (media_name(medium), None)


def test_any_mode_is_shown() -> None:
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16"):
        assert picture_of(Image.new(mode, (4, 4))).webp
