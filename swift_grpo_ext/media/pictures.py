"""Makes what a record keeps of a medium: its name, and a small picture where it has no file."""

from __future__ import annotations

import base64
import hashlib
import io
from contextlib import suppress
from typing import NamedTuple

from PIL import Image

from swift_grpo_ext.sampling.prompt_hash import content_of

LONGEST_NAME = 2048  # characters; a longer string is a medium's content, not its path or URL
SIDE = 256  # pixels of a picture's longer side, at most: about 6 KB of WebP for a photograph
QUALITY = 75


class Picture(NamedTuple):
    """Stands in the record for a medium that a scheduler adds: a crop, a plot."""

    name: str  # its path or URL, or the digest of its content
    webp: bytes | None = None  # the image; None where it has a file, or is no image


def picture_of(medium: object) -> Picture:
    """Return what is kept of a medium. The same pixels have the same name as an image of PIL's, as
    bytes and as base64."""
    content = medium.get("bytes") if isinstance(medium, dict) else medium
    with suppress(OSError, ValueError, Image.DecompressionBombError):  # no image, or a broken one
        if isinstance(content, str):
            text = content.partition(",")[2] if content.startswith("data:") else content
            content = base64.b64decode(text, validate=True)  # raises for a path or URL
        if isinstance(content, bytes):
            content = Image.open(io.BytesIO(content))
        if isinstance(content, Image.Image):
            # By its pixels, so that a PNG, its base64 and the decoded image are one.
            name = media_name(content.convert("RGB"))
            small = content.copy()  # `thumbnail` shrinks in place, and this is the scheduler's
            small.thumbnail((SIDE, SIDE))
            small.convert("RGB").save(webp := io.BytesIO(), "webp", quality=QUALITY)
            return Picture(name, webp.getvalue())
    return Picture(media_name(medium))


def media_name(media: object) -> str:
    """Return a path or URL as it is, a digest of content or pixels, the frames' names of frames."""
    if isinstance(media, dict):
        media = media.get("path") or media.get("bytes")
    if isinstance(media, str) and len(media) <= LONGEST_NAME:
        return utf8(media)
    if isinstance(media, (list, tuple)):
        return " ".join(map(media_name, media))
    content = utf8(media).encode() if isinstance(media, str) else content_of(media)
    return f"blake2b:{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def utf8(text: str) -> str:
    """Escape what UTF-8 cannot hold: a lone half of a surrogate pair is `\\\\ud83d`."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")
