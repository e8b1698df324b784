"""Photographs are upright in rollouts and in training [M3]. `tests/stack/test_rows.py` trains
with rows that name them in each form."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
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


def assert_seen(image: Any, shown: Any) -> None:
    """Assert that training and vLLM see these pixels."""
    assert np.array_equal(np.asarray(image), shown)
    assert np.array_equal(as_vllm_sees_at_last(image), shown)


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *((form, "RGB") for form in ("JPEG", "PNG", "WEBP", "TIFF", "MPO")),
        # ms-swift's conversion to RGB loses their marks.
        *(("JPEG", mode) for mode in ("L", "CMYK")),
        *(("PNG", mode) for mode in ("P", "RGBA", "I;16")),
    ],
)
def test_each_orientation_is_seen_as_it_is_shown(form: str, mode: str) -> None:
    for orientation in TURN:
        content = photograph(form, orientation, mode)
        image = Template._load_image({"bytes": content, "path": None}, True)
        assert_seen(image, as_shown(form, orientation, mode))
        if orientation > 1:
            assert Base.Orientation not in image.getexif()


def test_frames_that_are_photographs_are_turned_too(tmp_path: Path) -> None:
    """The user's own image stays as it was, and a conversation's next turn changes nothing."""
    path = tmp_path / "frame.jpg"
    path.write_bytes(photograph("JPEG", 6))
    [frames], _ = vision_utils.load_video_hf([[str(path)] * 2])
    assert np.array_equal(frames, [as_shown("JPEG", 6)] * 2)
    own = Image.open(path)
    image = Template._load_image(own, True)
    assert own.getexif()[Base.Orientation] == 6
    assert Template._load_image(image, True) is image


@pytest.mark.parametrize("orientation", [None, 1, 0, 9, "broken"])
def test_what_says_nothing_is_left_alone(orientation: Any) -> None:
    """No orientation, orientation 1, values outside of EXIF, and a broken block."""
    image = Image.fromarray(PIXELS)
    if orientation == "broken":
        image.info["exif"] = b"Exif\0\0II*\0\xff\xff\xff\xff"
    elif orientation is not None:
        image.getexif()[Base.Orientation] = orientation
    assert vision_utils.load_image(image) is image
    assert np.array_equal(as_vllm_sees_at_last(image), PIXELS)


def test_an_image_cut_short_is_not_taken_for_upright() -> None:
    with pytest.raises(OSError, match="truncated"):
        vision_utils.load_image(photograph("JPEG", 6)[:-20])


def test_boxes_are_read_in_the_upright_picture() -> None:
    """The upright picture is wide where the file is high."""
    image = Template._load_image({"bytes": photograph("JPEG", 6), "path": None}, True)
    inputs = StdTemplateInputs(messages=[], images=[image], objects={"bbox": [[0, 0, 4, 4]]})
    Template._get_height_width(inputs)
    assert (inputs.objects["width"], inputs.objects["height"]) == ([8], [24])
