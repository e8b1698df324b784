"""Where ms-swift decodes and processes media, open to sharing while a context lasts.

Symptom: the G samples of a group are encoded one by one, each decoding, resizing and processing the
same images again (issue 4413).
Upstream: ms-swift 4.6, rlhf_trainers/utils.py (`encode_sample`), rl_core/resample.py; template
`_load_image` and `replace_video2image`; transformers 5 `preprocess` of image and video processors;
qwen_vl_utils `fetch_image` and `fetch_video`.
Adaptation: for the time of a context, these attributes of the template, of its processors and of
the Qwen modules go through a `Share`; images become `SharedImage`s, which share what is made of
them with `convert` and `resize` too. No class is changed, and all is put back.
Can go when ms-swift encodes the media of a group once.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from PIL import Image

VIDEO_MODULES = ("qwen_vl_utils", "qwen_omni_utils", "keye_vl_utils")
"""Their `fetch_video` is imported by templates at each call; a module not yet in use has none."""

Share = Callable[[Any, Callable[[], Any]], Any]
"""`share(parts, make)`: what `make()` returned for equal `parts`, or what it returns now."""


class SharedImage(Image.Image):
    """A view of decoded pixels that other views share; whoever changes it gets pixels of its own.

    Pillow's `readonly` does the copying on write. `convert` and `resize` are shared like the image.
    It is decoded: `thumbnail` of a JPEG can no longer ask the decoder for fewer pixels.
    """

    _key: Hashable = None
    _pixels: Any = None
    _share: Share

    @classmethod
    def of(cls, image: Image.Image, key: Hashable, share: Share) -> SharedImage:
        """A view of `image`, whose content `key` names; raises what decoding it raises."""
        image.load()
        view: Any = image._new(image.im)
        view.__class__ = cls
        view.format = image.format
        view.readonly = image.readonly = 1
        view._key, view._pixels, view._share = key, image.im, share
        return view

    @property
    def content_key(self) -> Hashable:
        """What names the pixels; None once they are this image's own."""
        return self._key if self.im is self._pixels else None

    def copy(self) -> Image.Image:
        if self.content_key is None:
            return super().copy()
        return SharedImage.of(self, self._key, self._share)

    def convert(self, *args: Any, **kwargs: Any) -> Image.Image:
        return self._derived(super().convert, args, kwargs)

    def resize(self, *args: Any, **kwargs: Any) -> Image.Image:
        return self._derived(super().resize, args, kwargs)

    def _derived(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Image.Image:
        make = functools.partial(method, *args, **kwargs)
        if self.content_key is None:
            return make()
        return self._share((method.__name__, self, args, kwargs), make)

    # These two write without asking `readonly`.
    def thumbnail(self, *args: Any, **kwargs: Any) -> None:
        self._ensure_mutable()
        super().thumbnail(*args, **kwargs)

    def frombytes(self, *args: Any, **kwargs: Any) -> None:
        self._ensure_mutable()
        super().frombytes(*args, **kwargs)


class _Hook:
    """One replaced attribute: calls go to `wrap(share, original, ...)` of the last open context."""

    def __init__(self, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        self.owner, self.name, self.wrap = owner, name, wrap
        self.shares: list[Share] = []
        self.original = getattr(owner, name)
        self.had_own = name in vars(owner)
        # A function, not this object: a copied or printed owner must not meet a live hook.
        setattr(owner, name, functools.wraps(self.original)(lambda *a, **kw: self.call(*a, **kw)))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        shares = self.shares[-1:]  # a thread may be here while the last context ends
        own = functools.partial(self.wrap, shares[0], self.original) if shares else self.original
        return own(*args, **kwargs)

    def remove(self) -> None:
        if self.had_own:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


_hooks: dict[tuple[int, str], _Hook] = {}
_hooks_lock = threading.Lock()


@contextmanager
def media_hooks(template: Any, share: Share) -> Iterator[None]:
    """Send the media of `template` through `share`; contexts may nest and overlap."""
    with ExitStack() as stack:
        stack.enter_context(_hooked(template, "_load_image", _share_call, share))
        stack.enter_context(_hooked(template, "replace_video2image", _share_frames, share))
        processor = getattr(template, "processor", None)
        for name in ("image_processor", "video_processor"):
            owner = getattr(processor, name, None)
            if hasattr(owner, "preprocess"):
                wrap = functools.partial(_share_processed, owner)
                stack.enter_context(_hooked(owner, "preprocess", wrap, share))
        for module in filter(None, map(sys.modules.get, VIDEO_MODULES)):
            stack.enter_context(_hooked(module, "fetch_video", _share_call, share))
        yield


@contextmanager
def _hooked(owner: Any, name: str, wrap: Callable[..., Any], share: Share) -> Iterator[None]:
    key = (id(owner), name)
    with _hooks_lock:
        hook = _hooks.get(key) or _hooks.setdefault(key, _Hook(owner, name, wrap))
        hook.shares.append(share)
    try:
        yield
    finally:
        with _hooks_lock:
            hook.shares.remove(share)
            if not hook.shares:
                _hooks.pop(key).remove()


def _share_call(share: Share, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    named = (original.__module__, original.__qualname__)
    return share((named, args, kwargs), lambda: original(*args, **kwargs))


def _share_frames(share: Share, original: Any, load_video: Any, *args: Any, **kwargs: Any) -> Any:
    def load(video: Any) -> Any:
        return share((load_video, video), lambda: load_video(video))

    return original(load, *args, **kwargs)


def _share_processed(
    owner: Any, share: Share, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    # Settings may change between two calls: they are part of what is asked.
    settings = {name: value for name, value in vars(owner).items() if name != "preprocess"}
    parts = (type(owner), settings, args, kwargs)
    return share(parts, lambda: original(*args, **kwargs))
