"""Rollouts and training see photographs upright, as viewers, vLLM and `datasets.Image` show them.

ms-swift's SFT ignores the EXIF orientation, and reads the boxes of `objects` in the picture as it
is stored. Here they are read in the upright picture; `warn_of_boxes` warns where a row has both.
"""

from __future__ import annotations

from functools import wraps
from io import BytesIO
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps
from PIL.ExifTags import Base

from swift_grpo_ext.upstream.patches import Moment, patch, repair

if TYPE_CHECKING:
    from swift.template.template_inputs import StdTemplateInputs

WAS_TURNED = "swift_grpo_ext.was_turned"
"""`Image.info` has this key where the image was turned."""


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """Return the image as a viewer shows it, without its EXIF orientation; itself where it has
    none. Errors of its decoder are raised."""
    # Pillow itself turns TIFF here; PNG may have its orientation behind the pixels.
    image.load()
    try:
        if image.getexif().get(Base.Orientation, 1) not in range(2, 9):
            return image
        turned = ImageOps.exif_transpose(image)
    except Exception:  # of many kinds; vLLM leaves an image with broken EXIF as it is, too
        return image
    turned.info[WAS_TURNED] = True
    return turned


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
    """Let ms-swift's templates load images upright, and without their orientation: vLLM does not
    turn them again."""
    from swift.template import Template, base, vision_utils

    load = vision_utils.load_image

    @wraps(load)
    def load_image(image: Any) -> Image.Image:
        opened = vision_utils.load_file(image)
        if isinstance(opened, BytesIO):
            opened = Image.open(opened)
        # Before ms-swift converts it, which loses some marks.
        return load(apply_exif_orientation(opened) if isinstance(opened, Image.Image) else opened)

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
            "orientation. Rollouts and training read them in the upright picture; ms-swift's SFT "
            "reads them in the picture as it is stored. If yours are of the stored picture, store "
            "the photograph upright (PIL.ImageOps.exif_transpose) and turn its boxes with it.",
            hash_id="boxes of turned photographs",
        )
