"""The images of a run's prompts: as files hold them, as the model saw them, small.

A page names an image by its prompt's group and its number there, never by a path; what is served
is an image that the run's own record names. A file that is no image (a symlink to one that is
none, too) is not served, and nothing is fetched from elsewhere.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from swift_grpo_ext.checks.rows import media_content

TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif",
         "BMP": "image/bmp"}  # fmt: skip
"""What browsers show; others are served as PNG. None of them can hold a script."""

MAX_PIXELS = 100_000_000
THUMBNAIL = 112
SIZES = ("full", "seen", "small")


class NoImageError(ValueError):
    """A medium cannot be shown; says why."""


def image_bytes(name: str, size: str, limits: Mapping[str, int] | None) -> tuple[bytes, str]:
    """An image's bytes and their type.

    Args:
        name: as the sample log has it; relative to where the training was started, so that the
            page has to be started there, too.
        size: one of `SIZES`.
        limits: `processor_limits`; for `seen`.

    Raises:
        NoImageError: it is no image on this machine, or too large.
    """
    path = local_file(name)
    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise NoImageError(f"{image.width} x {image.height} pixels are too many to show.")
            image.load()
            if size == "full" and image.format in TYPES:
                return path.read_bytes(), TYPES[image.format]
            return _encode(image, size, limits)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as e:
        raise NoImageError(f"{path.name} is no image that can be read.") from e


def local_file(name: str) -> Path:
    """Raises NoImageError where it is not on this machine."""
    path = media_content(name)
    if not isinstance(path, Path):
        raise NoImageError("The record holds its digest or its address only.")
    with suppress(OSError, ValueError):  # a name that no file can have
        if path.is_file():
            return path
    raise NoImageError(f"{path.name[:80]} is not on this machine.")


def _encode(image: Image.Image, size: str, limits: Mapping[str, int] | None) -> tuple[bytes, str]:
    shown = image.convert("RGB")
    if size == "seen" and limits:
        shown = shown.resize(seen_size(*shown.size, limits), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    if size == "small":
        shown.thumbnail((THUMBNAIL, THUMBNAIL))
        shown.save(buffer, "JPEG", quality=85)
        return buffer.getvalue(), "image/jpeg"
    shown.save(buffer, "PNG")
    return buffer.getvalue(), "image/png"


def image_size(name: str) -> tuple[int, int]:
    """Width and height in pixels; raises NoImageError."""
    try:
        with Image.open(local_file(name)) as image:
            return image.size
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as e:
        raise NoImageError(f"{name[-80:]} is no image that can be read.") from e


def processor_limits(run_dir: Path, settings: Mapping[str, Any]) -> dict[str, int] | None:
    """What decides the size at which Qwen-VL models see an image: `factor` in pixels, `min_pixels`,
    `max_pixels`, and `first_pixels` to which ms-swift scales before (0 for none). None for models
    whose processor works otherwise, or is not on this machine."""
    for folder in (*sorted(run_dir.glob("checkpoint-*")), Path(str(settings.get("model", "")))):
        for name in ("preprocessor_config.json", "processor_config.json"):
            try:
                found = json.loads((folder / name).read_text(encoding="utf-8"))
                found = found.get("image_processor", found)
                if not str(found["image_processor_type"]).startswith("Qwen2VL"):
                    return None
                edges = found.get("size") or {}
                low = edges.get("shortest_edge") or found["min_pixels"]
                high = edges.get("longest_edge") or found["max_pixels"]
                return {
                    "factor": int(found["patch_size"]) * int(found["merge_size"]),
                    "min_pixels": int(os.environ.get("MIN_PIXELS") or low),
                    "max_pixels": int(os.environ.get("MAX_PIXELS") or high),
                    "first_pixels": int(settings.get("max_pixels") or 0),
                }
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
    return None


def seen_size(width: int, height: int, limits: Mapping[str, int]) -> tuple[int, int]:
    """Width and height of an image as a Qwen-VL processor has it: multiples of `factor`, between
    the two limits. Source: `smart_resize` of transformers' image_processing_qwen2_vl.py, behind
    ms-swift's `rescale_image`."""
    first, factor = limits["first_pixels"], limits["factor"]
    if 0 < first < width * height:
        ratio = width / height
        height = int(math.sqrt(first / ratio))
        width = int(math.sqrt(first / ratio) * ratio)
    sides = [round(side / factor) * factor for side in (width, height)]
    if sides[0] * sides[1] > limits["max_pixels"]:
        scale = math.sqrt(width * height / limits["max_pixels"])
        sides = [max(factor, math.floor(s / scale / factor) * factor) for s in (width, height)]
    elif sides[0] * sides[1] < limits["min_pixels"]:
        scale = math.sqrt(limits["min_pixels"] / (width * height))
        sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
    return sides[0], sides[1]
