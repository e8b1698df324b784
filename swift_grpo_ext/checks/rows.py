"""Checks of a data set's rows: are the images there, and are they images?

Rows are ms-swift's own, after its column mapping: `messages`, and `images` as `{"bytes", "path"}`.
Only headers are read, so that tens of thousands of images take seconds.
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

import requests
from PIL import Image
from requests.utils import requote_uri

from swift_grpo_ext.checks.finding import Findings, error, warning
from swift_grpo_ext.sampling.prompt_hash import count_duplicates, prompt_hash
from swift_grpo_ext.upstream.placeholders import MARKS, placeholder_texts
from swift_grpo_ext.upstream.rows import (
    COLUMNS,
    FILE,
    KINDS,
    LONGEST_SHOWN,
    TEACHER_IMAGES,
    Medium,
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

MAX_IMAGES_OPENED = 20_000  # rows of a larger data set that are chosen at random
MAX_CONTENT = 2**31
"""Bytes of content in `images` after which no more rows are looked at: 20,000 rows with images of
1 MB would be 20 GB."""

READERS: Mapping[str, Callable[[IO[str]], Iterable[object]]] = {
    ".jsonl": lambda file: (json.loads(line or "null") for line in map(str.strip, file)),
    ".json": json.load,
    ".csv": csv.DictReader,
}
"""How a file is searched for a row, by the file's suffix."""

ROLES = {"system", "user", "assistant", "tool"}
MAX_SEARCHED = 2**26  # bytes of a file that is searched for a row: half a second
SHOWN_MEDIA = 3  # of those that an error may be about
NARROW = 200
"""Times as wide as high, or the other way round: some families refuse a picture beyond it
(`smart_resize` of Qwen, GLM and others, transformers 5.19), and others take it."""

TOO_NARROW = "too narrow for this model"

FRAMES = '{"type": "video", "video": ["1.png", ...]} of its frames'
A_PDF = "is a PDF; expected an image: draw its pages as images first"
EXPECTED_IMAGE = 'a path, URL, data URL, base64, or {"bytes": ...} or {"path": ...}'


# --- all rows ---


def check_rows(
    dataset: Sequence[Row],
    *,
    setting: str,
    expects_media: bool,
    deletes_bad_rows: bool = False,
    tells_duplicates: bool = False,
    template: Template | None = None,
) -> Findings:
    """Refuse the first row that has a fault (`early_fault`); warn of a data set without any image,
    of marks that no medium matches, and of prompts that stand twice in the data set, media included
    (docs/promises.md, G4).

    Args:
        expects_media: the model takes media: their absence is worth a warning.
        deletes_bad_rows: ms-swift replaces bad rows: their number is worth a warning.
    """
    placeholders = placeholder_texts(template) if template else ()
    numbers: Sequence[int] = range(len(dataset))
    if len(numbers) > MAX_IMAGES_OPENED:
        # By chance, and the same in each run: a fixed stride would meet the same kind of row again
        # and again where kinds alternate.
        numbers = random.Random(0).sample(numbers, MAX_IMAGES_OPENED)
    num_rows, num_bytes, has_media = 0, 0, False
    bad: list[str] = []
    unmatched: list[str] = []
    hashes: list[str] = []
    for i in numbers:
        if num_bytes > MAX_CONTENT:
            break
        row = dataset[i]
        media = media_of(row)
        num_rows += 1
        num_bytes += sum(len(c) for m in media if isinstance(c := source_of(m.value), bytes))
        has_media = has_media or bool(media)
        if fault := early_fault(row, template, placeholders):
            bad.append(fault if bad else f"{name_of(row)}: {fault}")
            if not deletes_bad_rows:
                break
        elif expects_media and (marks := unmatched_marks(row)):
            unmatched.append(marks if unmatched else f"{name_of(row)}: {marks}")
        if tells_duplicates:
            hashes.append(prompt_hash(prompt_of(row)))
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
            f"{len(bad)} of {num_rows} rows that were looked at cannot be used, the first: "
            f"{bad[0]}. Whenever such a row is met, another takes its place "
            "(--truncation_strategy delete).",
        )
    if unmatched and (deletes_bad_rows or not bad):
        yield warning(
            setting,
            f"{len(unmatched)} of {num_rows} rows have marks that their media do not match, the "
            f"first: {unmatched[0]}.",
            "Correct the rows if a medium or a mark is missing; a question about the tag is right.",
        )
    if expects_media and not has_media and not bad:
        yield warning(
            setting,
            "no row holds `images` (or `videos`, `audios`), and the model takes them.",
            'If they should: add the column, e.g. {"messages": [...], "images": ["digit.png"]}, or '
            "map yours with --columns.",
        )
    if duplicates := count_duplicates(hashes):
        yield warning(
            setting,
            f"{duplicates} of {num_rows} rows repeat a prompt that stands earlier in the data "
            "set, media included; each gets noise of its own.",
        )


