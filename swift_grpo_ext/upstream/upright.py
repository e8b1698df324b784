"""Rollouts and training see photographs upright, as viewers, vLLM and `datasets.Image` show them.
Boxes of `objects` are read in the upright picture; ms-swift's SFT ignores the EXIF orientation.
"""

from __future__ import annotations

from functools import wraps
from io import BytesIO
from typing import Any

from PIL import Image, ImageOps
from PIL.ExifTags import Base

from swift_grpo_ext.upstream.patches import Moment, patch, repair


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """Return the image as a viewer shows it, without an EXIF orientation; a decoder's errors are
    raised."""
    # Pillow itself turns TIFF here; PNG may have its orientation behind the pixels.
    image.load()
    try:
        if image.getexif().get(Base.Orientation, 1) not in range(2, 9):
            return image
        return ImageOps.exif_transpose(image)
    except Exception:  # of many kinds; vLLM leaves an image with broken EXIF as it is, too
        return image


@repair(
    Moment.TRAINING,
    Moment.ENGINE,
    symptom="The policy is asked about a photograph that stands upright and trained on it "
    "lying down: log-probabilities are 0.08 to 1.2 nats apart (tiny models), and token ids "
    "agree where it is square.",
    upstream="ms-swift 4.6, template/vision_utils.py (`load_image`) leaves images as they "
    "are stored, in training and with its other engines; vLLM 0.32 turns them by their EXIF "
    "orientation, twice (multimodal/parse.py:773 and, for what its cache lacks, "
    "multimodal/processing/processor.py:1382, `normalize_image`).",
    until="ms-swift's `load_image` does so",
)
def load_upright() -> None:
    """Let ms-swift's templates load images upright, so that vLLM does not turn them again."""
    from swift.template import base, vision_utils

    load = vision_utils.load_image

    @wraps(load)
    def load_image(image: Any) -> Image.Image:
        opened = vision_utils.load_file(image)
        if isinstance(opened, BytesIO):
            opened = Image.open(opened)
        # Before ms-swift converts it, which loses some marks.
        return load(apply_exif_orientation(opened) if isinstance(opened, Image.Image) else opened)

    # `base` has imported the function by its name.
    patch(vision_utils, load_image=load_image)
    patch(base, load_image=load_image)
