"""Decode and process media once: for a group, for rollout and training, and over rounds.

    with shared_media(template, cache):
        ...  # ms-swift's own loop over the samples

What the model sees is bit for bit what it would see without. A medium is known by its content (a
file by its path and the digest of its bytes, bytes and pixels by their digest) and by every
argument and setting that it is processed with. Without a cache of its own, a context is for one
batch, and nothing outlives it.
What cannot be told apart by content is not shared, and costs what it costs in ms-swift.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
from collections import Counter, UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image
from swift.utils import get_logger

from swift_grpo_ext.flags import BYTES_PER_GB
from swift_grpo_ext.media.cache import Sources, Store, Tally
from swift_grpo_ext.media.hooks import SharedImage, engine_hooks, media_hooks
from swift_grpo_ext.media.prefetch import MediaPrefetch

logger = get_logger()

DEFAULT_MAX_BYTES = 2**30
"""The samples of a group follow one another, so the images of one row must fit, and little more.
With Qwen2.5-VL a 1024 x 1024 image takes 34 MB (its pixels twice, its patches in float32), and the
largest that the model's defaults let through, 12.8 megapixels, takes 410 MB."""

LONGEST_NAME = 256
"""Characters. A longer string is known by its digest."""

_PLAIN = (type(None), int, float, Enum, type, torch.dtype, torch.device, np.number, np.bool_)

_HOST = ("cpu", torch.strided)
"""Where a tensor must be, and how it must lie, for its digest to be worth its time."""


class MediaChangedError(RuntimeError):
    """Something wrote to a tensor that samples share."""


class UnknownContentError(TypeError):
    """A value whose content has no name."""


