"""Which local files a request to `swift rollout` may name.

Symptom: `SWIFT_MEDIA_ALLOWED_DIRS` keeps callers of `swift deploy` from files elsewhere on the
server's disk; `swift rollout` opens whatever a request names.
Upstream: ms-swift 4.6, utils/media_utils.py (`SafeMediaPath`), pipelines/infer/deploy.py; nothing
in pipelines/infer/rollout.py. ms-swift 4.5 has no such rule.
Adaptation: requests are held against the same rule before a replica gets them.
Can go when `swift rollout` asks `SafeMediaPath`.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import swift.utils

VARIABLE = "SWIFT_MEDIA_ALLOWED_DIRS"
LONGEST_PATH = 4096
"""Linux's PATH_MAX. A longer string is base64."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")


def check_media(request: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a file outside the directories that `SWIFT_MEDIA_ALLOWED_DIRS` lists;
    nothing is refused where it is not set."""
    if not os.environ.get(VARIABLE) or not hasattr(swift.utils, "SafeMediaPath"):
        return
    for text in _media(request):
        for path in _paths(text.strip()):
            swift.utils.SafeMediaPath.check(str(path))


def _media(request: Mapping[str, Any]) -> Iterator[str]:
    """Every place of a request that ms-swift takes a medium from."""
    for kind in ("images", "videos", "audios"):
        yield from _texts(request.get(kind))
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, str):
            yield from re.findall(r"<img>(.+?)</img>", content)
            continue
        for item in content if isinstance(content, list) else ():
            if isinstance(item, Mapping):
                yield from _texts({k: v for k, v in item.items() if k not in ("type", "text")})


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))


def _paths(text: str) -> list[Path]:
    """The files that a text may stand for; none for URLs and content.

    One that does not exist counts too: an answer must not tell whether it does.

    Raises:
        ValueError: it names a protocol, some of which read files (ffmpeg's `concat:`).
    """
    scheme = _SCHEME.match(text)
    if scheme and scheme[1].lower() in ("http", "https", "data"):
        return []
    if scheme and scheme[1].lower() != "file":
        raise ValueError(f"Refusing to read {text[:60]!r}: {scheme[0]} is not supported.")
    if len(text) > LONGEST_PATH:
        return []
    name = text[scheme.end() :] if scheme else text
    root = os.environ.get("ROOT_IMAGE_DIR")  # ms-swift's own setting, for relative paths
    candidates = [Path(name), _expanded(Path(name)), _expanded(Path(root or "", name))]
    existing = [path for path in candidates if _exists(path)]
    return existing or ([] if _is_base64(text) else [Path(name)])


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # no such user
        return path


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # longer than a name can be
        return False


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True
