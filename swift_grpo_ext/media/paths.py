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
too (a public address may send on to a private one), and what came. ms-swift's loaders fetch by
requests, httpx (transformers' `load_video`), and libav (`qwen_vl_utils.fetch_video`): none of them
gets a URL, and none of them a playlist, whose addresses libav would fetch.
Can go when `swift rollout` asks `SafeMediaPath` and `SafeUrlFetcher`.
"""

# Names that no file can have raise in pathlib, and are "not there" in os.path:
# ruff: noqa: PTH100, PTH110, PTH111, PTH113, PTH118

from __future__ import annotations

import base64
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from functools import wraps
from io import BytesIO
from itertools import product
from pathlib import Path
from string import ascii_letters, digits
from tempfile import TemporaryDirectory, mkstemp
from typing import Any
from urllib.parse import urlsplit

import swift.utils
from PIL import Image
from swift.template import Template, vision_utils
from swift.template.template_inputs import StdTemplateInputs, TemplateInputs

from swift_grpo_ext.upstream.patches import patch
from swift_grpo_ext.upstream.rows import COLUMNS, FILE

VARIABLE = "SWIFT_MEDIA_ALLOWED_DIRS"
LONGEST_PATH = 4096
"""Linux's PATH_MAX. A longer string is base64."""

HEADER_CHARACTERS = (2**16, 2**24)
"""Starts of base64 in which most pictures say their size, and in which all others do, behind the
largest of colour profiles: 0.1 and 25 ms, where a video of 300 MB takes seconds."""

PROBED_BYTES = 2**20
"""Start of a medium by which ffmpeg finds out what it is (libavformat/format.c, PROBE_BUF_MAX)."""

URLS = ("http://", "https://")

_PLAYLIST = re.compile(rb"\A\s*#EXTM3U|\A\s*ffconcat|<MPD|^c=IN IP", re.IGNORECASE | re.MULTILINE)
"""ffmpeg knows HLS, lists of files, DASH and SDP by these beginnings."""

_NOT_BASE64 = bytes(set(range(256)) - set(ascii_letters.encode() + digits.encode() + b"+/"))

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?:,[^:]*)?:(//)?")
"""This matches the protocol of a URL, and ffmpeg's with options (`subfile,,start,0,,:`)."""


def check_media(request: Mapping[str, Any]) -> None:
    """Judge all media that a request names.

    Raises:
        ValueError: beginning with the field, for a file outside the directories that
            `SWIFT_MEDIA_ALLOWED_DIRS` lists (where it is set), a private address (unless
            `SWIFT_ALLOW_INTERNAL_URL` is set), another protocol than http and https, a playlist, a
            picture that is too large.
    """
    for field, text in _media(request):
        try:
            _check(text.strip())
        except ValueError as e:
            raise ValueError(f"{field}: {e}") from e


def _check(text: str) -> None:
    if text.startswith(URLS):
        if hasattr(swift.utils, "SafeUrlFetcher"):  # from ms-swift 4.6 on
            swift.utils.SafeUrlFetcher.check_url(text)
        return
    if os.environ.get(VARIABLE) and hasattr(swift.utils, "SafeMediaPath"):
        for path in _paths(text):
            swift.utils.SafeMediaPath.check(path)
    # As ms-swift opens it (template/vision_utils.py, `load_file`), to which every fourth URL of a
    # file is base64.
    path = vision_utils._check_path(text.removeprefix(FILE))
    scheme = _SCHEME.match(text)
    if scheme and scheme[1].lower() not in ("data", "file") and not os.path.isfile(path or ""):
        raise _unsupported(text, scheme)
    if path is not None:
        if os.path.isfile(path):
            # What cannot be opened is no playlist that a loader could follow; it says so itself.
            with suppress(OSError), Path(path).open("rb") as file:
                _check_start(file.read(PROBED_BYTES))
            _check_pixels(path)
        return
    content = text.partition(";base64,")[2] if text.startswith("data:") else text
    for length in HEADER_CHARACTERS:
        # What is no base64 is left out, as ms-swift's own decoder does.
        start = content[:length].encode("ascii", "ignore").translate(None, _NOT_BASE64)
        decoded = base64.b64decode(start[: len(start) // 4 * 4])
        _check_start(decoded)
        if _check_pixels(BytesIO(decoded)):
            return


def _check_start(content: bytes) -> None:
    """Raise `ValueError` for a medium that names others: ffmpeg, within the loaders of videos and
    audios, would fetch these by itself, from any address."""
    # Playlists are text: behind a zero byte, the same words are pixels.
    text = content[:PROBED_BYTES].partition(b"\0")[0]
    if found := _PLAYLIST.search(text):
        raise ValueError(
            f"a playlist ({found[0].decode().strip()!r}), which names further addresses; expected "
            "the medium itself"
        )


def _check_pixels(picture: BytesIO | str) -> bool:
    """Return whether Pillow knows it as a picture, by its header.

    Raises:
        ValueError: it has more pixels than Pillow's limit.
    """
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


def check_redirects() -> None:
    """Let the templates of this process, of a replica, encode files in the place of URLs: each is
    fetched here alone, judged at each hop and by what came. And let Pillow refuse a picture that
    would take gigabytes, whose size it knows before it decodes it."""
    # Pillow itself refuses from twice its limit on, and warns before.
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    if not hasattr(swift.utils, "SafeUrlFetcher"):
        return
    from swift.infer_engine import InferRequest

    upstream = Template.encode

    @wraps(upstream)
    def encode(self: Template, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # As ms-swift's own `encode` begins, which finds the result and copies it once more.
        if isinstance(inputs, InferRequest):
            inputs = asdict(inputs)
        is_made = isinstance(inputs, TemplateInputs)
        inputs = deepcopy(inputs) if is_made else TemplateInputs.from_dict(inputs)
        parts = (inputs.chosen, inputs.rejected, *inputs.positive, *inputs.negative)
        # Encoding reads the media: the files go with the block.
        with TemporaryDirectory(prefix="swift_grpo_ext_") as folder:
            for part, kind in product(filter(None, parts), COLUMNS):
                setattr(part, kind, _fetched(getattr(part, kind), kind, folder))
            return upstream(self, inputs, *args, **kwargs)

    patch(Template, encode=encode)


def _fetched(value: object, field: str, folder: str) -> object:
    """Return media with files in `folder` in the place of URLs, however nested.

    Raises:
        ValueError: beginning with the field, for what may not be fetched.
        requests.RequestException: nothing came.
    """
    if isinstance(value, (list, tuple)):
        return [_fetched(item, field, folder) for item in value]
    if isinstance(value, Mapping):
        return {name: _fetched(item, field, folder) for name, item in value.items()}
    if not isinstance(value, str) or not value.strip().startswith(URLS):
        return value
    url, seconds = value.strip(), float(os.getenv("SWIFT_TIMEOUT", "20"))  # as of `load_file`
    try:
        content = swift.utils.SafeUrlFetcher.read(url, timeout=seconds if seconds > 0 else None)
        _check_start(content)
        _check_pixels(BytesIO(content))
    except ValueError as e:
        raise ValueError(f"{field}: {url}: {e}") from e
    # Some loaders know the kind of a file by its name's end.
    ending = re.search(r"\.[A-Za-z0-9]{1,5}$", urlsplit(url).path)
    file, name = mkstemp(dir=folder, suffix=ending[0] if ending else "")
    with os.fdopen(file, "wb") as opened:
        opened.write(content)
    return name


def _media(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every medium of a request, by ms-swift's own reading of it, with its field's name."""
    # `rejected_images` and the like are media of further inputs.
    for name, value in request.items():
        if name.endswith(COLUMNS):
            yield from ((name, text) for text in _texts(value))
    try:
        inputs = StdTemplateInputs.from_dict({"messages": request.get("messages") or []})
    except Exception as e:
        raise ValueError(f"messages: cannot be read ({type(e).__name__}: {e})") from e
    for kind in COLUMNS:
        yield from (("messages", text) for text in _texts(getattr(inputs, kind)))
    # ms-swift takes images from these tags (template/base.py, `_replace_image_tags`).
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
        raise _unsupported(text, scheme)
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


def _unsupported(text: str, scheme: re.Match[str]) -> ValueError:
    """Return the error for a protocol: ffmpeg has dozens, all of which go somewhere."""
    return ValueError(f"Refusing to read {text[:60]!r}: {scheme[0]} is not supported.")