@contextmanager
def shared_media(
    template: Any, cache: MediaCache | None = None, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Iterator[MediaCache]:
    """Let everything that `template` encodes within share its media; put all back at the end.

    Args:
        template: An ms-swift template, for text only or with media. It may encode in threads.
        cache: What outlives the context. Without one, all is forgotten at the end.
        max_bytes: What a cache that is forgotten may hold.

    Raises:
        MediaChangedError: At the next use or at the end, if a shared tensor was written to.
    """
    own = MediaCache(max_bytes) if cache is None else cache
    try:
        with media_hooks(template, own):
            yield own
        own.check()
    finally:
        if cache is None:
            own.close()


class RoundMedia:
    """The media of a training process, over its rounds (`--media_cache_gb`).

    Args:
        max_gb: the bound; 0 shares within a training batch, as samples of a group, and no more.
        template: of the training. Where its model takes no media, the bound is 0.
        all_gather: of the training's ranks. Called once a round where the bound is not 0.
    """

    def __init__(
        self, max_gb: float, template: Any, all_gather: Callable[[Any], Sequence[Any]]
    ) -> None:
        is_kept = max_gb > 0 and template.model_meta.is_multimodal
        self.cache = MediaCache(int(max_gb * BYTES_PER_GB)) if is_kept else None
        self._prefetch = MediaPrefetch(self.cache)
        self._all_gather = all_gather

    def in_training(self, template: Any) -> AbstractContextManager[MediaCache]:
        self._prefetch.stop()
        return shared_media(template, self.cache)

    @contextmanager
    def in_rollout(self, engine: Any) -> Iterator[None]:
        """Let a colocated engine, of vLLM or transformers, share its media with the training."""
        if self.cache is None:
            yield
            return
        self._prefetch.stop()
        with shared_media(engine.template, self.cache), engine_hooks(engine, self.cache):
            yield

    def end_round(self, *, training: bool = True) -> dict[str, float]:
        """Metrics by name, over all ranks; none where the round had no media.

        What was prefetched counts in the training round that it was for, not in an evaluation.
        """
        if self.cache is None:
            return {}
        self._prefetch.wait()
        self.cache.end_round()
        made = self.cache.tally.take()
        if training:
            made += self._prefetch.take_made()
        own = made, self.cache.num_bytes / BYTES_PER_GB
        counts, gigabytes = zip(*self._all_gather(own), strict=True)
        total = sum(counts, Counter[str]())
        if not total:
            return {}
        kinds = ("decoded", "processed", "reused")
        return {f"media/{kind}": float(total[kind]) for kind in kinds} | {
            "media/gb": max(gigabytes)
        }

    def prefetch(self, template: Any, rows: Callable[[], Sequence[Any]]) -> None:
        """After `end_round`: make in another thread what the next round will need of `rows()`."""
        if self.cache is None:
            return
        try:
            self._prefetch.start(template, rows())
        except Exception as e:  # what the round needs of it, it raises
            logger.warning(f"The media of the next round are not prepared ahead: {e!r}.")


class MediaCache(Store["_Entry"]):
    """A `Store` of what is made of media, by the content of what it is made from."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.tally = Tally()
        self._sources = Sources()

    def share(
        self,
        parts: Any,
        make: Callable[[], Any],
        kind: str = "",
        count: Callable[..., None] | None = None,
    ) -> Any:
        """What `make()` returned for `parts` of the same content, else what it returns now.

        Each caller gets containers, arrays and images of its own; tensors share their storage.
        What `make` raises is raised in all who wait for it, and then forgotten.

        Args:
            kind: under which it is counted, if at all.
            count: called in the place of the method.
        """
        count = count or self.count
        try:
            key = content_key(parts)
        except UnknownContentError:
            count(kind, made=True)
            return make()
        is_made = False

        def entry() -> _Entry:
            nonlocal is_made
            is_made = True
            # Templates encode in inference mode, whose tensors do not count what is written.
            with torch.inference_mode(False), torch.no_grad():
                return _Entry(_with_shared_images(make(), key, self.share))

        held = self.get(key, entry)
        count(kind, made=is_made)
        return held.lend()

    def count(self, kind: str, *, made: bool, times: int = 1) -> None:
        """Tell the tally that media of `kind` were asked for, and whether they were made."""
        if kind:
            with self._lock:
                self.tally.asked[kind] += times
                self.tally.made[kind] += times * made

    def image_source(self, image: Any) -> Any:
        """What names the content of an image that is to be loaded."""
        return self._sources.image(image, self.round)

    def video_source(self, asked: Any) -> Any:
        """What names the content of what a loader of videos is asked for."""
        return self._sources.video(asked, self.round)


class _Entry:
    """One value of the cache, its size in bytes, and what tells whether it was written to."""

    def __init__(self, value: Any) -> None:
        leaves: list[Any] = []
        _map(leaves.append, value)
        self.value = value
        self.num_bytes = sum(_num_bytes(leaf) for leaf in leaves)
        self.is_processed = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        self._versions = [(x, _version(x)) for x in leaves if isinstance(x, torch.Tensor)]

    def check(self) -> None:
        for tensor, version in self._versions:
            if _version(tensor) != version:
                raise MediaChangedError(
                    f"A tensor of shape {tuple(tensor.shape)} that samples of a group share was "
                    "written to in place, by the template, the collator or the model, and so all "
                    "of them changed. Expected: never written. Encode without `shared_media`, and "
                    "report the model type."
                )

    def lend(self) -> Any:
        self.check()
        return _map(_lend, self.value)


def content_key(value: Any) -> Hashable:
    """A name that equal contents share and different ones do not.

    Raises `UnknownContentError` for what it does not know: open files, closures, other devices'
    tensors.
    """
    kind = type(value)
    if isinstance(value, SharedImage) and value.content_key is not None:
        return value.content_key
    if isinstance(value, _PLAIN) or (kind is types.FunctionType and value.__closure__ is None):
        return kind, value
    if kind is str:
        return value if len(value) <= LONGEST_NAME else (kind, _digest(value.encode()))
    if kind is bytes:
        return kind, _digest(value)
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(content_key, value))
    if isinstance(value, (Mapping, UserDict)):
        return kind, tuple((key, content_key(item)) for key, item in value.items())
    if isinstance(value, functools.partial):
        return kind, content_key((value.func, value.args, value.keywords))
    if dataclasses.is_dataclass(value):
        return kind, tuple(content_key(getattr(value, f.name)) for f in dataclasses.fields(value))
    return kind, *_pixels_key(value)


def _pixels_key(value: Any) -> tuple[Hashable, ...]:
    if isinstance(value, Image.Image) and value.mode not in ("P", "PA"):
        return value.mode, value.size, content_key(value.info), _digest(value.tobytes())
    if isinstance(value, torch.Tensor) and (value.device.type, value.layout) == _HOST:
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return value.dtype, value.shape, _digest(flat)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return value.dtype.str, value.shape, _digest(flat)
    raise UnknownContentError(f"{type(value).__name__} has no content that can be named.")


def _digest(data: Any) -> bytes:
    return xxhash.xxh3_128_digest(data)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """`value` in containers of its own, with `function` applied to all that they hold."""
    if type(value) in (list, tuple):
        return type(value)(_map(function, item) for item in value)
    if type(value) is dict:
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, UserDict):
        other = copy.copy(value)
        other.data = _map(function, value.data)
        return other
    return function(value)


def _with_shared_images(value: Any, key: Hashable, share: Callable[..., Any]) -> Any:
    images: list[Image.Image] = []

    def shared(leaf: Any) -> Any:
        if not isinstance(leaf, Image.Image) or getattr(leaf, "content_key", None) is not None:
            return leaf
        images.append(leaf)
        return SharedImage.of(leaf, (key, len(images)), share)

    return _map(shared, value)


def _lend(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    return leaf.copy() if isinstance(leaf, Image.Image) else copy.deepcopy(leaf)


def _num_bytes(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor) and (leaf.device.type, leaf.layout) != _HOST:
        return sys.maxsize  # a processor on an accelerator: its memory is not ours to hold
    if isinstance(leaf, torch.Tensor):
        return leaf.untyped_storage().nbytes()
    if isinstance(leaf, np.ndarray):
        return leaf.nbytes
    # Pillow keeps an RGB pixel in four bytes.
    return 4 * leaf.width * leaf.height if isinstance(leaf, Image.Image) else 0


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
