"""Which files and addresses a request to `swift rollout` may name (SPEC F7).

Symptom: `SWIFT_MEDIA_ALLOWED_DIRS` keeps callers of `swift deploy` from files elsewhere on the
server's disk; `swift rollout` opens whatever a request names, and fetches from any address.
Upstream: ms-swift 4.6, utils/media_utils.py (`SafeMediaPath`), utils/url_utils.py
(`SafeUrlFetcher`), pipelines/infer/deploy.py; nothing in pipelines/infer/rollout.py. ms-swift 4.5
has no such rules.
Adaptation: ms-swift makes its list of media from a request, and the same rules judge the list
before a replica gets the request. Only a string that begins as ms-swift fetches it counts as a URL;
what can be a path is one (`data:/../..` names a file).
Replicas fetch what a request names: there, each hop of a fetch is judged too. A public address may
send on to a private one.
Can go when `swift rollout` asks `SafeMediaPath` and `SafeUrlFetcher`.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
import swift.utils
from swift.template import vision_utils
from swift.template.template_inputs import StdTemplateInputs

VARIABLE = "SWIFT_MEDIA_ALLOWED_DIRS"
KINDS = ("images", "videos", "audios")
LONGEST_PATH = 4096
"""Linux's PATH_MAX. A longer string is base64."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")


def check_media(request: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a file outside the directories that `SWIFT_MEDIA_ALLOWED_DIRS` lists
    (where it is set), and for a private address (unless `SWIFT_ALLOW_INTERNAL_URL` is set)."""
    for text in map(str.strip, _media(request)):
        if text.startswith(("http://", "https://")):
            if hasattr(swift.utils, "SafeUrlFetcher"):
                swift.utils.SafeUrlFetcher.check_url(text)
        elif os.environ.get(VARIABLE) and hasattr(swift.utils, "SafeMediaPath"):
            for path in _paths(text):
                swift.utils.SafeMediaPath.check(str(path))


@cache
def check_redirects() -> None:
    """Let ms-swift judge each address that this process fetches media from. For replicas."""
    if not hasattr(swift.utils, "SafeUrlFetcher"):
        return

    class CheckedSession(requests.Session):
        def send(self, request: Any, **kwargs: Any) -> requests.Response:
            swift.utils.SafeUrlFetcher.check_url(request.url)
            return super().send(request, **kwargs)

    load_audio = vision_utils._load_audio_librosa

    @wraps(load_audio)
    def load(audio: Any, *args: Any, **kwargs: Any) -> Any:
        # Else ffmpeg would fetch, in its own way, what the session has refused.
        is_url = isinstance(audio, str) and audio.strip().startswith("http")
        return load_audio(vision_utils.load_file(audio) if is_url else audio, *args, **kwargs)

    vision_utils.requests = SimpleNamespace(**{**vars(requests), "Session": CheckedSession})
    vision_utils._load_audio_librosa = load


def _media(request: Mapping[str, Any]) -> Iterator[str]:
    """Every medium of a request, by ms-swift's own reading of it."""
    # `rejected_images` and the like are media of further inputs.
    for name, value in request.items():
        if name.endswith(KINDS):
            yield from _texts(value)
    try:
        inputs = StdTemplateInputs.from_dict({"messages": request.get("messages") or []})
    except Exception as e:
        raise ValueError(f"the messages cannot be read ({type(e).__name__}: {e})") from e
    for kind in KINDS:
        yield from _texts(getattr(inputs, kind))
    contents = (message.get("content") for message in inputs.messages)
    for content in (inputs.system, *contents):
        if isinstance(content, str):
            yield from re.findall(r"<img>(.+?)</img>", content)


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
    if scheme and scheme[1].lower() not in ("http", "https", "data", "file"):
        raise ValueError(f"Refusing to read {text[:60]!r}: {scheme[0]} is not supported.")
    if len(text) > LONGEST_PATH:
        return []
    name = text[scheme.end() :] if scheme and scheme[1].lower() == "file" else text
    root = os.environ.get("ROOT_IMAGE_DIR")  # ms-swift's own setting, for relative paths
    candidates = [Path(name), _expanded(Path(name)), _expanded(Path(root or "", name))]
    # ms-swift takes `..` away by itself, and so leaves folders that do not exist.
    candidates += [Path(os.path.abspath(path)) for path in candidates]  # noqa: PTH100
    existing = [path for path in candidates if _exists(path)]
    is_content = _is_base64(text) or re.match(r"data:(.+?);base64,", text)
    return existing or ([] if is_content else [Path(name)])


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
