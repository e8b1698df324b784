"""Reads the messages and media of a row in any form that ms-swift accepts.

ms-swift takes media from columns (`images`, or a column that its preprocessors rename to it), from
parts of `content` (the OpenAI form), and from `<img>PATH</img>` in texts (4.6,
template/template_inputs.py, `remove_messages_media`; template/base.py, `_replace_image_tags`). A
teacher may have a second view of a row, which is read in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import SimpleNamespace
from typing import Any

from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair

KINDS = ("image", "video", "audio")
COLUMNS = tuple(f"{kind}s" for kind in KINDS)
TEACHER_COLUMNS = ("teacher_prompt", "teacher_images")
TEACHER_IMAGES = TEACHER_COLUMNS[1]
FILE = "file://"
EXPECTED_PARTS = (
    'expected parts such as {"type": "text", "text": "..."}, {"type": "image", "image": "1.png"} '
    'or {"type": "image_url", "image_url": {"url": "1.png"}}, and so for `video` and `audio`'
)


class RowFormError(ValueError):
    """ms-swift cannot read the row; the message names field, value and expected form."""


@dataclass(frozen=True)
class Medium:
    kind: str  # one of `KINDS`
    field: str  # `images[0]`, `messages[1].content[0]`
    value: Any  # a path, URL, base64 text, or another value of the row


@dataclass(frozen=True)
class ReadRow:
    """A row's prompt in the form that templates encode: texts with marks (`<image>`), and media in
    the order of `KINDS`, and for each kind in the order of their marks."""

    messages: list[dict[str, Any]]
    media: list[Medium] = field(default_factory=list)

    def shown_as(self, kind: str) -> list[Medium]:
        return [medium for medium in self.media if medium.kind == kind]

    def count(self, kind: str) -> tuple[int, int]:
        """Return the numbers of media and of marks of a kind."""
        marks = sum(text.count(f"<{kind}>") for _, text in self.texts())
        return len(self.shown_as(kind)), marks

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the field name and text of each message, except answers that are token ids."""
        for number, message in enumerate(self.messages):
            if isinstance(content := message.get("content"), str):
                yield f"messages[{number}].content", content


def read_row(row: object) -> ReadRow:
    """Return the messages and media of a row as ms-swift's template reads them. `row` is a row of
    the data set, or an object with its columns as attributes (a sample, a request). Raise
    `RowFormError` if ms-swift would raise."""
    given = column_of(row, "messages") or ()
    are_messages = isinstance(given, (list, tuple)) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in given
    )
    if not are_messages:
        raise RowFormError(
            f'messages: {short(given)}; expected [{{"role": "user", "content": "..."}}, ...]'
        )
    messages = [dict(message) for message in given]
    in_parts = [m for number, message in enumerate(messages) for m in _in_parts(number, message)]
    if with_parts := [message for message in messages if _parts_of(message)]:
        from swift.template.template_inputs import StdTemplateInputs

        StdTemplateInputs.remove_messages_media(with_parts)  # replaces parts by marks, in place
    read = ReadRow(messages)
    for kind, name in zip(KINDS, COLUMNS, strict=True):
        parts = [medium for medium in in_parts if medium.kind == kind]
        value = column_of(row, name)
        is_teachers = value is not None and value is column_of(row, TEACHER_IMAGES)
        place = TEACHER_IMAGES if is_teachers else name
        column = [] if value is None else [Medium(kind, place, value)]  # a single medium
        if isinstance(value, (list, tuple)):
            column = [Medium(kind, f"{place}[{n}]", item) for n, item in enumerate(value)]
        if parts and column:
            raise RowFormError(
                f"{name}: holds {len(column)}, and `content` has parts of type {kind} that hold "
                f"{len(parts)}; expected media in one of the two (parts without a value stand for "
                "those of the column)"
            )
        read.media.extend(parts or column)
    # ms-swift only looks for `<img>` if a row has no images.
    if not read.shown_as("image") and any("<img>" in text for _, text in read.texts()):
        from swift.template import Template

        inputs = SimpleNamespace(images=[], messages=messages)
        Template._replace_image_tags(inputs)
        read.media[:0] = [Medium("image", "messages", path) for path in inputs.images]
    return read


def teacher_view(row: object) -> dict[str, Any] | None:
    """Return the teacher's view of a row, or None if the teacher sees the policy's prompt."""
    if all(column_of(row, name) is None for name in TEACHER_COLUMNS):
        return None
    from swift.rl_core.data import OnPolicySample

    names = ("messages", *COLUMNS, "objects", *TEACHER_COLUMNS)
    view = OnPolicySample.from_row({name: column_of(row, name) for name in names})
    if not view.messages or not view.build_teacher_view():
        return None
    # By `teacher_images`, `read_row` recognizes the teacher's images.
    return {**view.to_teacher_template_dict(), TEACHER_IMAGES: view.teacher_images}


