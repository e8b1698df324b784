"""Makes a record's entry for a medium: its name, and a small picture if it has no file."""

from __future__ import annotations

import base64
import hashlib
import io
from contextlib import suppress
from typing import NamedTuple

from PIL import Image

from swift_grpo_ext.sampling.prompt_hash import content_of

LONGEST_NAME = 2048  # characters; a longer string is content, not a path or URL
SIDE = 256  # largest side of a picture, in pixels: about 6 KB of WebP for a photograph
QUALITY = 75


class Picture(NamedTuple):
    """A record's entry for a medium, such as a crop or a plot that a scheduler adds."""

    name: str  # path or URL, or a digest of the content
    webp: bytes | None = None  # a small picture; None if the medium has a file, or is no image


def picture_of(medium: object) -> Picture:
    """Return a medium's entry. Equal pixels get equal names, whether they come as a PIL image,
    bytes or base64."""
    content = medium.get("bytes") if isinstance(medium, dict) else medium
    with suppress(OSError, ValueError, Image.DecompressionBombError):  # not a valid image
        if isinstance(content, str):
            text = content.partition(",")[2] if content.startswith("data:") else content
            content = base64.b64decode(text, validate=True)  # raises for a path or URL
        if isinstance(content, bytes):
            content = Image.open(io.BytesIO(content))
        if isinstance(content, Image.Image):
            # From pixels, so that a PNG, its base64 and the decoded image have one name.
            name = media_name(content.convert("RGB"))
            small = content.copy()  # `thumbnail` works in place; the scheduler owns the image
            small.thumbnail((SIDE, SIDE))
            small.convert("RGB").save(webp := io.BytesIO(), "webp", quality=QUALITY)
            return Picture(name, webp.getvalue())
    return Picture(media_name(medium))


def media_name(media: object) -> str:
    """Return a path or URL as it is, a digest of content or pixels, or the names of all frames."""
    if isinstance(media, dict):
        media = media.get("path") or media.get("bytes")
    if isinstance(media, str) and len(media) <= LONGEST_NAME:
        return utf8(media)
    if isinstance(media, (list, tuple)):
        return " ".join(map(media_name, media))
    content = utf8(media).encode() if isinstance(media, str) else content_of(media)
    return f"blake2b:{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def utf8(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode, as in `\\\\ud83d`."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")
