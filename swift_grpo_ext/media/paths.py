"""Refuse files, addresses and sizes of media that a request to `swift rollout` may not name.

See docs/promises.md, F5 and F7. `swift deploy` asks `SafeMediaPath` and `SafeUrlFetcher`;
`swift rollout` opens any file and fetches from any address (ms-swift 4.6, pipelines/infer).

The server judges the names in a request before a replica gets it. A replica fetches URLs into
files, so that the loaders of ms-swift, transformers and qwen_vl_utils get no URL. It refuses
playlists, since ffmpeg fetches the addresses in them without any rule.
Can go when `swift rollout` asks as `swift deploy` does.
"""

# Names that no file can have raise in pathlib, and are "not there" in os.path:
# ruff: noqa: PTH110, PTH111

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from swift.template import Template, vision_utils
from swift.template.template_inputs import TemplateInputs
from swift.utils import SafeMediaPath, SafeUrlFetcher

from swift_grpo_ext.upstream.patches import Moment, patch, repair
from swift_grpo_ext.upstream.rows import COLUMNS, FILE

LONGEST_PATH = 4096  # Linux's PATH_MAX; a longer string is base64
PROBED_BYTES = 2**20  # ffmpeg finds out by them what a medium is (libavformat, PROBE_BUF_MAX)
URLS = ("http://", "https://")

# ffmpeg knows HLS, lists of files, DASH and SDP by these beginnings.
_PLAYLIST = re.compile(rb"\A\s*#EXTM3U|\A\s*ffconcat|<MPD|^c=IN IP", re.IGNORECASE | re.MULTILINE)
# base64, with or without its kind
_CONTENT = re.compile(r"data:.+?;base64,[\s\S]*|([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2,3}={1,2})?")
# the protocol of a URL, also with options for ffmpeg (`subfile,,start,0,,:`)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})(?:,[^:]*)?:")


def check_media(request: Mapping[str, Any]) -> None:
    """Judge the names of all media in a request.

    Raises:
        ValueError: for a file outside the directories of `SWIFT_MEDIA_ALLOWED_DIRS` (where set), a
            private address (unless `SWIFT_ALLOW_INTERNAL_URL` is set), or another protocol than
            http and https. The text begins with the field.
    """
    try:
        prompt = TemplateInputs.from_dict({"messages": [], **request}).chosen
    except Exception as e:
        raise ValueError(f"messages: cannot be read ({type(e).__name__}: {e})") from e
    # ms-swift takes images from these tags (template/base.py, `_replace_image_tags`).
    texts = (prompt.system, *(message.get("content") for message in prompt.messages))
    tags = [re.findall(r"<img>(.+?)</img>", text) for text in texts if isinstance(text, str)]
    fields = {"messages": tags} | {kind: getattr(prompt, kind) for kind in COLUMNS}
    for field, media in fields.items():
        try:
            _each(media, _check_name)
        except ValueError as e:
            raise ValueError(f"{field}: {e}") from e


def _each(media: Any, judge: Callable[[str], str]) -> Any:
    """Return media with `judge(text)` in the place of each text, however nested."""
    if isinstance(media, (list, tuple)):
        return [_each(item, judge) for item in media]
    if isinstance(media, Mapping):
        return {name: _each(item, judge) for name, item in media.items()}
    return judge(media.strip()) if isinstance(media, str) else media


def _check_name(text: str) -> str:
    if text.startswith(URLS):
        SafeUrlFetcher.check_url(text)
        return text
    name = text.removeprefix(FILE)
    home = os.path.expanduser(name)
    # ms-swift's own reading adds ROOT_IMAGE_DIR and takes `..` away. Others open the name as it is.
    paths = (name, home, vision_utils._check_path(name) or name)
    files = [path for path in paths if len(path) <= LONGEST_PATH and os.path.exists(path)]
    scheme = _SCHEME.match(name)
    if scheme and scheme[1].lower() != "data" and not files:
        raise ValueError(f"Refusing to read {text[:60]!r}: {scheme[0]} is not supported.")
    # Also for a file that does not exist: an answer must not tell whether it does.
    is_content = len(name) > LONGEST_PATH or _CONTENT.fullmatch(name)
    for file in files or ([] if is_content else [home]):
        SafeMediaPath.check(file)
    return text


@repair(
    Moment.REPLICA,
    symptom="A URL of a request leads to a private address, or to a file without end.",
    upstream="ms-swift 4.6, template/vision_utils.py (`load_file`) follows redirects without a "
    "check, in a replica's process.",
    until="ms-swift judges each hop and what comes",
)
def check_redirects() -> None:
    """Let a replica's templates encode files in the place of URLs, and refuse playlists. Let Pillow
    refuse a picture by the size in its header."""
    # Pillow itself refuses from twice its limit on, and warns before.
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    from swift.infer_engine import InferRequest

    upstream = Template.encode

    @wraps(upstream)
    def encode(self: Template, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # As ms-swift's own `encode` begins, which tries three times: it would fetch as often.
        if isinstance(inputs, InferRequest):
            inputs = asdict(inputs)
        if not isinstance(inputs, TemplateInputs):
            inputs = TemplateInputs.from_dict(inputs)
        # Encoding reads the media: the files go with the block.
        with TemporaryDirectory(prefix="swift_grpo_ext_") as folder:
            for kind in COLUMNS:
                judge = partial(_fetched, kind=kind, folder=folder)
                setattr(inputs.chosen, kind, _each(getattr(inputs.chosen, kind), judge))
            return upstream(self, inputs, *args, **kwargs)

    patch(Template, encode=encode)


def _fetched(text: str, kind: str, folder: str) -> str:
    """Return a medium as it is, or a file in `folder` in the place of a URL.

    Raises:
        ValueError: it may not be fetched, or is a playlist.
        requests.RequestException: nothing came.
    """
    from swift.pipelines.infer.deploy import SwiftDeploy

    medium, start = text, b""
    if text.startswith(URLS):
        medium = SwiftDeploy._materialize_media(text, kind.removesuffix("s"), folder)
    with suppress(Exception):  # its loader will say why it cannot be read
        path = vision_utils._check_path(medium)
        # Not by `load_file`, which reads a file of any size whole.
        with Path(path).open("rb") if path else vision_utils.load_file(medium) as file:
            start = file.read(PROBED_BYTES)
    # Playlists are text: behind a zero byte, the same words are pixels.
    if found := _PLAYLIST.search(start.partition(b"\0")[0]):
        raise ValueError(
            f"{text[:60]!r} is a playlist ({found[0].decode().strip()!r}), which names further "
            "addresses; expected the medium itself"
        )
    return medium