def column_of(row: object, name: str) -> Any:
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def _parts_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the parts of a message's content; [] for text, and for an answer's token ids."""
    content = message.get("content")
    # ms-swift writes the list of a tool as JSON.
    is_tools = message.get("role") in ("tool", "tool_response", "tool_call")
    if not isinstance(content, list) or is_tools or (content and isinstance(content[0], int)):
        return []
    return content


def _in_parts(number: int, message: Mapping[str, Any]) -> Iterator[Medium]:
    """Yield the media in the parts of a message's content."""
    parts = _parts_of(message)
    if parts and number == 0 and message.get("role") == "system":
        raise RowFormError(
            "messages[0].content: is a list of parts; expected text, since it is the system's"
        )
    for place, part in enumerate(parts):
        where = f"messages[{number}].content[{place}]"
        if isinstance(part, Mapping) and "role" in part and "content" in part:
            raise RowFormError(
                f"{where}: is a message, so that a column of another name (`prompt`, as in TRL) "
                "holds messages; expected them in the column `messages`: rename it with "
                """--columns '{"prompt": "messages"}'"""
            )
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise RowFormError(f"{where}: is {short(part)}; {EXPECTED_PARTS}")
        value, name = part.get(kind), kind.removesuffix("_url")
        if kind == "text":
            if not isinstance(value, str):
                raise RowFormError(f"{where}: `text` is {short(value)}; expected text")
            continue
        if name not in KINDS:
            raise RowFormError(f"{where}: has the type {short(kind)}; {EXPECTED_PARTS}")
        if isinstance(value, Mapping):
            if "url" not in value:
                raise RowFormError(f"{where}: `{kind}` is {short(value)}; {EXPECTED_PARTS}")
            value = value["url"]
        if value:
            yield Medium(name, where, value)


def source_of(value: Any) -> Any:
    """Unwrap a `{"bytes", "path"}` dictionary of ms-swift's preprocessors; keep other values."""
    if isinstance(value, Mapping) and value and set(value) <= {"bytes", "path"}:
        content = value.get("bytes")
        return value.get("path") if content is None or content == b"" else content
    return value


# --- addresses of files ---


@repair(PatchPhase.TRAINING, PatchPhase.ENGINE)
def read_file_urls() -> None:
    """Make ms-swift read `file:///1.png` as a path, as qwen_vl_utils does for videos.

    Symptom: a row with `file:///1.png` raises `UnidentifiedImageError` in the first rollout.
    Upstream: ms-swift 4.6, template/vision_utils.py (`load_file`) treats the URL as base64. All
    media of all templates pass through `StdTemplateInputs` (template/template_inputs.py), in
    training and in the engines. Can go when `load_file` accepts such URLs.
    """
    from swift.template.template_inputs import StdTemplateInputs

    upstream = StdTemplateInputs.__post_init__

    @wraps(upstream)
    def __post_init__(self: StdTemplateInputs) -> None:
        upstream(self)
        for name in COLUMNS:
            if media := getattr(self, name):
                setattr(self, name, [_path_of(medium) for medium in media])

    patch(StdTemplateInputs, __post_init__=__post_init__)


def _path_of(medium: Any) -> Any:
    """Return the path of a `file://` URL; keep other media."""
    if isinstance(medium, dict) and isinstance(medium.get("path"), str):
        return {**medium, "path": _path_of(medium["path"])}
    if isinstance(medium, list):  # the frames of a video
        return [_path_of(frame) for frame in medium]
    is_url = isinstance(medium, str) and medium.lstrip().startswith(FILE)
    return medium.strip().removeprefix(FILE) if is_url else medium


# --- values in error messages ---

LONGEST_SHOWN = 255  # the longest file name, in characters; a longer string is content


def short(value: object) -> str:
    """Return a value for error messages: names in full, content by its beginning and size."""
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value)} bytes>"
    if isinstance(value, Mapping) and value and set(value) <= {"bytes", "path"}:
        return short(value.get("path") or value.get("bytes"))
    if isinstance(value, str):
        cut = len(value) > LONGEST_SHOWN
        return f"{value[:60]!r}... ({len(value)} characters)" if cut else repr(value)
    if value is None:
        return "null"
    text = re.sub(r"\s+", " ", repr(value))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:60]}..."
