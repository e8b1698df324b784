"""What a prompt is: one hash of its words, its media and what its template makes of them. Pure.

Two rows with the same hash are the same prompt (docs/promises.md, G7). Groups never come from it
(G1): it keeps rows that differ out of one request (G3), and counts duplicates (G4).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from swift_grpo_ext.upstream.rows import RowFormError, column_of, read_row

PROMPT_FIELDS = (
    *("messages", "images", "videos", "audios", "tools", "objects"),
    "chat_template_kwargs",  # such as `enable_thinking`
)
"""What makes a prompt. Other columns (a solution, a difficulty) do not."""


def prompt_hash(row: object) -> str:
    """Return 32 hex digits that are equal for equal words and media, and else different.

    Args:
        row: a data set's row, or an object with the fields of `PROMPT_FIELDS`, such as
            ms-swift's `OnPolicySample` or `InferRequest`. Media count as they are given: a path by
            its name, bytes and base64 by their content, decoded images by their pixels.

    Raises:
        ValueError: a field holds what has no form as JSON; names it.
    """
    row = _without_parts(row)
    columns = row if isinstance(row, Mapping) else getattr(row, "extra", None) or {}
    fields: dict[str, Any] = {}
    for name in PROMPT_FIELDS:
        # `extra` holds the columns for which ms-swift's sample has no field.
        value = getattr(row, name) if hasattr(row, name) else columns.get(name)
        # A row without images has None, [] or no such column, by the way it came.
        is_empty = isinstance(value, (str, list, tuple, dict)) and not value
        if value is not None and not is_empty:
            fields[name] = value
    digest = xxhash.xxh3_128()  # 2 MB take 0.02 ms; BLAKE2b takes 1.3, for each of a group's rows

    def content(value: Any) -> str:
        """Binary values go into the digest, a mark of their size into the text."""
        if hasattr(value, "detach"):  # a torch tensor; this module imports no torch
            value = value.detach().cpu().numpy()
        if isinstance(value, (bytes, bytearray)):
            data = bytes(value)
        elif hasattr(value, "tobytes"):  # PIL images, numpy arrays
            # The form too: 8 x 2 pixels have the bytes of 4 x 4, and one palette's another's.
            pixels = value.tobytes()
            palette = value.getpalette() if hasattr(value, "getpalette") else None
            form = [getattr(value, name, None) for name in ("mode", "size", "shape", "dtype")]
            data = repr((*form, palette)).encode() + pixels
        else:
            data = repr(value).encode()
        digest.update(data)
        return f"<{type(value).__name__} of {len(data)} bytes>"

    try:
        text = json.dumps(fields, sort_keys=True, default=content, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise ValueError(
            f"A prompt's fields {', '.join(fields)} cannot be hashed ({e}): expected "
            "what JSON holds, bytes, arrays or images, and texts as keys."
        ) from e
    # JSON files may hold a lone half of a surrogate pair, which UTF-8 refuses.
    digest.update(text.encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()


def _without_parts(row: object) -> object:
    """Return a row whose media stand in parts of `content` with its media in columns: a prompt is
    one in either form."""
    messages = column_of(row, "messages") or ()
    if all(isinstance(column_of(message, "content"), (str, type(None))) for message in messages):
        return row
    try:
        read = read_row(row)
    except RowFormError:  # compared as it is given
        return row
    columns = {name: column_of(row, name) for name in PROMPT_FIELDS}
    extra = getattr(row, "extra", None) or {}
    media: dict[str, Any] = {
        "images": [  # as ms-swift's preprocessing writes the path of an image in a column
            {"bytes": None, "path": medium.value} if isinstance(medium.value, str) else medium.value
            for medium in read.shown_as("image")
        ],
        "videos": [medium.value for medium in read.shown_as("video")],
        "audios": [medium.value for medium in read.shown_as("audio")],
    }
    return {**columns, **extra, **media, "messages": read.messages}


def count_duplicates(hashes: Iterable[str]) -> int:
    """Return how many prompts repeat an earlier one."""
    return sum(count - 1 for count in Counter(hashes).values())