# --- one row ---


def media_of(row: object) -> list[Medium]:
    """Return a row's media, in whatever form; [] where they have one that ms-swift cannot read."""
    try:
        return read_row(row).media
    except RowFormError:
        return []


def prompt_of(row: Row) -> dict[str, Any]:
    """Return a row without the answer that it ends with: rollouts never see it."""
    messages = list(row.get("messages") or ())
    if messages and isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
        messages.pop()
    return {**row, "messages": messages}


def question_of(row: object) -> str:
    """Return the start of a row's last question."""
    row = prompt_of(row) if isinstance(row, Mapping) else row
    try:
        messages: Any = read_row(row).messages
    except RowFormError:
        messages = column_of(row, "messages")
    *_, last = messages if messages and isinstance(messages, (list, tuple)) else [None]
    content = (last.get("content") if isinstance(last, Mapping) else last) or ""
    if isinstance(content, list):  # parts in a form that ms-swift does not read
        dicts = [part for part in content if isinstance(part, Mapping)]
        content = "".join(str(part.get("text") or part.get("content") or "") for part in dicts)
    return str(content)[:60]


def name_of(row: object) -> str:
    """Return how messages name a row: by its place in its file, and by its question."""
    question, place = question_of(row), place_of(row)
    if not place:
        return f"the row that asks {question!r}"
    return f"{place} (which asks {question!r})" if question else place


