"""Checks of a data set's rows: do the images exist, and can they be read?

Rows are ms-swift's own, after its column mapping: `messages`, and `images` as `{"bytes", "path"}`.
"""

from __future__ import annotations

import base64
import csv
import inspect
import io
import json
import os
import random
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from PIL import Image

from swift_grpo_ext.checks.finding import Findings, error, warning
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.upstream.placeholders import MARKS, placeholder_texts
from swift_grpo_ext.upstream.rows import (
    COLUMNS,
    FILE,
    KINDS,
    Medium,
    ReadRow,
    RowFormError,
    column_of,
    read_row,
    short,
    source_of,
    teacher_view,
)

if TYPE_CHECKING:
    from swift.template import Template

Row = Mapping[str, Any]

MAX_ROWS = 20_000  # of a larger data set, this many rows are checked, drawn at random
MAX_CONTENT = 2**31  # bytes of images within the rows: the check ends once it has read this much
MAX_SEARCHED = 2**26  # bytes: a larger file is not searched for a row; this size takes 0.5 s
SHOWN_MEDIA = 3  # media that an error names at most

# Readers of the files that are searched for a row, by suffix.
READERS: Mapping[str, Callable[[IO[str]], Iterable[object]]] = {
    ".jsonl": lambda file: (json.loads(line or "null") for line in map(str.strip, file)),
    ".json": json.load,
    ".csv": csv.DictReader,
}
ROLES = {"system", "user", "assistant", "tool"}
EXPECTED = {
    "image": 'a path, URL, data URL, base64, or {"bytes": ...} or {"path": ...}',
    "video": 'a path or URL, or a part {"type": "video", "video": ["1.png", ...]} of its frames',
    "audio": "a path, URL, or base64",
}
REMEDY = (
    "Correct the row (paths are relative to the working directory, or to ROOT_IMAGE_DIR), or have "
    "such prompts replaced with --truncation_strategy delete."
)


def check_rows(
    dataset: Sequence[Row],
    *,
    setting: str,
    expects_media: bool,
    deletes_bad_rows: bool = False,
    placeholders: Collection[str] = (),
) -> Findings:
    """Refuse the first row with a `row_fault`, or count such rows if ms-swift
    `deletes_bad_rows`. Warn of a data set without media if the model `expects_media`, of marks
    without media, and of repeated prompts (docs/promises.md, G4)."""
    numbers: Sequence[int] = range(len(dataset))
    if len(numbers) > MAX_ROWS:
        # A fixed stride could meet only one kind of row if kinds alternate. The fixed seed makes
        # each run draw the same rows.
        numbers = random.Random(0).sample(numbers, MAX_ROWS)
    num_bytes, has_media = 0, False
    bad: list[str] = []
    unmatched: list[str] = []
    hashes: list[str] = []
    for i in numbers:
        if num_bytes > MAX_CONTENT:
            break
        row = dataset[i]
        media = media_of(row)
        num_bytes += sum(len(c) for m in media if isinstance(c := source_of(m.value), bytes))
        has_media = has_media or bool(media)
        if fault := row_fault(row, placeholders):
            bad.append(fault if bad else f"{name_of(row)}: {fault}.")
            if not deletes_bad_rows:
                yield error(setting, bad[0], REMEDY)
                return
        # A text may ask about the tag <video>.
        elif expects_media and (surplus := unmatched_marks(read_row(prompt_of(row)), ["<image>"])):
            unmatched.append(surplus if unmatched else f"{name_of(row)}: {surplus}.")
        hashes.append(prompt_hash(prompt_of(row)))
    num_rows = len(hashes)
    if bad:
        text = f"{len(bad)} of {num_rows} rows cannot be used; training replaces them. The first:"
        yield warning(setting, f"{text} {bad[0]}")
    if unmatched:
        text = f"{len(unmatched)} of {num_rows} rows have marks without media, which stay text."
        remedy = "Correct the rows if a medium is missing; a question about the tag is right."
        yield warning(setting, f"{text} The first: {unmatched[0]}", remedy)
    if expects_media and not has_media and not bad:
        text = "no row holds `images` (or `videos`, `audios`), and the model takes them."
        yield warning(setting, text, "If rows have them, map their column with --columns.")
    if repeated := len(hashes) - len({*hashes}):
        text = f"{repeated} of {num_rows} rows repeat an earlier row's prompt, media included;"
        yield warning(setting, f"{text} each gets noise of its own.")


# --- one row ---


def media_of(row: object) -> list[Medium]:
    """Return a row's media; [] if ms-swift cannot read the row."""
    try:
        return read_row(row).media
    except RowFormError:
        return []


