"""Applies the EXIF orientation of images in rollouts and training, as viewers, vLLM and
`datasets.Image` do. Boxes of `objects` refer to the upright image; ms-swift's SFT ignores EXIF.
"""

from __future__ import annotations

from functools import wraps
from io import BytesIO
from typing import Any

from PIL import Image, ImageOps
from PIL.ExifTags import Base

from swift_grpo_ext.upstream.patches import Moment, patch, repair


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """Return the image rotated by its EXIF orientation. Raise the decoder's errors."""
    # Loading rotates TIFF already; PNG may store its orientation after the pixels.
    image.load()
    try:
        if image.getexif().get(Base.Orientation, 1) not in range(2, 9):
            return image
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF; vLLM keeps such an image too
        return image


@repair(Moment.TRAINING, Moment.ENGINE)
def load_upright() -> None:
    """Have ms-swift's templates load images upright and without EXIF, which vLLM then keeps.

    Symptom: the rollout sees a photograph upright, and training sees it rotated: log-probabilities
    differ by 0.08 to 1.2 nats (tiny models), and for a square photograph even the token ids agree.
    Upstream: ms-swift 4.6, template/vision_utils.py (`load_image`) ignores the EXIF orientation, in
    training and with its other engines; vLLM 0.32 applies it, twice (multimodal/parse.py:773 and,
    for uncached images, multimodal/processing/processor.py:1382, `normalize_image`). Can go when
    ms-swift's `load_image` applies the EXIF orientation.
    """
    from swift.template import base, vision_utils

    load = vision_utils.load_image

    @wraps(load)
    def load_image(image: Any) -> Image.Image:
        opened = vision_utils.load_file(image)
        if isinstance(opened, BytesIO):
            opened = Image.open(opened)
        # Before ms-swift converts the image, which drops some EXIF data.
        return load(apply_exif_orientation(opened) if isinstance(opened, Image.Image) else opened)

    # `base` has its own reference to the function.
    patch(vision_utils, load_image=load_image)
    patch(base, load_image=load_image)
