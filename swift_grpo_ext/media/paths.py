"""Restricts the media files, URLs and image sizes in requests to `swift rollout`.

See docs/promises.md, F5 and F7. `swift deploy` applies `SafeMediaPath` and `SafeUrlFetcher`, but
`swift rollout` opens any file and fetches from any address (ms-swift 4.6, pipelines/infer).

The server checks the names in a request before a replica gets it. A replica downloads URLs into
files, so that the loaders of ms-swift, transformers and qwen_vl_utils get no URL. It rejects
playlists, because ffmpeg would fetch the addresses in them unchecked.
Can go when `swift rollout` applies the checks of `swift deploy`.
"""

# For impossible file names, pathlib raises where os.path returns False:
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

from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair
from swift_grpo_ext.upstream.rows import COLUMNS, FILE

LONGEST_PATH = 4096  # Linux's PATH_MAX; a longer string is base64
PROBED_BYTES = 2**20  # ffmpeg detects the format from these (libavformat, PROBE_BUF_MAX)
URLS = ("http://", "https://")

# ffmpeg recognizes HLS, file lists, DASH and SDP by these strings.
_PLAYLIST = re.compile(rb"\A\s*#EXTM3U|\A\s*ffconcat|<MPD|^c=IN IP", re.IGNORECASE | re.MULTILINE)
# A `data:` URL, or bare base64.
_CONTENT = re.compile(r"data:.+?;base64,[\s\S]*|([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2,3}={1,2})?")
# A URL's protocol, possibly with options for ffmpeg (`subfile,,start,0,,:`).
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30})(?:,[^:]*)?:")


def check_media(request: Mapping[str, Any]) -> None:
    """Raise a `ValueError`, which begins with the field, if a request names a file outside of the
    directories in `SWIFT_MEDIA_ALLOWED_DIRS` (if set), a private address (unless
    `SWIFT_ALLOW_INTERNAL_URL` is set), or another protocol than http and https."""
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
            _map_texts(media, _check_name)
        except ValueError as e:
            raise ValueError(f"{field}: {e}") from e


def _map_texts(media: Any, function: Callable[[str], str]) -> Any:
    """Return media with `function` applied to each text, at any depth."""
    if isinstance(media, (list, tuple)):
        return [_map_texts(item, function) for item in media]
    if isinstance(media, Mapping):
        return {name: _map_texts(item, function) for name, item in media.items()}
    return function(media.strip()) if isinstance(media, str) else media


def _check_name(text: str) -> str:
    if text.startswith(URLS):
        SafeUrlFetcher.check_url(text)
        return text
    name = text.removeprefix(FILE)
    home = os.path.expanduser(name)
    # ms-swift's loader adds ROOT_IMAGE_DIR and resolves `..`; other loaders open the name itself.
    paths = (name, home, vision_utils._check_path(name) or name)
    files = [path for path in paths if len(path) <= LONGEST_PATH and os.path.exists(path)]
    scheme = _SCHEME.match(name)
    if scheme and scheme[1].lower() != "data" and not files:
        raise ValueError(f"Refusing to read {text[:60]!r}: {scheme[0]} is not supported.")
    # Also check files that do not exist: an answer must not reveal which files do.
    is_content = len(name) > LONGEST_PATH or _CONTENT.fullmatch(name)
    for file in files or ([] if is_content else [home]):
        SafeMediaPath.check(file)
    return text


@repair(PatchPhase.REPLICA)
def check_redirects() -> None:
    """Have a replica's templates download URLs into files, and reject playlists. Have Pillow reject
    a picture by the size in its header.

    Symptom: a URL in a request redirects to a private address, or to an endless file.
    Upstream: ms-swift 4.6, template/vision_utils.py (`load_file`) follows redirects without a
    check, in a replica's process. Can go when ms-swift checks each redirect and the content.
    """
    # By default, Pillow only warns up to twice its limit.
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    from swift.infer_engine import InferRequest

    upstream = Template.encode

    @wraps(upstream)
    def encode(self: Template, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Parse and download outside of ms-swift's `encode`, which retries three times.
        if isinstance(inputs, InferRequest):
            inputs = asdict(inputs)
        if not isinstance(inputs, TemplateInputs):
            inputs = TemplateInputs.from_dict(inputs)
        # Encoding reads the files into memory, so that they may be deleted after it.
        with TemporaryDirectory(prefix="swift_grpo_ext_") as folder:
            for kind in COLUMNS:
                fetch = partial(_fetched, kind=kind, folder=folder)
                setattr(inputs.chosen, kind, _map_texts(getattr(inputs.chosen, kind), fetch))
            return upstream(self, inputs, *args, **kwargs)

    patch(Template, encode=encode)


def _fetched(text: str, kind: str, folder: str) -> str:
    """Return a medium, or for a URL its download in `folder`. Raise a `ValueError` for a medium
    that may not be fetched, or is a playlist; `requests` raises if a download fails."""
    from swift.pipelines.infer.deploy import SwiftDeploy

    medium, start = text, b""
    if text.startswith(URLS):
        medium = SwiftDeploy._materialize_media(text, kind.removesuffix("s"), folder)
    with suppress(Exception):  # if it cannot be read, its loader will raise
        path = vision_utils._check_path(medium)
        # Not by `load_file`, which would read a file of any size into memory.
        with Path(path).open("rb") if path else vision_utils.load_file(medium) as file:
            start = file.read(PROBED_BYTES)
    # Playlists are text: a match after a zero byte is binary data.
    if found := _PLAYLIST.search(start.partition(b"\0")[0]):
        raise ValueError(
            f"{text[:60]!r} is a playlist ({found[0].decode().strip()!r}), which names further "
            "addresses; expected the medium itself"
        )
    return medium
