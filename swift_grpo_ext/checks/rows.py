"""Checks of a data set's rows: are the images there, and are they images?

Rows are ms-swift's own, after its column mapping: `messages`, and `images` as `{"bytes", "path"}`.
Only headers are read, so that tens of thousands of images take seconds.
"""

from __future__ import annotations

import base64
import inspect
import io
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tqdm import tqdm

from swift_grpo_ext.checks.finding import Findings, error, warning
from swift_grpo_ext.sampling.prompt_hash import count_duplicates, prompt_hash

IMAGE_MARK = "<image>"
MEDIA = ("images", "videos", "audios")
_MEDIA_TYPES = (list, tuple, str, bytes, Mapping)
MAX_IMAGES_OPENED = 20_000
"""Of a larger data set, that many rows are drawn at random and opened."""
PROGRESS_ROWS = 2_000


def check_rows(
    dataset: Sequence[Mapping[str, Any]],
    *,
    setting: str,
    expects_media: bool,
    deletes_bad_rows: bool = False,
) -> Findings:
    """The first image that cannot be read, with its row; and a data set without any image.

    Args:
        dataset: rows of ms-swift, with random access.
        setting: the flag that named the data set.
        expects_media: warn of a data set without a single image, video or audio.
        deletes_bad_rows: `--truncation_strategy delete`: say how many there are, and go on.
    """
    rows = _drawn(len(dataset), MAX_IMAGES_OPENED)
    has_media = False
    bad: list[str] = []
    for i in tqdm(rows, desc=f"Checking --{setting}", disable=len(rows) < PROGRESS_ROWS):
        row = dataset[i]
        has_media = has_media or _has_media(row)
        reason = bad_media(row)
        if reason:
            bad.append(f"in the row that asks {question_of(row)!r}, {reason}")
            if not deletes_bad_rows:
                break
    if bad and not deletes_bad_rows:
        yield error(
            setting,
            f"{bad[0]}.",
            "Correct the row, give paths that hold from the working directory or from "
            "ROOT_IMAGE_DIR, or have such prompts replaced with --truncation_strategy delete.",
        )
    elif bad:
        yield warning(
            setting,
            f"{len(bad)} of {len(rows)} rows that were looked at cannot be used, the first: "
            f"{bad[0]}. Whenever such a row is met, another takes its place "
            "(--truncation_strategy delete).",
        )
    if expects_media and not has_media:
        yield warning(
            setting,
            "no row holds `images` (or `videos`, `audios`), though the model takes them: it is "
            'trained on text alone. Add the column, e.g. {"messages": [...], "images": '
            '["digit.png"]}, or map yours with --columns.',
        )


def check_duplicates(dataset: Sequence[Mapping[str, Any]], *, setting: str) -> Findings:
    """Tell of rows whose prompt, media included, stands earlier too (docs/promises.md, G4).

    Of a large data set, the rows that `check_rows` looks at are compared.
    """
    rows = _drawn(len(dataset), MAX_IMAGES_OPENED)
    progress = tqdm(rows, desc=f"Comparing --{setting}", disable=len(rows) < PROGRESS_ROWS)
    duplicates = count_duplicates(prompt_hash(prompt_of(dataset[i])) for i in progress)
    if duplicates:
        yield warning(
            setting,
            f"{duplicates} of {len(rows)} rows repeat a prompt that stands earlier in the data "
            "set, media included; each draws noise of its own.",
        )


def _has_media(row: Any) -> bool:
    media = [row.get(kind) for kind in MEDIA] if isinstance(row, Mapping) else []
    return any(isinstance(m, _MEDIA_TYPES) and len(m) > 0 for m in media)


def prompt_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the answer that it ends with: rollouts never see it."""
    messages = _messages(row)
    if messages and messages[-1].get("role") == "assistant":
        messages.pop()
    return {**row, "messages": messages}


def _messages(row: Mapping[str, Any]) -> list[Any]:
    """A row's messages; none where it holds something else, of which `bad_media` tells."""
    messages = row.get("messages")
    if not isinstance(messages, (list, tuple)):
        return []
    return list(messages) if all(isinstance(m, Mapping) for m in messages) else []


