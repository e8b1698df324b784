"""Photographs are upright in rollouts and in training, however a row names them."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import Base
from swift.template import Template, vision_utils
from swift.template.template_inputs import StdTemplateInputs
from vllm.multimodal import image as of_vllm

from swift_grpo_ext.upstream.encoding import load_upright
from swift_grpo_ext.upstream.patches import make

PIXELS = np.random.default_rng(0).integers(0, 255, (8, 24, 3), dtype=np.uint8)
FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "MPO")

TURN: dict[int, Callable[[Any], Any]] = {
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: partial(np.rot90, k=2),
    4: np.flipud,
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: partial(np.rot90, k=-1),
    7: lambda pixels: np.rot90(pixels.swapaxes(0, 1), k=2),
    8: np.rot90,
}
"""By orientation: the function that makes stored pixels upright (EXIF 2.32, table 4)."""


@pytest.fixture(autouse=True)
def _loads_upright() -> None:
    make(load_upright)


def photograph(form: str, orientation: int | None, mode: str = "RGB") -> bytes:
    options: dict[str, Any] = {}
    if orientation is not None:
        options["exif"] = exif = Image.Exif()
        exif[Base.Orientation] = orientation
        exif[Base.Make] = "a phone"
    image = Image.fromarray(PIXELS).convert(mode)
    if form == "MPO":
        options |= {"save_all": True, "append_images": [image.copy()]}
    image.save(content := io.BytesIO(), form, **options)
    return content.getvalue()


def as_shown(form: str, orientation: int, mode: str = "RGB") -> Any:
    """Return the pixels that a viewer shows."""
    stored = Image.open(io.BytesIO(photograph(form, None, mode))).convert("RGB")
    return TURN[orientation](np.asarray(stored))


def as_vllm_sees_at_last(image: Any) -> Any:
    """Return the pixels in vLLM, which parses an image twice if its cache lacks it."""
    turn = getattr(of_vllm, "normalize_image", lambda image: image)  # vLLM 0.23 turns nothing
    return np.asarray(turn(turn(image)))


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("form", FORMATS)
def test_each_orientation_is_seen_as_it_is_shown(form: str) -> None:
    """In training, and in vLLM, which reads orientations twice."""
    for orientation in TURN:
        image = Template._load_image({"bytes": photograph(form, orientation), "path": None}, True)
        shown = as_shown(form, orientation)
        assert np.array_equal(np.asarray(image), shown), orientation
        assert np.array_equal(as_vllm_sees_at_last(image), shown), orientation
        if orientation > 1:
            assert Base.Orientation not in image.getexif()


def test_it_does_not_matter_how_a_row_names_a_photograph(tmp_path: Path, url: str) -> None:
    content = photograph("JPEG", 6)
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    text = base64.b64encode(content).decode()
    unloaded = Image.open(path)
    named = {
        "path": str(path),
        "bytes": {"bytes": content, "path": None},
        "dictionary": {"bytes": None, "path": str(path)},
        "base64": text,
        "data URL": f"data:image/jpeg;base64,{text}",
        "URL": f"{url}/photo.jpg",
        "PIL": unloaded,
    }
    for name, source in named.items():
        image = Template._load_image(source, True)
        assert np.array_equal(as_vllm_sees_at_last(image), as_shown("JPEG", 6)), name
        assert np.array_equal(np.asarray(image), as_shown("JPEG", 6)), name
        again = Template._load_image(image, True)  # a conversation's next turn
        assert again is image, name
    assert unloaded.getexif()[Base.Orientation] == 6  # the user's image is as it was


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA", "I;16"])
def test_a_mark_that_ms_swifts_conversion_loses_is_read_before(mode: str) -> None:
    form = {"CMYK": "JPEG", "L": "JPEG"}.get(mode, "PNG")
    for orientation in TURN:
        image = vision_utils.load_image(photograph(form, orientation, mode))
        assert np.array_equal(np.asarray(image), as_shown(form, orientation, mode)), orientation
        assert np.array_equal(as_vllm_sees_at_last(image), np.asarray(image)), orientation


def test_frames_that_are_photographs_are_turned_too(tmp_path: Path) -> None:
    path = tmp_path / "frame.jpg"
    path.write_bytes(photograph("JPEG", 6))
    [frames], _ = vision_utils.load_video_hf([[str(path)] * 2])
    assert np.array_equal(frames, [as_shown("JPEG", 6)] * 2)


@pytest.mark.parametrize(
    "orientation", [None, 1, 0, 9, "broken"], ids=lambda value: f"orientation {value}"
)
def test_what_says_nothing_is_left_alone(orientation: Any) -> None:
    """No orientation, orientation 1, values outside of EXIF, and a broken block."""
    image = Image.fromarray(PIXELS)
    if orientation == "broken":
        image.info["exif"] = b"Exif\0\0II*\0\xff\xff\xff\xff"
    elif orientation is not None:
        image.getexif()[Base.Orientation] = orientation
    assert vision_utils.load_image(image) is image
    assert np.array_equal(as_vllm_sees_at_last(image), PIXELS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>'),
        ("xmp", b"<tiff:Orientation>6</tiff:Orientation>"),
    ],
)
def test_marks_outside_of_exif_are_taken_too(name: str, value: str | bytes) -> None:
    image = Image.fromarray(PIXELS)
    image.info[name] = value
    seen = vision_utils.load_image(image)
    assert np.array_equal(np.asarray(seen), TURN[6](PIXELS))
    assert np.array_equal(as_vllm_sees_at_last(seen), TURN[6](PIXELS))


def test_an_image_cut_short_is_not_taken_for_upright() -> None:
    with pytest.raises(OSError, match="truncated"):
        vision_utils.load_image(photograph("JPEG", 6)[:-20])


def test_boxes_are_read_in_the_upright_picture() -> None:
    """The upright picture is wide where the file is high."""
    image = Template._load_image({"bytes": photograph("JPEG", 6), "path": None}, True)
    inputs = StdTemplateInputs(messages=[], images=[image], objects={"bbox": [[0, 0, 4, 4]]})
    Template._get_height_width(inputs)
    assert (inputs.objects["width"], inputs.objects["height"]) == ([8], [24])