def place_of(row: object) -> str:
    """Return a row's number, from 1 as in its file, and the file; "" where it is not found.

    ms-swift shuffles. It notes each row's file (4.6, dataset/loader.py,
    `_inject_dataset_routing_tag`), which is searched for the row's texts and paths.
    """
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
            if prompt <= texts:  # rows that ask the same may show more, or have other answers
                found.append((len(texts - known), number))
    return f"row {min(found)[1]} of {path}" if found else ""


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts and numbers within lists and dictionaries; a CSV file has texts alone."""
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple)):
        for each in inner:
            yield from _texts(each)
    elif isinstance(value, (str, int, float)):
        yield str(value)


def early_fault(
    row: object, template: Template | None, placeholders: Collection[str] = ()
) -> str | None:
    """Say what `row_fault` does, and whether the template refuses a narrow picture."""
    sizes: list[tuple[int, int]] = []
    if fault := row_fault(row, placeholders, sizes):
        return fault
    if template is None or not isinstance(row, Mapping) or not any(map(is_narrow, sizes)):
        return None
    fault = encoding_error(template, row)
    return fault if fault and TOO_NARROW in fault else None  # a template may want the model


def row_fault(
    row: object, placeholders: Collection[str] = (), sizes: list[tuple[int, int]] | None = None
) -> str | None:
    """Say what is wrong with a row's prompt, or with a teacher's view of it: field, value, and what
    was expected; None where nothing is.

    Only headers of images are read. What is fetched, and a file that was cut in its middle, shows
    when the row is encoded (`encoding_error`).

    Args:
        placeholders: the tokens that stand for media inside the model.
        sizes: a list to which width and height of each image are added.
    """
    row = prompt_of(row) if isinstance(row, Mapping) else row
    if (fault := _view_fault(row, placeholders, sizes)) or not (view := teacher_view(row)):
        return fault
    fault = _view_fault(view, placeholders, sizes)
    is_named = not fault or fault.startswith(TEACHER_IMAGES)
    return fault if is_named else f"teacher_prompt: {fault}"


def _view_fault(
    row: object, placeholders: Collection[str], sizes: list[tuple[int, int]] | None
) -> str | None:
    try:
        read = read_row(row)
    except RowFormError as e:
        return str(e)
    for where, text in read.texts():
        if typed := [token for token in placeholders if token in text and token not in MARKS]:
            return (
                f"{where}: holds {typed[0]!r}, which stands for a medium inside the model; "
                "expected text, with <image>, <video> or <audio> where a medium is shown"
            )
    for kind in KINDS:
        given, marked = read.count(kind)
        if marked > given and f"<{kind}>" in placeholders:
            return (
                f"messages: {marked} <{kind}> marks stand for {given} {kind}s; expected as many, "
                "since the mark is a token of this model"
            )
    for medium in read.media:
        is_image = medium.kind == "image"
        if reason := _image_fault(medium, sizes) if is_image else _file_fault(medium):
            return f"{medium.field}: {reason}"
    return None


def unmatched_marks(row: object) -> str | None:
    """Say what ms-swift does about marks of another number than media; None where there is none.

    It replaces marks from the first one on, keeps the others as text, and puts missing ones in
    front of the first message (4.6, template/base.py, `_add_default_tags`).
    """
    read = read_row(prompt_of(row) if isinstance(row, Mapping) else row)
    for kind in KINDS:
        given, marked = read.count(kind)
        # Questions about HTML have <video> and <audio> tags, and no column of videos. A column that
        # is null in this row says that the data set has some.
        has_column = not isinstance(row, Mapping) or f"{kind}s" in row
        is_null = has_column and column_of(row, f"{kind}s") is None
        if marked > given and (kind == "image" or given or is_null):
            return (
                f"messages: {marked} <{kind}> marks stand for {given} {kind}s, and the last "
                f"{marked - given} stay text"
            )
        if 0 < marked < given:
            return (
                f"messages: {marked} <{kind}> marks stand for {given} {kind}s, so that the first "
                f"{given - marked} are shown in front of the first message"
            )
    return None


def _image_fault(medium: Medium, sizes: list[tuple[int, int]] | None = None) -> str | None:
    value = source_of(medium.value)
    if reason := _wrong_form(value):
        return reason
    if isinstance(value, (list, tuple, int, float, Mapping)):
        return f"is {short(medium.value)}; expected {EXPECTED_IMAGE}"
    reason = unreadable(value, sizes)
    return f"{short(medium.value)} {reason}" if reason else None


def _file_fault(medium: Medium) -> str | None:  # a video or an audio
    value = medium.value
    if medium.kind == "video" and isinstance(value, (list, tuple)) and value:
        if not medium.field.startswith("messages"):
            return (
                f"is a list of {len(value)} frames, which ms-swift's requests take in `content` "
                f"alone; expected a path or URL, or a part {FRAMES}"
            )
        frames = (Medium("image", medium.field, frame) for frame in value)
        return next(filter(None, map(_image_fault, frames)), None)
    if reason := _wrong_form(value):
        return reason
    if not isinstance(value, str):
        return f"is {short(value)}; expected a path, URL, or base64"
    try:
        content = media_content(value)
        is_missing = isinstance(content, Path) and not content.exists()
        is_folder = isinstance(content, Path) and content.is_dir()
    except (ValueError, OSError):  # no base64, no path: ms-swift says what it is
        return None
    if is_folder:
        or_frames = f", or a part {FRAMES}" if medium.kind == "video" else ""
        return f"{short(value)} is a folder; expected a file{or_frames}"
    return f"{short(value)} does not exist" if is_missing else None


def _wrong_form(value: object) -> str | None:
    if value is None or (isinstance(value, str) and not value):
        return f"is {'empty' if value == '' else 'null'}; expected a path, or [] for no medium"
    text = value.strip() if isinstance(value, str) else ""
    if text.startswith("[") and text.endswith("]") and not os.path.exists(text):  # noqa: PTH110
        return (
            f"{short(value)} is text that holds a list; expected a list (JSON Lines or Parquet "
            "have them, CSV has none) or one path"
        )
    return None


# --- one image ---


def unreadable(image: object, sizes: list[tuple[int, int]] | None = None) -> str | None:
    """Say why an image cannot be read; None where it can, or where only fetching it would tell."""
    try:
        content = media_content(image)
        if content is None:
            return None
        if isinstance(content, Path) and not content.exists():
            # Base64 of a tiny image may be as short as a file's name.
            with (
                suppress(Exception),
                Image.open(io.BytesIO(base64.b64decode(str(image), validate=True))),
            ):
                return None
            return "does not exist"
        if isinstance(content, Path) and not content.is_file():
            return "is not a file"  # a pipe would be waited for
        # To open an image reads its header, and no pixel.
        with Image.open(content) as opened:
            if sizes is not None:
                sizes.append(opened.size)
            return None
    except FileNotFoundError:
        return "does not exist"
    except Exception as e:  # PIL's plugins raise whatever they stumble over in a broken header
        return A_PDF if is_pdf(image) else f"is not an image that can be read ({reason_of(e)})"


def is_narrow(size: tuple[int, int]) -> bool:
    return max(size) > NARROW * min(size)


def is_pdf(image: object) -> bool:
    if isinstance(image, str) and image.partition("?")[0].lower().endswith(".pdf"):
        return True
    with suppress(Exception):
        content = media_content(image) or io.BytesIO()
        with content.open("rb") if isinstance(content, Path) else content as file:
            return file.read(5) == b"%PDF-"
    return False


def media_content(medium: object) -> Path | IO[bytes] | None:
    """Return a local file or the content; None for what ms-swift alone reads (URLs, PIL images)."""
    if isinstance(medium, bytes):
        return io.BytesIO(medium)
    if not isinstance(medium, str) or medium.strip().startswith(("http://", "https://")):
        return None
    medium = medium.strip()
    if medium.startswith("data:"):
        return io.BytesIO(base64.b64decode(medium.partition(";base64,")[2]))
    # `Path.expanduser` raises where there is no such user, whose name a file may have.
    path = Path(os.path.expanduser(medium.removeprefix(FILE)))  # noqa: PTH111
    if len(medium) > LONGEST_SHOWN and not path.suffix:  # no file's name is longer: base64
        return io.BytesIO(base64.b64decode(medium))
    root = os.environ.get("ROOT_IMAGE_DIR")  # ms-swift's own setting, for relative paths
    return Path(root) / path if root and not path.exists() else path


# --- encoding ---

REMEDY = "Correct the row, or have such prompts replaced with --truncation_strategy delete."


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
    """Say why a row's prompt cannot be encoded, as `--truncation_strategy delete` sees it.

    Args:
        max_tokens: that the engine takes, prompt and completion together.
        strip_response: leave out the row's own answer, which a sampled one replaces.
    """
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
            # Without the wrapper that ms-swift has around it, which would try three times: readers
            # of URLs have their own retries.
            with torch.inference_mode():
                encoded = inspect.unwrap(type(template).encode)(template, view)
        except Exception as e:  # templates, processors and readers of media raise many kinds
            return encoding_fault(view, e)
    ids = encoded.get("input_ids")
    num_tokens = 0 if ids is None else int(torch.as_tensor(ids).numel())
    if strip_response and max_tokens is not None and num_tokens >= max_tokens:
        return (
            f"its prompt has {num_tokens} tokens, those of its media included; expected fewer than "
            f"the {max_tokens} that the engine takes (--vllm_max_model_len)"
        )
    return None


def encoding_fault(row: object, error: Exception, *, fetches: bool = True) -> str:
    """Say which of a row's media an error in encoding was about, or else what it says.

    Args:
        fetches: URLs are fetched once more. A server judges redirects only as it encodes.
    """
    from swift.template import MaxLengthError

    # An error of a processor names no medium. What our own look finds is said first; then each
    # image is loaded to its end; and else all are named.
    if fault := row_fault(row):
        return fault
    media = read_row(prompt_of(row) if isinstance(row, Mapping) else row).media
    for medium in media:
        if reason := _loading_fault(medium, error, fetches=fetches):
            return f"{medium.field}: {short(medium.value)} {reason}"
    if not media or isinstance(error, MaxLengthError):
        return reason_of(error)
    shown = ", ".join(f"{medium.field} {short(medium.value)}" for medium in media[:SHOWN_MEDIA])
    more = f" and {len(media) - SHOWN_MEDIA} more" if len(media) > SHOWN_MEDIA else ""
    return f"{reason_of(error).rstrip('.')}; it shows {shown}{more}"


def _loading_fault(medium: Medium, error: Exception, *, fetches: bool) -> str | None:
    """Say why ms-swift's own reader cannot load a medium; videos and audios are the templates'."""
    from swift.template import Template

    source = source_of(medium.value)
    if isinstance(error, requests.RequestException):  # has tried several times: not again
        url = error.request.url if error.request is not None else None
        is_it = isinstance(source, str) and requote_uri(source.strip()) == url
        return f"cannot be fetched ({reason_of(error)})" if is_it else None
    is_url = isinstance(source, str) and source.strip().startswith("http")
    if medium.kind != "image" or (is_url and not fetches):
        return None
    # Decoded to its end: a file that was cut in its middle has a whole header.
    try:
        image = Template._load_image(medium.value, load_images=True)
        image.load()
    except Exception as e:  # PIL's plugins raise many kinds
        if is_pdf(source):
            return A_PDF
        return f"is not an image that can be read ({reason_of(e)}); expected a whole one"
    if is_narrow(image.size) and "ratio" in str(error):
        width, height = image.size
        return f"is {width} x {height} pixels, {TOO_NARROW} ({reason_of(error)}); crop or pad it"
    return None


def reason_of(error: Exception) -> str:
    """Return an error's type and text; the line that raised it where it has no text."""
    text = re.sub(r" (object )?at 0x[0-9a-fA-F]+", "", str(error))  # where it lies in memory
    if not text:
        *_, last = traceback.extract_tb(error.__traceback__)
        text = f"{Path(last.filename).name}, line {last.lineno}: {last.line}"
    return f"{type(error).__name__}: {text}"