def bad_media(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a row's images, in words; None where nothing is.

    More images than marks are right: ms-swift puts the marks in front.
    """
    if malformed := _malformed(row):
        return malformed
    images = row.get("images") or ()
    if isinstance(images, (str, bytes, Mapping)):
        images = [images]  # as ms-swift takes it
    contents = (message.get("content") for message in prompt_of(row)["messages"])
    marks = sum(content.count(IMAGE_MARK) for content in contents if isinstance(content, str))
    if marks > len(images):
        return f"{marks} {IMAGE_MARK} marks stand for {len(images)} images"
    reasons = ((image, unreadable(image)) for image in images)
    return next((f"image {_source(image)!r} {reason}" for image, reason in reasons if reason), None)


def _malformed(row: Any) -> str | None:
    """What is no row of ms-swift's, in words."""
    if not isinstance(row, Mapping):
        return f"there is {row!r:.60}, which is no row"
    messages = row.get("messages")
    is_empty = isinstance(messages, (list, tuple)) and not messages
    if messages is not None and not _messages(row) and not is_empty:
        return (
            f"`messages` is {messages!r:.60}; expected a list such as "
            '[{"role": "user", "content": "..."}]'
        )
    for kind in MEDIA:
        media = row.get(kind)
        if media is not None and not isinstance(media, _MEDIA_TYPES):
            return f"`{kind}` is {media!r:.60}; expected a list of paths"
    return None


def unreadable(image: Any) -> str | None:
    """Why an image cannot be read, in words; None where it can, or where only a look-up would tell.

    Args:
        image: a path, a URL, a data URL, base64 text, raw bytes, or ms-swift's
            `{"bytes": ..., "path": ...}`.
    """
    try:
        content = media_content(image)
        if content is None:
            return None
        if isinstance(content, Path) and content.exists() and not content.is_file():
            return "is not a file"  # a pipe would be waited for
        with Image.open(content):
            return None
    except FileNotFoundError:
        return "does not exist"
    except Exception as e:  # of a broken header PIL's plugins raise whatever they stumble over
        return f"is not an image that can be read ({type(e).__name__}: {e})"


def media_content(image: Any) -> Path | io.BytesIO | None:
    """A local file or the content; None for what ms-swift alone reads (URLs, PIL images)."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return io.BytesIO(image)
    if not isinstance(image, str) or image.startswith(("http://", "https://")):
        return None
    if image.startswith("data:"):
        return io.BytesIO(base64.b64decode(image.partition(",")[2]))
    path = Path(image.removeprefix("file://")).expanduser()
    root = os.environ.get("ROOT_IMAGE_DIR")  # ms-swift's own setting, for relative paths
    if root and not path.exists():
        path = Path(root) / path
    is_base64 = len(image) > 255 and not path.suffix
    return io.BytesIO(base64.b64decode(image)) if is_base64 else path


def _source(image: Any) -> str:
    """How to name an image in an error: its path, or a short piece of what stands there."""
    if isinstance(image, Mapping):
        image = image.get("path") or image.get("bytes")
    text = image if isinstance(image, str) else repr(image)
    return text if len(text) <= 255 else f"{text[:40]}..."


def question_of(row: Mapping[str, Any]) -> str:
    """The start of a row's last message. A number would mislead: ms-swift shuffles as it loads."""
    messages = (_messages(row) if isinstance(row, Mapping) else None) or [{}]
    return str(messages[-1].get("content", ""))[:60]


def _drawn(length: int, most: int) -> Sequence[int]:
    """At most `most` indices of `range(length)`, in order: drawn at random, with a fixed seed.

    A fixed stride would meet the same kind of row again and again where kinds alternate.
    """
    if length <= most:
        return range(length)
    return sorted(random.Random(0).sample(range(length), most))


def encoding_error(template: Any, row: Mapping[str, Any]) -> str | None:
    """Why a row's prompt cannot be encoded, as `--truncation_strategy delete` sees it."""
    if not row.get("messages"):
        return "it has no messages"
    if bad := bad_media(row):
        return bad
    try:
        encode_prompt(template, row)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return None


def encode_prompt(template: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """Encode a row's prompt, once: `template.encode` would try three times, and what loads a URL
    has retries of its own."""
    import torch
    from swift.utils import remove_response

    prompt = {**row, "messages": [dict(message) for message in row["messages"]]}
    remove_response(prompt["messages"])
    with torch.inference_mode():
        encoded: dict[str, Any] = inspect.unwrap(type(template).encode)(template, prompt)
    return encoded
