"""Refuse files, addresses and sizes of pictures that a request to `swift rollout` may not name.

See docs/promises.md, F5 and F7.

Symptom: `SWIFT_MEDIA_ALLOWED_DIRS` keeps callers of `swift deploy` from files elsewhere on the
server's disk; `swift rollout` opens whatever a request names, and fetches from any address. It
makes gigabytes of a picture of 20 kB, or an error without a cause.
Upstream: ms-swift 4.6, utils/media_utils.py (`SafeMediaPath`), utils/url_utils.py
(`SafeUrlFetcher`), pipelines/infer/deploy.py; nothing in pipelines/infer/rollout.py. ms-swift 4.5
has no such rules.
Adaptation: ms-swift makes its list of media from a request, and the same rules judge the list
before a replica gets the request. Only a string that begins as ms-swift fetches it counts as a URL;
what can be a path is one (`data:/../..` names a file). The header of each picture that is there is
read, and none is decoded. Replicas fetch what a request names: there, each hop of a fetch is judged
too (a public address may send on to a private one), and the picture that came.
Can go when `swift rollout` asks `SafeMediaPath` and `SafeUrlFetcher`.
"""

# Names that no file can have raise in pathlib, and are "not there" in os.path:
# ruff: noqa: PTH100, PTH110, PTH111, PTH113, PTH118

from __future__ import annotations

import base64
import binascii
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, wraps
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import requests
import swift.utils
from PIL import Image
from swift.template import vision_utils
from swift.template.template_inputs import StdTemplateInputs

from swift_grpo_ext.upstream.patches import patch

VARIABLE = "SWIFT_MEDIA_ALLOWED_DIRS"
KINDS = ("images", "videos", "audios")
LONGEST_PATH = 4096
"""Linux's PATH_MAX. A longer string is base64."""

HEADER_CHARACTERS = (2**16, 2**24)
"""Starts of base64 in which most pictures say their size, and in which all others do, behind the
largest of colour profiles: 0.1 and 25 ms, where a video of 300 MB takes seconds."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(//)?")


def check_media(request: Mapping[str, Any]) -> None:
    """Judge all media that a request names.

    Raises:
        ValueError: beginning with the field, for a file outside the directories that
            `SWIFT_MEDIA_ALLOWED_DIRS` lists (where it is set), a private address (unless
            `SWIFT_ALLOW_INTERNAL_URL` is set), a picture that is too large.
    """
    for field, text in _media(request):
        try:
            _check(text.strip())
        except ValueError as e:
            raise ValueError(f"{field}: {e}") from e


def _check(text: str) -> None:
    if text.startswith(("http://", "https://")):
        if hasattr(swift.utils, "SafeUrlFetcher"):
            swift.utils.SafeUrlFetcher.check_url(text)
        return
    if os.environ.get(VARIABLE) and hasattr(swift.utils, "SafeMediaPath"):
        for path in _paths(text):
            swift.utils.SafeMediaPath.check(path)
    # As ms-swift opens it (template/vision_utils.py, `load_file`).
    path = vision_utils._check_path(text)
    if path is not None:
        _check_pixels(path)
        return
    content = text.partition(";base64,")[2] if text.startswith("data:") else text
    for part in (content[:length] for length in HEADER_CHARACTERS):
        with suppress(binascii.Error):  # the replica says what is wrong with it
            if _check_pixels(BytesIO(base64.b64decode(part))):
                return


def _check_pixels(picture: BytesIO | str) -> bool:
    """Return whether Pillow knows it as a picture, by its header.

    Raises:
        ValueError: it has more pixels than Pillow's limit.
    """
    if isinstance(picture, str) and not os.path.isfile(picture):
        return False
    try:
        with Image.open(picture) as image:
            width, height = image.size
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise ValueError(str(e)) from e
    except Exception:  # Pillow's readers raise many kinds
        return False
    limit = Image.MAX_IMAGE_PIXELS
    if limit and width * height > limit:
        raise ValueError(
            f"a picture of {width} x {height} pixels; expected at most {limit:,} in all "
            "(PIL.Image.MAX_IMAGE_PIXELS, which a plugin of the server may set)"
        )
    return True


@cache
def check_redirects() -> None:
    """Let ms-swift judge each address that this process, of a replica, fetches media from, and
    Pillow refuse a picture that would take gigabytes, whose size it knows before it decodes it."""
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    if not hasattr(swift.utils, "SafeUrlFetcher"):
        return

    class CheckedSession(requests.Session):
        def send(self, request: requests.PreparedRequest, **kwargs: Any) -> requests.Response:
            swift.utils.SafeUrlFetcher.check_url(request.url)
            response = super().send(request, **kwargs)
            try:
                _check_pixels(BytesIO(response.content))
            except ValueError as e:
                raise ValueError(f"{request.url}: {e}") from e
            return response

    load_audio = vision_utils._load_audio_librosa

    @wraps(load_audio)
    def load(audio: Any, *args: Any, **kwargs: Any) -> Any:
        # Else ffmpeg would fetch, in its own way, what the session has refused.
        is_url = isinstance(audio, str) and audio.strip().startswith("http")
        return load_audio(vision_utils.load_file(audio) if is_url else audio, *args, **kwargs)

    checked = SimpleNamespace(**{**vars(requests), "Session": CheckedSession})
    patch(vision_utils, requests=checked, _load_audio_librosa=load)


def _media(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every medium of a request, by ms-swift's own reading of it, with its field's name."""
    # `rejected_images` and the like are media of further inputs.
    for name, value in request.items():
        if name.endswith(KINDS):
            yield from ((name, text) for text in _texts(value))
    try:
        inputs = StdTemplateInputs.from_dict({"messages": request.get("messages") or []})
    except Exception as e:
        raise ValueError(f"messages: cannot be read ({type(e).__name__}: {e})") from e
    for kind in KINDS:
        yield from (("messages", text) for text in _texts(getattr(inputs, kind)))
    contents = (message.get("content") for message in inputs.messages)
    for content in (inputs.system, *contents):
        if isinstance(content, str):
            yield from (("messages", text) for text in re.findall(r"<img>(.+?)</img>", content))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))


def _paths(text: str) -> list[str]:
    """Return the files that a text may stand for; none for URLs and content.

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
    root = os.environ.get("ROOT_IMAGE_DIR", "")  # ms-swift's own setting, for relative paths
    paths = [name, os.path.expanduser(name), os.path.expanduser(os.path.join(root, name))]
    # ms-swift takes `..` away by itself, and so leaves folders that do not exist.
    paths += [os.path.abspath(path) for path in paths]
    if existing := [path for path in paths if os.path.exists(path)]:
        return existing
    if re.match(r"data:(.+?);base64,", text):
        return []
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return [name]
    return []
