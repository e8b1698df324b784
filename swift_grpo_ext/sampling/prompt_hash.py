"""Computes a hash of a prompt's words, media and template settings (docs/promises.md, G7).

It does not form groups (G1). It keeps different rows out of one request (G3), and finds duplicates
(G4).
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import xxhash

from swift_grpo_ext.upstream.rows import KINDS, RowFormError, column_of, read_row

PROMPT_FIELDS = (
    *("messages", "images", "videos", "audios", "tools", "objects"),
    "chat_template_kwargs",  # such as `enable_thinking`
)
"""The columns that make a prompt. Other columns (a solution, a difficulty) do not count."""


def prompt_hash(row: object) -> str:
    """Return 32 hex digits that are equal for equal words and media, and else different.

    `row` is a data set's row, or an object with its columns as attributes or in `extra` (ms-swift's
    samples and requests). A path counts by its name, bytes and base64 by their content, a decoded
    image by its pixels. Raises ValueError, with the fields, if one cannot be written as JSON.
    """
    # Depending on its source, a row without images has None, [] or no such column.
    fields = {
        name: value
        for name, value in _prompt_columns(row).items()
        if not isinstance(value, (str, list, tuple, dict, type(None))) or value
    }
    digest = xxhash.xxh3_128()  # 2 MB take 0.02 ms (BLAKE2b: 1.3 ms), once for each row

    def content(value: Any) -> str:
        """Add a binary value to the digest; return a mark with its size for the text."""
        digest.update(data := content_of(value))
        return f"<{type(value).__name__} of {len(data)} bytes>"

    try:
        text = json.dumps(fields, sort_keys=True, default=content, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(
            f"A prompt's fields {', '.join(fields)} cannot be hashed ({e}): expected "
            "JSON values, bytes, arrays or images, and texts as keys."
        ) from e
    # JSON files may hold a lone half of a surrogate pair, which UTF-8 refuses.
    digest.update(text.encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()


def _prompt_columns(row: object) -> dict[str, Any]:
    """Return the columns that make a prompt. Media in parts of `content` move to columns."""
    extra = getattr(row, "extra", None) or {}  # columns for which ms-swift's sample has no field
    columns = {name: extra.get(name, column_of(row, name)) for name in PROMPT_FIELDS}
    contents = [column_of(message, "content") for message in columns["messages"] or ()]
    if all(content is None or isinstance(content, str) for content in contents):
        return columns
    with suppress(RowFormError):  # then hash the columns as they are
        read = read_row(row)
        columns["messages"] = read.messages
        columns |= {f"{kind}s": [medium.value for medium in read.shown_as(kind)] for kind in KINDS}
        columns["images"] = [  # as ms-swift's preprocessing writes a path in a column
            {"bytes": None, "path": image} if isinstance(image, str) else image
            for image in columns["images"]
        ]
    return columns


def content_of(value: Any) -> bytes:
    """Return bytes that identify a value: its content, its pixels and their form, or its `repr`."""
    if hasattr(value, "detach"):  # a torch tensor; this module imports no torch
        value = value.detach().cpu().numpy()
    if isinstance(value, bytes):
        return value
    if not hasattr(value, "tobytes"):
        return repr(value).encode()
    # Images of 8 x 2 and of 4 x 4 pixels, or with two palettes, may have equal bytes: add the form.
    form = [getattr(value, name, None) for name in ("mode", "size", "shape", "dtype")]
    palette = value.getpalette() if hasattr(value, "getpalette") else None
    return repr((*form, palette)).encode() + bytes(value.tobytes())
