"""Photographs that a camera marked as turned: rollouts see the pixels that training sees.

Symptom: the policy is asked about a picture turned by 90 degrees and trained on it as it is stored;
token ids agree where the picture is square, log-probabilities do not (0.6 to 1.2 nats apart with
the tiny model).
Upstream: vLLM 0.32 turns images by their EXIF orientation (multimodal/parse.py,
`normalize_image`); ms-swift 4.6 does not (template/vision_utils.py, `load_image`), in training and
with its other engines.
Adaptation: images go to vLLM without the mark.
Can go when both do the same.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from typing import Any

from PIL import Image
from PIL.ExifTags import Base
from swift.utils import get_logger

logger = get_logger()


def drop_orientation(inputs: MutableMapping[str, Any]) -> None:
    """Let vLLM take each image of an encoded request as it is stored."""
    images = inputs.get("images")
    if images:
        inputs["images"] = [_as_stored(image) for image in images]


def _as_stored(image: Any) -> Any:
    if not isinstance(image, Image.Image) or image.getexif().get(Base.Orientation, 1) == 1:
        return image
    _say_once()
    stored = image.copy()
    del stored.getexif()[Base.Orientation]
    return stored


@cache
def _say_once() -> None:
    logger.warning(
        "Images with an EXIF orientation are used as they are stored, in rollouts as in training; "
        "turn them beforehand (PIL.ImageOps.exif_transpose) if the model should see them upright."
    )
