"""The prompt of a logged group: from the log where the log holds all of it, else from the data set.

Raises `ReplayError` where neither has it, or where its media are gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from swift_grpo_ext.checks.rows import MEDIA, media_content, prompt_of, unreadable
from swift_grpo_ext.record.row import SampleRow, media_name
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.tools.replay.run import ReplayError, Run

CONTENT = "blake2b:"
"""Begins the logged name of media that were given as content, not as a path."""

MOST_MEDIA = 64
"""In one prompt, to find their kinds by trying; with more, the data set is read."""


def prompt_from_log(row: SampleRow) -> dict[str, Any] | None:
    """The prompt as a row of ms-swift's, if the log holds all of it: its fingerprint tells.

    The log lacks media given as bytes or base64, tools, boxes, and videos in frames.
    """
    try:
        messages = json.loads(row.prompt)
    except ValueError:
        return None
    candidates = _candidates(messages, list(row.media)) if len(row.media) <= MOST_MEDIA else ()
    return next((c for c in candidates if prompt_hash(c) == row.fingerprint), None)


def _candidates(messages: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    """Every way to divide the names into images, videos and audios, in this order."""
    for num_images in range(len(names), -1, -1):
        for end in range(len(names), num_images - 1, -1):
            images, videos, audios = names[:num_images], names[num_images:end], names[end:]
            others = {"messages": messages, "videos": videos, "audios": audios}
            yield {**others, "images": [{"bytes": None, "path": name} for name in images]}
            yield {**others, "images": images}


def prompt_from_rows(row: SampleRow, data: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first row of a data set whose prompt has the fingerprint; None where no row has it."""
    try:
        first = json.loads(row.prompt)[0]
    except (ValueError, LookupError, TypeError):
        first = None
    system = [first] if isinstance(first, dict) and first.get("role") == "system" else []
    for candidate in data:
        prompt = prompt_of(candidate)
        # ms-swift puts --system, or the template's own, in front.
        for messages in (prompt["messages"], [*system, *prompt["messages"]]):
            if prompt_hash({**prompt, "messages": messages}) == row.fingerprint:
                return {**prompt, "messages": messages}
    return None


def lack_of_prompt(row: SampleRow, settings: Mapping[str, Any]) -> str:
    """Why nobody has a prompt, in words."""
    content = [name for name in row.media if name.startswith(CONTENT)]
    reason = "the log does not hold all of it (tools, boxes, or videos in frames)"
    if content:
        reason = f"its media {', '.join(content)} were given as content, and the log holds digests"
    names = [*(settings.get("dataset") or ()), *(settings.get("val_dataset") or ())]
    return (
        f"The prompt {row.fingerprint} cannot be found: {reason}, and no row of "
        f"{' '.join(map(str, names)) or 'any data set'} has this fingerprint. Give the data set "
        "that the training had, with --set 'dataset=[\"FILE\"]'."
    )


def check_media(prompt: Mapping[str, Any], since: float) -> list[str]:
    """Refuse media that are gone; name in notes those that may have changed.

    Args:
        since: seconds since 1970; later files may not be what the samples saw.

    Raises:
        ReplayError: names the media that are missing or unreadable, and why.
    """
    media = [(kind, medium) for kind in MEDIA for medium in _files(prompt.get(kind) or ())]
    gone, notes = [], []
    for kind, medium in media:
        path, name = media_content(medium), media_name(medium)
        reason = unreadable(medium) if kind == "images" else None
        if isinstance(path, Path) and not path.is_file():
            reason = "does not exist"
        if reason:
            gone.append(f"{name!r} {reason}")
        elif isinstance(path, Path) and path.stat().st_mtime > since:
            when = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds")
            notes.append(
                f"{name!r} was written at {when}, after the run began: it may not be what the "
                "samples saw."
            )
    if gone:
        raise ReplayError(
            f"Media of the prompt are not what they were: {'; '.join(gone)}. Put them back, or run "
            "where the training ran (ROOT_IMAGE_DIR included)."
        )
    return list(dict.fromkeys(notes))


def _files(media: Iterable[Any]) -> Iterator[Any]:
    """Each frame of a video in frames counts."""
    for medium in media:
        yield from medium if isinstance(medium, (list, tuple)) else [medium]


def start_time(run: Run) -> float:
    """When a run began, in seconds since 1970, as far as its files tell."""
    files = [run.folder / "args.json", *(run.folder / "samples").glob("session-*")]
    return min(path.stat().st_mtime for path in files if path.exists())
