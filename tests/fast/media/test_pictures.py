"""The record has a small copy of each image that a scheduler adds (V1)."""

import base64
import io
from typing import Any

from PIL import Image

from swift_grpo_ext.media.pictures import SIDE, media_name, picture_of

IMAGE = Image.effect_noise((700, 300), 60).convert("RGB")
IMAGE.save(content := io.BytesIO(), "png")
PNG = content.getvalue()
BASE64 = base64.b64encode(PNG).decode()


def test_an_image_is_kept_small_and_has_the_name_of_its_pixels() -> None:
    data_url = f"data:image/png;base64,{BASE64}"
    for medium in (IMAGE, PNG, {"bytes": PNG, "path": None}, BASE64, data_url):
        picture = picture_of(medium)
        assert picture.name == media_name(IMAGE)
        assert picture.webp is not None
        shown = Image.open(io.BytesIO(picture.webp))
        assert (shown.format, shown.size) == ("WEBP", (SIDE, 110))
        assert len(picture.webp) < 20_000
        assert IMAGE.size == (700, 300)  # as it was
    for mode in ("1", "L", "LA", "P", "RGBA", "CMYK", "I;16"):
        assert picture_of(Image.new(mode, (4, 4))).webp


DIGEST = "blake2b:4a317afe33484f5fbf1d1b4cfe3077ee"  # of 2,049 letters A


def test_what_is_no_image_or_has_a_path_has_its_name() -> None:
    cases: list[tuple[Any, str]] = [
        *((text, text) for text in ("http://a/b.png", "crops/1.png", "abcd", "A" * 2048)),
        ("A" * 2049, DIGEST),
        (b"A" * 2049, DIGEST),
        ("图\udcff.png", "图\\udcff.png"),
        ({"path": "a.png", "bytes": None}, "a.png"),
        (["1.png", "2.png"], "1.png 2.png"),
    ]
    for medium, name in cases:
        assert picture_of(medium) == (name, None)
