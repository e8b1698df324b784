"""The prompt of a logged group: from the log where it is there in full, else from the data set."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from swift_grpo_ext.checks.rows import prompt_of, unreadable
from swift_grpo_ext.record.collect import media_name
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.replay.run import ReplayError, Run
from swift_grpo_ext.sampling.groups import fingerprint

MEDIA = ("images", "videos", "audios")
CONTENT = "blake2b:"
"""With which the log names media whose content was given, not a path."""

MOST_MEDIA = 64
"""Of one prompt, whose kinds are told apart by trying; more are looked up in the data set."""


def prompt_from_log(row: SampleRow) -> dict[str, Any] | None:
    """The prompt as a row of ms-swift's, if the log holds all of it: its fingerprint tells.

    Content given as bytes or base64, tools, boxes and videos in frames are not in the log.
    """
    try:
        messages = json.loads(row.prompt)
    except ValueError:
        return None
    if len(row.media) > MOST_MEDIA:
        return None
    for prompt in _candidates(messages, row.media):
        if fingerprint(prompt) == row.fingerprint:
            return prompt
    return None


def _candidates(messages: Any, media: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Every way to part the names into images, videos and audios, in this order."""
    names = list(media)
    for num_images in range(len(names), -1, -1):
        for num_audios in range(len(names) - num_images + 1):
            images = names[:num_images]
            videos = names[num_images : len(names) - num_audios]
            audios = names[len(names) - num_audios :]
            others = {"messages": messages, "videos": videos, "audios": audios}
            yield {**others, "images": [{"bytes": None, "path": name} for name in images]}
            yield {**others, "images": images}


def prompt_from_rows(row: SampleRow, data: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first row of a data set whose prompt has the fingerprint; None where there is none."""
    try:
        first = json.loads(row.prompt)[0]
    except (ValueError, LookupError, TypeError):
        first = None
    system = first if isinstance(first, dict) and first.get("role") == "system" else None
    for candidate in data:
        prompt = prompt_of(candidate)
        if fingerprint(prompt) == row.fingerprint:
            return prompt
        if system is not None:  # ms-swift puts --system and the template's own in front
            prompt["messages"] = [system, *prompt["messages"]]
            if fingerprint(prompt) == row.fingerprint:
                return prompt
    return None


def lack_of_prompt(row: SampleRow, settings: Mapping[str, Any]) -> str:
    """Why a prompt cannot be had, in words."""
    content = [name for name in row.media if name.startswith(CONTENT)]
    lacks = (
        f"its media {', '.join(content)} were given as content, of which the log holds a digest"
        if content
        else "the log does not hold all of it (tools, boxes, or videos in frames)"
    )
    data = " ".join(
        map(str, [*(settings.get("dataset") or ()), *(settings.get("val_dataset") or ())])
    )
    return (
        f"The prompt {row.fingerprint} cannot be had: {lacks}, and no row of "
        f"{data or 'any data set'} has this fingerprint. Give the data set as it was at the "
        "training, with --set 'dataset=[\"FILE\"]'."
    )


def check_media(prompt: Mapping[str, Any], since: float) -> list[str]:
    """Refuse media that are gone; name in notes those that may have changed.

    Args:
        since: seconds since 1970; files that were written later may not be what the samples saw.

    Raises:
        ReplayError: names the media that are missing or unreadable, and why.
    """
    names = {kind: list(_files(prompt.get(kind) or ())) for kind in MEDIA}
    reasons = [(image, unreadable(image)) for image in names["images"]]
    reasons += [(m, _missing(m)) for kind in ("videos", "audios") for m in names[kind]]
    gone = [f"{media_name(media)!r} {reason}" for media, reason in reasons if reason]
    if gone:
        raise ReplayError(
            f"Media of the prompt are not what they were: {'; '.join(gone)}. Put them back, or run "
            "where the training ran (ROOT_IMAGE_DIR included)."
        )
    notes = []
    for name in dict.fromkeys(media_name(media) for media, _ in reasons):
        path = local_file(name)
        if path is not None and path.stat().st_mtime > since:
            when = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds")
            notes.append(
                f"{name!r} was written at {when}, after the run began: it may not be what the "
                "samples saw."
            )
    return notes


def _files(media: Iterable[Any]) -> Iterator[Any]:
    """The frames of a video count singly."""
    for medium in media:
        if isinstance(medium, (list, tuple)):
            yield from medium
        else:
            yield medium


def _missing(medium: Any) -> str | None:
    name = media_name(medium)
    is_path = isinstance(medium, (str, dict)) and not _is_elsewhere(name)
    return "does not exist" if is_path and local_file(name) is None else None


def _is_elsewhere(name: str) -> bool:
    return "://" in name.removeprefix("file://") or name.startswith((CONTENT, "data:"))


def local_file(name: str) -> Path | None:
    """The file that a medium's name stands for; None for URLs, content, and what is not there."""
    if _is_elsewhere(name):
        return None
    path = Path(name.removeprefix("file://")).expanduser()
    root = os.environ.get("ROOT_IMAGE_DIR")  # ms-swift's own setting, for relative paths
    if root and not path.exists():
        path = Path(root) / path
    return path if path.is_file() else None


def began(run: Run) -> float:
    """When a run began, in seconds since 1970, as far as its files tell."""
    files = [run.folder / "args.json", *(run.folder / "samples").glob("session-*")]
    return min(path.stat().st_mtime for path in files if path.exists())
