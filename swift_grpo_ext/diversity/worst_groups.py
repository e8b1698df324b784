"""The worst groups of a run side by side: which completions are equal, and how far others agree."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from swift_grpo_ext.diversity.record import RoundRecord
from swift_grpo_ext.record.reader import read_group
from swift_grpo_ext.record.row import SampleRow

MAX_GROUPS = 10
MAX_GROUPS_OF_ROUND = 2
MAX_COMPLETIONS = 16
"""Different ones, of a group."""

MAX_CHARACTERS = 2000
LONG_TEXT = 160
THUMBNAIL = 128
"""Pixels, of the longer side."""

VERDICTS = ("broken", "collapse", "unknown", "healthy")
"""The worst first."""


@dataclass(frozen=True, kw_only=True)
class ShownCompletion:
    """One completion, with all samples that gave it."""

    samples: list[str]
    """In words: index, rank, replica, seed."""

    shared: str
    """Its beginning, as far as another completion of the group begins so too."""

    rest: str
    num_hidden: int
    """Characters that are left out at the end."""

    num_tokens: int
    earlier: str = ""
    """The earlier round that it comes from; empty for this one."""


@dataclass(frozen=True, kw_only=True)
class WorstGroup:
    """One group."""

    round_name: str
    number: int
    verdict: str
    prompt: str
    images: list[tuple[str, str]]
    """Name and data URI of each."""

    media: list[str]
    """Names of media that cannot be shown."""

    completions: list[ShownCompletion]
    num_samples: int
    num_hidden: int
    """Different completions that are left out."""

    @property
    def is_long(self) -> bool:
        """Long completions stand beside each other, not below."""
        return any(len(c.shared) + len(c.rest) > LONG_TEXT for c in self.completions)


def worst_groups(
    run_dir: str | os.PathLike[str], records: Sequence[RoundRecord]
) -> tuple[list[WorstGroup], str]:
    """Groups of the worst rounds, alarms first; and why some are missing, empty if none is."""
    ranked = sorted(records, key=_badness)
    wanted = [(r, g) for r in ranked for g in r.worst_groups[:MAX_GROUPS_OF_ROUND]][:MAX_GROUPS]
    found = []
    for record, number in wanted:
        try:
            found.append(_worst_group(run_dir, record, number))
        except (OSError, ValueError) as e:
            return found, str(e)
    return found, ""


def _badness(record: RoundRecord) -> tuple[Any, ...]:
    unique_ratio = record.metrics.get("unique_ratio", 1.0)
    verdict = VERDICTS.index(record.verdict)
    return verdict, record.alarm is None, record.log10_p, unique_ratio, record.step


def _worst_group(run_dir: str | os.PathLike[str], record: RoundRecord, number: int) -> WorstGroup:
    round_id = {"phase": record.phase, "step": record.step, "number": record.number}
    rows = _read(run_dir, {**round_id, "group": number})
    origins = [
        origin
        for collision in record.collisions
        if any(sample["group"] == number for sample in collision["samples"])
        for origin in collision["earlier"][-1:]
    ]
    earlier = [row for origin in origins for row in _read_earlier(run_dir, origin)]
    completions = _merge_equal(rows, earlier)
    images, media = thumbnails(rows[0].media)
    return WorstGroup(
        round_name=record.round_name,
        number=number,
        verdict=record.verdict,
        prompt=_prompt_text(rows[0].prompt),
        images=images,
        media=media,
        completions=completions[:MAX_COMPLETIONS],
        num_samples=len(rows),
        num_hidden=max(len(completions) - MAX_COMPLETIONS, 0),
    )


def _read(run_dir: str | os.PathLike[str], group_id: dict[str, Any]) -> list[SampleRow]:
    names = ("phase", "step", "number", "group")
    return read_group(run_dir, **{name: group_id[name] for name in names})


def _read_earlier(run_dir: str | os.PathLike[str], origin: dict[str, Any]) -> list[SampleRow]:
    """The row of an earlier round's sample; nothing if it is gone."""
    try:
        rows = _read(run_dir, origin)
    except ValueError:
        return []
    return [row for row in rows if row.sample_id.index == origin["index"]][:1]


def _merge_equal(own: Sequence[SampleRow], earlier: Sequence[SampleRow]) -> list[ShownCompletion]:
    """Each different completion once, sorted by tokens, so that equal beginnings are neighbours."""
    equal: dict[tuple[tuple[int, ...], str], list[SampleRow]] = {}
    for row in own:
        equal.setdefault((tuple(row.token_ids), ""), []).append(row)
    for row in earlier:
        sample_id = row.sample_id
        name = f"{sample_id.phase} round {sample_id.step}.{sample_id.number}"
        equal.setdefault((tuple(row.token_ids), name), []).append(row)
    keys = sorted(equal)
    texts = [equal[key][0].text for key in keys]
    shown = []
    for number, ((token_ids, name), text) in enumerate(zip(keys, texts, strict=True)):
        rows = equal[token_ids, name]
        others = [text] if len(rows) > 1 else texts[:number] + texts[number + 1 :]
        common = (os.path.commonprefix([text, o]) for o in others)  # noqa: RUF071 (characters)
        length = max(map(len, common), default=0)
        end = min(length, MAX_CHARACTERS)
        shown.append(
            ShownCompletion(
                samples=[_describe(row) for row in rows],
                shared=text[:end],
                rest=text[end:MAX_CHARACTERS],
                num_hidden=max(len(text) - MAX_CHARACTERS, 0),
                num_tokens=len(token_ids),
                earlier=name,
            )
        )
    return shown


def _describe(row: SampleRow) -> str:
    replica = f", {row.replica}" if row.replica not in ("", f"rank {row.rank}") else ""
    seed = "" if row.seed is None else f", seed {row.seed}"
    return f"{row.sample_id.index}: rank {row.rank}{replica}{seed}"


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
