"""What vLLM makes of an image that is marked as turned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import Base
from vllm.multimodal.image import normalize_image

from swift_grpo_ext.upstream.exif import drop_orientation


def photograph(path: Path, orientation: int) -> Image.Image:
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    pixels = np.random.default_rng(0).integers(0, 255, (8, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)
    return Image.open(path).convert("RGB")  # as ms-swift loads it


@pytest.mark.parametrize("orientation", range(1, 9))
def test_vllm_sees_what_training_sees(orientation: int, tmp_path: Path) -> None:
    image = photograph(tmp_path / "photo.jpg", orientation)
    pixels = np.asarray(image).copy()
    assert np.array_equal(np.asarray(normalize_image(image)), pixels) == (orientation == 1)
    inputs = {"images": [image]}
    drop_orientation(inputs)
    assert np.array_equal(np.asarray(normalize_image(inputs["images"][0])), pixels)
    assert image.getexif().get(Base.Orientation) == orientation  # the user's image is as it was


def test_without_images() -> None:
    inputs: dict[str, object] = {"images": [], "input_ids": [1]}
    drop_orientation(inputs)
    assert inputs == {"images": [], "input_ids": [1]}
