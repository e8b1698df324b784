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
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from swift_grpo_ext.checks.finding import Findings, error, warning
from swift_grpo_ext.sampling.prompt_hash import count_duplicates, prompt_hash

if TYPE_CHECKING:
    from swift.template import Template

Row = Mapping[str, Any]

IMAGE_MARK = "<image>"
MEDIA = ("images", "videos", "audios")
MAX_IMAGES_OPENED = 20_000
"""Rows of a larger data set that are chosen at random and looked at."""


# --- all rows ---


def check_rows(
    dataset: Sequence[Row], *, setting: str, expects_media: bool, deletes_bad_rows: bool = False
) -> Findings:
    """Refuse the first row whose images cannot be read; warn of a data set without any image.

    Args:
        dataset: rows of ms-swift, with random access.
        setting: the flag that named the data set.
        expects_media: whether the model takes media, so that their absence is worth a warning.
        deletes_bad_rows: whether ms-swift replaces bad rows (`--truncation_strategy delete`): their
            number is a warning then.
    """
    numbers = _chosen(len(dataset))
    has_media = False
    bad: list[str] = []
    for i in numbers:
        row = dataset[i]
        has_media = has_media or any(row.get(kind) for kind in MEDIA)
        if reason := bad_media(row):
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
            f"{len(bad)} of {len(numbers)} rows that were looked at cannot be used, the first: "
            f"{bad[0]}. Whenever such a row is met, another takes its place "
            "(--truncation_strategy delete).",
        )
    if expects_media and not has_media and not bad:
        yield warning(
            setting,
            "no row holds `images` (or `videos`, `audios`), and the model takes them.",
            'If they should: add the column, e.g. {"messages": [...], "images": ["digit.png"]}, or '
            "map yours with --columns.",
        )


def check_duplicates(dataset: Sequence[Row], *, setting: str) -> Findings:
    """Warn of rows whose prompt, media included, stands twice in the data set
    (docs/promises.md, G4)."""
    numbers = _chosen(len(dataset))
    duplicates = count_duplicates(prompt_hash(prompt_of(dataset[i])) for i in numbers)
    if duplicates:
        yield warning(
            setting,
            f"{duplicates} of {len(numbers)} rows repeat a prompt that stands earlier in the data "
            "set, media included; each gets noise of its own.",
        )


def _chosen(length: int) -> Sequence[int]:
    """Return at most `MAX_IMAGES_OPENED` indices in order, chosen at random with a fixed seed.

    A fixed stride would meet the same kind of row again and again where kinds alternate.
    """
    if length <= MAX_IMAGES_OPENED:
        return range(length)
    return sorted(random.Random(0).sample(range(length), MAX_IMAGES_OPENED))


# --- one row ---


def prompt_of(row: Row) -> dict[str, Any]:
    """Return a row without the answer that it ends with: rollouts never see it."""
    messages = list(row.get("messages") or ())
    if messages and messages[-1].get("role") == "assistant":
        messages.pop()
    return {**row, "messages": messages}


def question_of(row: Row) -> str:
    """Return the start of a row's last message, which names it in errors.

    A number would mislead: ms-swift shuffles as it loads.
    """
    messages = row.get("messages") or [{}]
    return str(messages[-1].get("content", ""))[:60]


def bad_media(row: Row) -> str | None:
    """Say what is wrong with a row's images, or which video or audio is missing; None where nothing
    is.

    More images than marks are right: ms-swift puts the marks in front.
    """
    images = row.get("images") or ()
    if isinstance(images, (str, bytes, Mapping)):
        images = [images]  # as ms-swift takes it
    contents = (message.get("content") for message in prompt_of(row)["messages"])
    marks = sum(content.count(IMAGE_MARK) for content in contents if isinstance(content, str))
    if marks > len(images):
        return f"{marks} {IMAGE_MARK} marks stand for {len(images)} images"
    for image in images:
        if reason := unreadable(image):
            source = image.get("path") if isinstance(image, Mapping) else image
            return f"image {str(source)[:255]!r} {reason}"
    for kind in ("video", "audio"):
        items = row.get(f"{kind}s") or ()
        for item in items if isinstance(items, (list, tuple)) else [items]:
            if is_missing(item):
                return f"{kind} {str(item)[:255]!r} does not exist"
    return None


# --- one image ---


def unreadable(image: object) -> str | None:
    """Say why an image cannot be read; None where it can, or where only fetching it would tell.

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
    except Exception as e:  # PIL's plugins raise whatever they stumble over in a broken header
        return f"is not an image that can be read ({type(e).__name__}: {e})"


def is_missing(item: object) -> bool:
    """Return whether a video or an audio is a local path of which there is no file."""
    try:
        content = media_content(item)
        return isinstance(content, Path) and not content.exists()
    except (ValueError, OSError):  # no base64, no path: ms-swift says what it is
        return False


def media_content(image: object) -> Path | io.BytesIO | None:
    """Return a local file or the content; None for what ms-swift alone reads (URLs, PIL images)."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return io.BytesIO(image)
    if not isinstance(image, str) or image.startswith(("http://", "https://")):
        return None
    if image.startswith("data:"):
        return io.BytesIO(base64.b64decode(image.partition(",")[2]))
    # `Path.expanduser` raises where there is no such user, whose name a file may have.
    path = Path(os.path.expanduser(image.removeprefix("file://")))  # noqa: PTH111
    if len(image) > 255 and not path.suffix:  # no file's name is longer: base64
        return io.BytesIO(base64.b64decode(image))
    root = os.environ.get("ROOT_IMAGE_DIR")  # ms-swift's own setting, for relative paths
    return Path(root) / path if root and not path.exists() else path


# --- encoding ---


def encoding_error(template: Template, row: Row) -> str | None:
    """Say why a row's prompt cannot be encoded, as `--truncation_strategy delete` sees it."""
    import torch
    from swift.utils import remove_response

    if not row.get("messages"):
        return "it has no messages"
    if bad := bad_media(row):
        return bad
    prompt = {**row, "messages": [dict(message) for message in row["messages"]]}
    remove_response(prompt["messages"])
    try:
        # Once: `template.encode` would try three times, and readers of URLs have their own retries.
        with torch.inference_mode():
            inspect.unwrap(type(template).encode)(template, prompt)
    except Exception as e:  # templates, processors and readers of media raise many kinds
        return reason_of(e)
    return None


def reason_of(error: Exception) -> str:
    """Return an error's type and text; the line that raised it where it has no text."""
    text = str(error)
    if not text:
        *_, last = traceback.extract_tb(error.__traceback__)
        text = f"{Path(last.filename).name}, line {last.lineno}: {last.line}"
    return f"{type(error).__name__}: {text}"
