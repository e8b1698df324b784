"""The worst groups of a run, to be read side by side: who says the same, and how far."""

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
THUMBNAIL = 128
"""Pixels, of the longer side."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion, with all samples that gave it."""

    samples: list[str]
    """In words: index, rank, replica, seed."""

    shared: str
    """Its beginning, as far as another one of the group begins so too."""

    rest: str
    num_hidden: int
    """Characters that are left out at the end."""

    num_tokens: int
    earlier: str = ""
    """The round that it is from, if it is an earlier one."""


@dataclass(frozen=True, kw_only=True)
class WorstGroup:
    """One group."""

    title: str
    verdict: str
    prompt: str
    images: list[str]
    """As data URIs."""

    media: list[str]
    """Names of media that cannot be shown."""

    completions: list[Completion]
    num_samples: int
    num_hidden: int
    """Different completions that are left out."""


def worst_groups(
    run_dir: str | os.PathLike[str], records: Sequence[RoundRecord]
) -> tuple[list[WorstGroup], str]:
    """Groups of the rounds that look worst, alarms first; and why there are none, if so."""
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
    order = {"broken": 0, "collapse": 1, "unknown": 2, "healthy": 3}
    ratio = record.metrics.get("unique_ratio", 1.0)
    return order[record.verdict], record.alarm is None, record.log10_p, ratio, record.step


def _worst_group(run_dir: str | os.PathLike[str], record: RoundRecord, number: int) -> WorstGroup:
    rows = _read(run_dir, record.phase, record.step, record.number, number)
    earlier = [
        (name, row)
        for sharing in record.sharings
        if any(origin["group"] == number for origin in sharing["samples"])
        for origin in sharing["earlier"][-1:]
        for name, row in _read_one(run_dir, origin)
    ]
    completions = _completions([("", row) for row in rows], earlier)
    images, media = thumbnails(rows[0].media)
    return WorstGroup(
        title=f"{record.round_name}, group {number}",
        verdict=record.verdict,
        prompt=_prompt_text(rows[0].prompt),
        images=images,
        media=media,
        completions=completions[:MAX_COMPLETIONS],
        num_samples=len(rows),
        num_hidden=max(len(completions) - MAX_COMPLETIONS, 0),
    )


def _read(
    run_dir: str | os.PathLike[str], phase: Any, step: int, number: int, group: int
) -> list[SampleRow]:
    return read_group(run_dir, phase=phase, step=step, number=number, group=group)


def _read_one(run_dir: str | os.PathLike[str], origin: dict[str, Any]) -> list[Any]:
    """The row of an earlier round's sample, with the round's name; nothing if it is gone."""
    try:
        rows = _read(run_dir, origin["phase"], origin["step"], origin["number"], origin["group"])
    except ValueError:
        return []
    name = f"{origin['phase']} round {origin['step']}.{origin['number']}"
    return [(name, r) for r in rows if r.sample_id.index == origin["index"]][:1]


def _completions(
    own: Sequence[tuple[str, SampleRow]], earlier: Sequence[tuple[str, SampleRow]]
) -> list[Completion]:
    """Equal ones together, in the order of the alphabet, so that beginnings stand together."""
    together: dict[tuple[str, tuple[int, ...]], list[SampleRow]] = {}
    for name, row in [*own, *earlier]:
        together.setdefault((name, tuple(row.token_ids)), []).append(row)
    keys = sorted(together, key=lambda key: (key[1], key[0]))
    texts = [together[key][0].text for key in keys]
    found = []
    for number, key in enumerate(keys):
        rows, text = together[key], texts[number]
        others = texts[:number] + texts[number + 1 :]
        length = max([len(text)] if len(rows) > 1 else [common(text, o) for o in others] or [0])
        end = min(length, MAX_CHARACTERS)
        found.append(
            Completion(
                samples=[_words(row) for row in rows],
                shared=text[:end],
                rest=text[end:MAX_CHARACTERS],
                num_hidden=max(len(text) - MAX_CHARACTERS, 0),
                num_tokens=len(rows[0].token_ids),
                earlier=key[0],
            )
        )
    return found


def common(a: str, b: str) -> int:
    """Characters of the longest common beginning."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _words(row: SampleRow) -> str:
    replica = f", {row.replica}" if row.replica not in ("", f"rank {row.rank}") else ""
    seed = "" if row.seed is None else f", seed {row.seed}"
    return f"{row.sample_id.index}: rank {row.rank}{replica}{seed}"


def _prompt_text(prompt: str) -> str:
    """What the messages say; as it is logged, if it is not the list of messages that we write."""
    try:
        return "\n".join(f"{m['role']}: {m['content']}" for m in json.loads(prompt))
    except (ValueError, TypeError, KeyError):
        return prompt


def thumbnails(media: Sequence[str]) -> tuple[list[str], list[str]]:
    """Small images as data URIs, and the names of what is no image that lies on this machine."""
    images, others = [], []
    for name in media:
        uri = _thumbnail(name)
        if uri:
            images.append(uri)
        else:
            others.append(name)
    return images, others


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
