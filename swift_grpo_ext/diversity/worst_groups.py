"""The worst groups of a run side by side: which completions are equal, and how far others agree."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from swift_grpo_ext.diversity.record import RoundRecord, round_name
from swift_grpo_ext.record.reader import read_group
from swift_grpo_ext.record.row import SampleRow

MAX_GROUPS = 10
MAX_GROUPS_OF_ROUND = 2
MAX_CHARACTERS = 2000
THUMBNAIL = 128
"""Pixels, of the longer side."""

VERDICTS = ("broken", "collapse", "unknown", "healthy")
"""The worst first."""


@dataclass(frozen=True, kw_only=True)
class ShownCompletion:
    """One completion, with all samples that gave it."""

    rows: list[SampleRow]
    shared: str
    """Its beginning, as far as another completion of the group begins so too."""

    rest: str
    """What follows, up to `MAX_CHARACTERS` in all."""

    earlier: str
    """The earlier round that it comes from; empty for this one."""


@dataclass(frozen=True, kw_only=True)
class WorstGroup:
    """One group."""

    record: RoundRecord
    number: int
    prompt: str
    images: list[tuple[str, str]]
    """Name and data URI of each."""

    media: list[str]
    """Names of media that cannot be shown."""

    completions: list[ShownCompletion]
    num_samples: int


def worst_groups(
    run_dir: str | os.PathLike[str], records: Sequence[RoundRecord]
) -> tuple[list[WorstGroup], str]:
    """Groups of the worst rounds, alarms first; and why some are missing, empty if none is."""
    ranked = sorted(records, key=_badness)
    wanted = [(r, g) for r in ranked for g in r.worst_groups[:MAX_GROUPS_OF_ROUND]][:MAX_GROUPS]
    found: list[WorstGroup] = []
    missing = ""
    for record, number in wanted:
        try:
            found.append(_worst_group(run_dir, record, number))
        except (OSError, ValueError) as e:
            missing = missing or str(e)
    return found, missing


def _badness(record: RoundRecord) -> tuple[Any, ...]:
    unique_ratio = record.metrics.get("unique_ratio", 1.0)
    verdict = VERDICTS.index(record.verdict)
    return verdict, record.alarm is None, record.log10_p, unique_ratio, record.step


def _worst_group(run_dir: str | os.PathLike[str], record: RoundRecord, number: int) -> WorstGroup:
    rows = _read(run_dir, {**vars(record), "group": number})
    earlier = [
        row
        for collision in record.collisions
        if any(origin["sample_id"]["group"] == number for origin in collision["samples"])
        for origin in collision["earlier"][-1:]
        for row in _read_earlier(run_dir, origin["sample_id"])
    ]
    images, media = thumbnails(rows[0].media)
    return WorstGroup(
        record=record,
        number=number,
        prompt=_prompt_text(rows[0].prompt),
        images=images,
        media=media,
        completions=_merge_equal(rows, earlier),
        num_samples=len(rows),
    )


def _read(run_dir: str | os.PathLike[str], sample_id: dict[str, Any]) -> list[SampleRow]:
    names = ("phase", "step", "number", "group")
    return read_group(run_dir, **{name: sample_id[name] for name in names})


def _read_earlier(run_dir: str | os.PathLike[str], sample_id: dict[str, Any]) -> list[SampleRow]:
    """The row of an earlier round's sample; nothing if it is gone."""
    try:
        rows = _read(run_dir, sample_id)
    except ValueError:
        return []
    return [row for row in rows if row.sample_id.index == sample_id["index"]][:1]


def _merge_equal(own: Sequence[SampleRow], earlier: Sequence[SampleRow]) -> list[ShownCompletion]:
    """Each different completion once, sorted by tokens, so that equal beginnings are neighbours."""
    equal: dict[tuple[tuple[int, ...], str], list[SampleRow]] = {}
    for row in own:
        equal.setdefault((tuple(row.token_ids), ""), []).append(row)
    for row in earlier:
        name = round_name(asdict(row.sample_id))
        equal.setdefault((tuple(row.token_ids), name), []).append(row)
    in_order = sorted(equal.items())
    texts = [rows[0].text for _, rows in in_order]
    shown = []
    for number, ((_, name), rows) in enumerate(in_order):
        text = texts[number]
        others = [text] if len(rows) > 1 else texts[:number] + texts[number + 1 :]
        common = (os.path.commonprefix([text, o]) for o in others)  # noqa: RUF071 (characters)
        shared = max(common, key=len, default="")[:MAX_CHARACTERS]
        rest = text[len(shared) : MAX_CHARACTERS]
        shown.append(ShownCompletion(rows=rows, shared=shared, rest=rest, earlier=name))
    return shown


def _prompt_text(prompt: str) -> str:
    """The messages' words; the prompt as it was logged if it is not our list of messages."""
    try:
        return "\n".join(f"{m['role']}: {m['content']}" for m in json.loads(prompt))
    except (ValueError, TypeError, KeyError):
        return prompt


def thumbnails(media: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Small images as (name, data URI), and the names of what is no image on this machine."""
    uris = [(Path(name).name, _thumbnail(name)) for name in media]
    others = [name for name, (_, uri) in zip(media, uris, strict=True) if uri is None]
    return [(name, uri) for name, uri in uris if uri], others


def _thumbnail(name: str) -> str | None:
    try:
        if not Path(name).is_file():
            return None
        with Image.open(name) as image:
            small = image.convert("RGB")
    except (OSError, UnidentifiedImageError, ValueError):
        return None
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