def prompt_of(row: Any) -> Any:
    """Return a row without the answer at its end, which rollouts never see; samples and requests
    as they are."""
    if not isinstance(row, Mapping):
        return row
    messages = list(row.get("messages") or ())
    if messages and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
        messages.pop()
    return {**row, "messages": messages}


def question_of(row: object) -> str:
    """Return the start of a row's last question."""
    messages = column_of(prompt_of(row), "messages")
    *_, last = messages if messages and isinstance(messages, (list, tuple)) else [None]
    content = column_of(last, "content") or ""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping)]
        content = "".join(str(part.get("text") or part.get("content") or "") for part in parts)
    return str(content)[:60]


def name_of(row: object) -> str:
    """Return a row's name in messages: its place in its file, and its question."""
    question, place = question_of(row), place_of(row)
    if not place:
        return f"the row that asks {question!r}"
    return f"{place} (which asks {question!r})" if question else place


def place_of(row: object) -> str:
    """Return a row's number, from 1, and its file; "" if it is not found."""
    # ms-swift records only a row's file, and shuffles rows (4.6, dataset/loader.py,
    # `_inject_dataset_routing_tag`): the row is found by its texts.
    columns = row if isinstance(row, Mapping) else {**getattr(row, "__dict__", {})}
    columns = {**columns, **(columns.get("extra") or {})}  # a sample's other columns
    path = Path(str(columns.get("dataset", ""))).expanduser()
    if path.suffix not in READERS or not path.is_file() or path.stat().st_size > MAX_SEARCHED:
        return ""
    prompt = {*_texts([columns.get(name) for name in ("messages", *COLUMNS)])} - ROLES
    known = {*_texts([*columns.values()])}
    found: list[tuple[int, int]] = []
    with suppress(ValueError), path.open(encoding="utf-8", newline="") as file:
        for number, written in enumerate(READERS[path.suffix](file), 1):
            texts = {*_texts(written)}
            if prompt <= texts:  # several rows may match: take the one with the fewest others
                found.append((len(texts - known), number))
    return f"row {min(found)[1]} of {path}" if found else ""


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts within lists and dictionaries, and numbers as the texts of a CSV file."""
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple)):
        for each in inner:
            yield from _texts(each)
    elif isinstance(value, (str, int, float)):
        yield str(value)


def row_fault(row: object, placeholders: Collection[str] = ()) -> str | None:
    """Return the fault of a row's prompt, or of a teacher's view of it: field, value and expected
    form; None if there is none. `placeholders` are the model's own tokens for media.
    `encoding_error` finds faults beyond the headers of images."""
    row = prompt_of(row)
    if fault := _view_fault(row, placeholders):
        return fault
    view = teacher_view(row)
    fault = _view_fault(view, placeholders) if view else None
    return fault and f"the teacher's view: {fault}"


def _view_fault(row: object, placeholders: Collection[str]) -> str | None:
    try:
        read = read_row(row)
    except RowFormError as e:
        return str(e)
    for where, text in read.texts():
        if typed := [token for token in placeholders if token in text and token not in MARKS]:
            return (
                f"{where}: holds {typed[0]!r}, which is the model's own token for a medium; "
                "expected text, with <image>, <video> or <audio> where a medium is shown"
            )
    if surplus := unmatched_marks(read, placeholders):
        return f"{surplus}; expected equal numbers, since the mark is a token of this model"
    for medium in read.media:
        if reason := _medium_fault(medium):
            return f"{medium.field}: {reason}"
    return None


def unmatched_marks(read: ReadRow, marks: Collection[str]) -> str:
    """Return a text if a kind of medium has more of these marks than media; else ""."""
    for kind in KINDS:
        given, marked = read.count(kind)
        if marked > given and f"<{kind}>" in marks:
            return f"messages: {marked} <{kind}> marks stand for {given} {kind}s"
    return ""


def _medium_fault(medium: Medium) -> str | None:
    is_image = medium.kind == "image"
    value = source_of(medium.value) if is_image else medium.value
    if value is None or value == "":
        return f"is {short(value)}; expected a path, or [] for no medium"
    if medium.kind == "video" and isinstance(value, list) and medium.field.startswith("messages"):
        frames = (Medium("image", medium.field, frame) for frame in value)
        return next(filter(None, map(_medium_fault, frames)), None)
    if not isinstance(value, (str, bytes, Image.Image) if is_image else str):
        return f"is {short(medium.value)}; expected {EXPECTED[medium.kind]}"
    reason = unreadable(value, is_image=is_image)
    return reason and f"{short(medium.value)} {reason}"


def unreadable(medium: object, *, is_image: bool = True) -> str | None:
    """Return why a medium cannot be read; None if it can. URLs, and the content of videos and
    audios, are not read here."""
    try:
        content = media_content(medium)
        if isinstance(content, Path) and not content.is_file():  # a pipe would block
            return "is not a file" if content.exists() else "does not exist"
        if is_image and content is not None:
            # It reads the header, and no pixel: tens of thousands of images take seconds.
            Image.open(content).close()
    except Exception as e:  # PIL's plugins raise many kinds
        return f"is not an image that can be read ({reason_of(e)})" if is_image else None
    return None


def media_content(medium: object) -> Path | IO[bytes] | None:
    """Return a local file or the content; None for URLs and PIL images, which ms-swift reads."""
    if isinstance(medium, bytes):
        return io.BytesIO(medium)
    if not isinstance(medium, str) or medium.strip().startswith(("http://", "https://")):
        return None
    medium = medium.strip()
    # `Path.expanduser` raises for a file such as "~a.png": no user has that name.
    path = os.path.expanduser(medium.removeprefix(FILE))  # noqa: PTH111
    root = os.environ.get("ROOT_IMAGE_DIR")  # ms-swift's own setting, for relative paths
    if root and not os.path.exists(path):  # noqa: PTH110
        path = str(Path(root, path))
    # Base64 has no dot.
    if medium.startswith("data:") or not ("." in medium or os.path.exists(path)):  # noqa: PTH110
        with suppress(ValueError):
            return io.BytesIO(base64.b64decode(medium.partition(";base64,")[2] or medium))
    return Path(path)


# --- encoding ---


class RowError(ValueError):
    """A row's prompt cannot be encoded."""

    def __init__(self, row: object, fault: str) -> None:
        self.fault = fault
        super().__init__(f"{name_of(row)} cannot be encoded ({fault}). {REMEDY}")

    def __reduce__(self) -> Any:
        return ValueError, self.args  # another process gets the text


