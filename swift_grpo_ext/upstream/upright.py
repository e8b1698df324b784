"""Rollouts and training see photographs upright, as every viewer shows them.

The one function by which ms-swift's templates load an image, for training and for each engine,
turns it and takes all marks away, so that whoever turns images by their marks (vLLM) finds none.

Why upright: so the photograph is seen by the trained policy later (vLLM and its servers,
`transformers.image_utils.load_image`, `datasets.Image`), by a teacher's server now, and by whoever
labelled it. What ms-swift alone does otherwise: its SFT, and `--use_vllm false`, show it as it is
stored, and so the boxes of `objects` are read. Both sides read boxes in the upright picture here,
which `warn_of_boxes` says once, where a row has both.
"""

from __future__ import annotations

from functools import wraps
from io import BytesIO
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps
from PIL.ExifTags import Base

from swift_grpo_ext.upstream.patches import patch

if TYPE_CHECKING:
    from swift.template.template_inputs import StdTemplateInputs

MARKS = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
"""Pillow keeps an orientation under these keys of `Image.info` (Image.py, `getexif`)."""

WAS_TURNED = "swift_grpo_ext.was_turned"
"""A key of the `info` of images that `upright` has turned."""


def upright(image: Image.Image) -> Image.Image:
    """Return the image as a viewer shows it, without any mark of an orientation.

    One without an orientation is returned as it is; what raises while it is decoded is raised.
    """
    image.load()  # TIFF is turned here by Pillow itself; PNG may have its mark behind the pixels
    try:
        orientation = image.getexif().get(Base.Orientation, 1)
    except Exception:  # broken EXIF raises many kinds; vLLM leaves such an image as it is, too
        return image
    if orientation not in range(2, 9):
        return image
    # Pillow would write the other tags again, which fails for some: with the one tag it does not.
    bare = image.copy()
    bare.info = {name: value for name, value in bare.info.items() if name not in MARKS}
    bare.getexif()[Base.Orientation] = orientation
    turned = ImageOps.exif_transpose(bare)
    turned.info[WAS_TURNED] = True
    return turned


def load_upright() -> None:
    """Let ms-swift's templates load images upright."""
    from swift.template import Template, base, vision_utils

    load = vision_utils.load_image

    @wraps(load)
    def load_image(image: Any) -> Image.Image:
        opened = vision_utils.load_file(image)
        if isinstance(opened, BytesIO):
            opened = Image.open(opened)
        # Before ms-swift converts it, which loses some marks.
        return load(upright(opened) if isinstance(opened, Image.Image) else opened)

    measure = Template._get_height_width

    @wraps(measure)
    def _get_height_width(inputs: StdTemplateInputs) -> None:
        measure(inputs)
        warn_of_boxes(inputs)

    # `base` has imported the function by its name.
    patch(vision_utils, load_image=load_image)
    patch(base, load_image=load_image)
    patch(Template, _get_height_width=staticmethod(_get_height_width))


def warn_of_boxes(inputs: StdTemplateInputs) -> None:
    """Warn once where a row has boxes (`objects`) in a photograph that was turned."""
    from swift.utils import get_logger

    if any(WAS_TURNED in image.info for image in inputs.images):
        question = str(inputs.messages[-1].get("content", ""))[:60] if inputs.messages else ""
        get_logger().warning_once(
            f"objects: the row that asks {question!r} has boxes in a photograph with an EXIF "
            "orientation. Rollouts and training read them in the upright picture, with its width "
            "and height; ms-swift's SFT reads them in the picture as it is stored. If yours are of "
            "the stored picture, store the photograph upright (PIL.ImageOps.exif_transpose) and "
            "turn its boxes with it.",
            hash_id="boxes of turned photographs",
        )
