"""What vLLM makes of an image that is marked as turned."""

from __future__ import annotations

from typing import Any

from vllm.multimodal import image as upstream

TURNS = hasattr(upstream, "normalize_image")
"""vLLM 0.23 takes images as they are stored, 0.25 turns them."""


def as_vllm_sees(image: Any) -> Any:
    """The image, turned by its EXIF orientation where this vLLM does that."""
    return upstream.normalize_image(image) if TURNS else image