def encoding_error(
    template: Template, row: Row, max_tokens: int | None = None, *, strip_response: bool = True
) -> str | None:
    """Return why a row's prompt cannot be encoded, by the rules of `--truncation_strategy delete`;
    None if it can. `max_tokens` is the engine's limit for prompt and completion together.
    `strip_response` leaves out the row's own answer, which a sampled one replaces."""
    import torch
    from swift.utils import remove_response

    if not row.get("messages"):
        return "it has no messages"
    if fault := row_fault(row, placeholder_texts(template)):
        return fault
    prompt = {**row, "messages": [dict(message) for message in row["messages"]]}
    if strip_response:
        remove_response(prompt["messages"])
    encoded = {}
    for view in filter(None, (teacher_view(prompt), prompt)):
        try:
            # ms-swift's wrapper would try three times; readers of URLs have their own retries.
            with torch.inference_mode():
                encoded = inspect.unwrap(type(template).encode)(template, view)
        except Exception as e:  # templates, processors and readers of media raise many kinds
            return encoding_fault(view, e)
    ids = encoded.get("input_ids")
    num_tokens = 0 if ids is None else int(torch.as_tensor(ids).numel())
    if strip_response and max_tokens is not None and num_tokens >= max_tokens:
        return (
            f"its prompt has {num_tokens} tokens, media included; expected fewer than the "
            f"{max_tokens} that the engine takes (--vllm_max_model_len)"
        )
    return None


def encoding_fault(row: object, error: Exception) -> str:
    """Return which of a row's media caused an error in encoding, or else the error's text."""
    from swift.template import Template

    # A processor's error names no medium. Headers are read first; then each image is loaded whole,
    # as a file that was cut short has a good header.
    if fault := row_fault(row):
        return fault
    media = read_row(prompt_of(row)).media
    for medium in media:
        is_local = media_content(source_of(medium.value)) is not None
        if medium.kind == "image" and is_local:
            try:
                Template._load_image(medium.value, load_images=True).load()
            except Exception as e:  # PIL's plugins raise many kinds
                reason = f"is not an image that can be read ({reason_of(e)}); expected a whole one"
                return f"{medium.field}: {short(medium.value)} {reason}"
    if not media:
        return reason_of(error)
    shown = ", ".join(f"{medium.field} {short(medium.value)}" for medium in media[:SHOWN_MEDIA])
    return f"{reason_of(error).rstrip('.')}; it shows {shown}"


def reason_of(error: Exception) -> str:
    """Return an error's type and text; without a text, the line that raised it."""
    text = re.sub(r" (object )?at 0x[0-9a-fA-F]+", "", str(error))  # addresses in memory
    if not text:
        *_, last = traceback.extract_tb(error.__traceback__)
        text = f"{Path(last.filename).name}, line {last.lineno}: {last.line}"
    return f"{type(error).__name__}: {text}"
