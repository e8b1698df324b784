"""Makes what a record keeps of a medium: its name, and a small picture where it has no file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from contextlib import suppress
from typing import Any, NamedTuple

from PIL import Image

LONGEST_NAME = 2048
"""Characters; a longer string is a medium's content, not its path or URL."""

SIDE = 256
"""Pixels of a picture's longer side, at most: some 6 KB of WebP for a photograph."""

QUALITY = 75


class Picture(NamedTuple):
    """Stands in the record for a medium that a scheduler adds: a crop, a plot."""

    name: str
    """Its path or URL, or the digest of its content."""

    webp: bytes | None = None
    """The image, of at most `SIDE` pixels a side; None of what is no image or has a file."""


def picture_of(medium: Any) -> Picture:
    """Return what is kept of a medium, in any form that a request has: the same pixels have the
    same name, as an image of PIL's, as bytes and as base64."""
    with suppress(OSError, ValueError, Image.DecompressionBombError):  # no image, or a broken one
        image = _decode(medium)
        if image is not None:
            name = media_name(image.convert("RGB"))
            image.thumbnail((SIDE, SIDE))
            image.convert("RGB").save(content := io.BytesIO(), "webp", quality=QUALITY)
            return Picture(name, content.getvalue())
    return Picture(media_name(medium))


def _decode(medium: Any) -> Image.Image | None:
    if isinstance(medium, dict):
        medium = medium.get("bytes")
    if isinstance(medium, str):
        text = medium.partition(",")[2] if medium.startswith("data:") else medium
        try:
            medium = base64.b64decode(text, validate=True)
        except binascii.Error:  # a path, a URL
            return None
    if isinstance(medium, bytes):
        medium = Image.open(io.BytesIO(medium))
    return medium.copy() if isinstance(medium, Image.Image) else None


def media_name(media: Any) -> str:
    """Return a path or URL as it is, a digest of content or pixels, the frames' names of frames."""
    if isinstance(media, dict):
        media = media.get("path") or media.get("bytes")
    if isinstance(media, str) and len(media) <= LONGEST_NAME:
        return utf8(media)
    if isinstance(media, (list, tuple)):
        return " ".join(map(media_name, media))
    if isinstance(media, str):
        media = media.encode("utf-8", errors="backslashreplace")
    if hasattr(media, "tobytes"):  # a PIL image, an array; its `repr` holds its address or is cut
        form = [getattr(media, name, None) for name in ("mode", "size", "shape", "dtype")]
        media = repr(form).encode() + media.tobytes()
    content = media if isinstance(media, bytes) else repr(media).encode()
    return f"blake2b:{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def utf8(text: str) -> str:
    """Escape what UTF-8 cannot hold: a lone half of a surrogate pair is `\\\\ud83d`."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")
