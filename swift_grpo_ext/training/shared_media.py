"""Encode the media of a group once: its G samples share one decoding and one processing.

    with shared_media(template):
        ...  # ms-swift's own loop over the samples

What the model sees is bit for bit what it would see without. A medium is known by its content (a
path by its name, bytes and pixels by their digest) and by every argument and setting that it is
processed with. A context is for one batch; nothing outlives it, because a file may change.
What cannot be told apart by content is not shared, and costs what it costs in ms-swift.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import threading
import types
from collections import OrderedDict, UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from PIL import Image

from swift_grpo_ext.upstream.media import Share, SharedImage, media_hooks

DEFAULT_MAX_BYTES = 2**30
"""The samples of a group follow one another, so the images of one row must fit, and little more.
With Qwen2.5-VL a 1024 x 1024 image takes 38 MB (its pixels three times, its patches in float32),
and the largest that the model's defaults let through, 12.8 megapixels, takes 460 MB."""

LONGEST_NAME = 256
"""Characters. A longer string is base64, and known by its digest."""

_PLAIN = (type(None), int, float, Enum, type, torch.dtype, torch.device, np.number, np.bool_)

_HOST = ("cpu", torch.strided)
"""Where a tensor must be, and how it must lie, for its digest to be worth its time."""


class MediaChangedError(RuntimeError):
    """Something wrote to a tensor that samples share."""


class UnknownContentError(TypeError):
    """A value whose content has no name."""


@contextmanager
def shared_media(template: Any, max_bytes: int = DEFAULT_MAX_BYTES) -> Iterator[MediaCache]:
    """Let everything that `template` encodes within share its media; put all back at the end.

    Args:
        template: An ms-swift template, for text only or with media. It may encode in threads.
        max_bytes: What the cache may hold; the least recently used goes first. 0 holds nothing.

    Raises:
        MediaChangedError: At the next use or at the end, if a shared tensor was written to.
    """
    cache = MediaCache(max_bytes)
    try:
        with media_hooks(template, cache.share):
            yield cache
        cache.check()
    finally:
        cache.close()


class MediaCache:
    """Values by content, bounded in bytes, for several threads: one makes, the others wait."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self._entries: OrderedDict[Hashable, Future[_Entry]] = OrderedDict()
        self._lock = threading.Lock()
        self._is_open = True

    def share(self, parts: Any, make: Callable[[], Any]) -> Any:
        """What `make()` returned for `parts` of the same content, else what it returns now.

        Each caller gets containers, arrays and images of its own; tensors share their storage.
        What `make` raises is raised in all who wait for it, and then forgotten.
        """
        try:
            key = content_key(parts)
        except UnknownContentError:
            return make()
        future, is_mine = self._claim(key)
        if is_mine:
            self._fulfil(key, future, make)
        return future.result().lend()

    def check(self) -> None:
        """Raise `MediaChangedError` if a tensor of the cache was written to."""
        with self._lock:
            entries = [future.result() for future in self._entries.values() if future.done()]
        for entry in entries:
            entry.check()

    def close(self) -> None:
        """Drop everything; from now on, all is made anew."""
        with self._lock:
            self._is_open = False
            self._entries.clear()
            self.num_bytes = 0

    def _claim(self, key: Hashable) -> tuple[Future[_Entry], bool]:
        with self._lock:
            future = self._entries.get(key)
            if future is not None:
                self.num_hits += 1
                self._entries.move_to_end(key)
                return future, False
            self.num_misses += 1
            future = Future()
            if self._is_open:
                self._entries[key] = future
            return future, True

    def _fulfil(self, key: Hashable, future: Future[_Entry], make: Callable[[], Any]) -> None:
        try:
            # Templates encode in inference mode, whose tensors do not count what is written.
            with torch.inference_mode(False), torch.no_grad():
                entry = _Entry(_with_shared_images(make(), key, self.share))
        except BaseException as e:  # the others wait for it, whatever it is
            with self._lock:
                self._entries.pop(key, None)
            future.set_exception(e)
            return
        with self._lock:
            future.set_result(entry)
            if self._entries.get(key) is future:
                self.num_bytes += entry.num_bytes
                self._evict(key)

    def _evict(self, newest: Hashable) -> None:
        """Drop what was not used for longest, until the rest fits; first what never will."""
        keys = [key for key, future in self._entries.items() if future.done()]
        if self._entries[newest].result().num_bytes > self.max_bytes:
            keys.insert(0, newest)
        for key in keys:
            if self.num_bytes <= self.max_bytes:
                return
            entry = self._entries.pop(key).result()
            self.num_bytes -= entry.num_bytes
            entry.check()


class _Entry:
    """One value of the cache, its size in bytes, and what tells whether it was written to."""

    def __init__(self, value: Any) -> None:
        leaves: list[Any] = []
        _map(leaves.append, value)
        self.value = value
        self.num_bytes = sum(_num_bytes(leaf) for leaf in leaves)
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
    return hashlib.sha256(data).digest()


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


def _with_shared_images(value: Any, key: Hashable, share: Share) -> Any:
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
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return leaf.nbytes
    # Pillow keeps an RGB pixel in four bytes.
    return 4 * leaf.width * leaf.height if isinstance(leaf, Image.Image) else 0


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
