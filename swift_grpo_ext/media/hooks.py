"""Where ms-swift and vLLM decode and process media, open to sharing while a context lasts.

`media_hooks`. Symptom: the G samples of a group are encoded one by one, each decoding, resizing and
processing the same images again (issue 4413), and so does each epoch.
Upstream: ms-swift 4.6, rlhf_trainers/utils.py (`encode_sample`), rl_core/resample.py; template
`_load_image` and `replace_video2image`; transformers 5 `preprocess` of image and video processors;
qwen_vl_utils `fetch_image` and `fetch_video`.
Adaptation: for the time of a context, these attributes of the template, of its processors and of
the Qwen modules go through a `Media`; images become `SharedImage`s, which share what is made of
them with `convert` and `resize` too. No class is changed, and all is put back.
Can go when ms-swift encodes the media of a group once.

`engine_hooks`. Symptom: an engine in the training's process decodes, hashes and processes the
images that the training decodes and processes too; with `--sleep_level` vLLM forgets them each
round.
Upstream: vLLM 0.32, multimodal/processing/context.py (`get_hf_processor`), v1/engine/llm_engine.py
(`add_request`); ms-swift 4.6 names no media (infer_engine/vllm_engine.py, `_add_request`).
Adaptation: as above, of the processors that vLLM loads, by which a call for several images of
Qwen-VL is one for each; and a request names its images (`multi_modal_uuids`), so that vLLM hashes
no pixels. A vLLM that we do not know is left as it is, and the log says so once: this saves time,
and nothing depends on it.
Can go when ms-swift hands vLLM processed media.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from PIL import Image
from swift.utils import get_logger

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import mismatch

logger = get_logger()

VIDEO_MODULES = ("qwen_vl_utils", "qwen_omni_utils", "keye_vl_utils")
"""Their `fetch_video` is imported by templates at each call; a module not yet in use has none."""

PER_IMAGE = (
    ["pixel_values", "image_grid_thw"],
    ["pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"],  # transformers 4
)
"""What processors return that lay the patches of one image after those of another (Qwen-VL)."""


class Media(Protocol):
    """What media go through."""

    def share(self, parts: Any, make: Callable[[], Any], kind: str = "") -> Any:
        """What `make()` returned for equal `parts`, or what it returns now."""

    def count(self, kind: str, *, made: bool, times: int = 1) -> None:
        """What was asked for without `share`."""

    def image_source(self, image: Any) -> Any:
        """What names the content of an image that is to be loaded."""

    def video_source(self, asked: Any) -> Any:
        """What names the content of what a loader of videos is asked for."""


class SharedImage(Image.Image):
    """A view of decoded pixels that other views share; whoever changes it gets pixels of its own.

    Pillow's `readonly` does the copying on write. `convert` and `resize` are shared like the image.
    It is decoded: `thumbnail` of a JPEG can no longer ask the decoder for fewer pixels.
    """

    _key: Hashable = None
    _pixels: Any = None
    _share: Callable[..., Any]

    @classmethod
    def of(cls, image: Image.Image, key: Hashable, share: Callable[..., Any]) -> SharedImage:
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

    # What changes nothing is a view, as `copy`, and takes no room.
    def convert(self, *args: Any, **kwargs: Any) -> Image.Image:
        if args == (self.mode,) and not kwargs:
            return self.copy()
        return self._derived(super().convert, args, kwargs)

    def resize(self, *args: Any, **kwargs: Any) -> Image.Image:
        if args == (self.size,) and not kwargs:
            return self.copy()
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
    """One replaced attribute: calls go to `wrap(media, original, ...)` of the last open context."""

    def __init__(self, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        self.owner, self.name, self.wrap = owner, name, wrap
        self.media: list[Media] = []
        self.original = getattr(owner, name)
        self.had_own = name in vars(owner)
        # A function, not this object: a copied or printed owner must not meet a live hook.
        setattr(owner, name, functools.wraps(self.original)(lambda *a, **kw: self.call(*a, **kw)))

    def call(self, *args: Any, **kwargs: Any) -> Any:
        media = self.media[-1:]  # a thread may be here while the last context ends
        own = functools.partial(self.wrap, media[0], self.original) if media else self.original
        return own(*args, **kwargs)

    def remove(self) -> None:
        if self.had_own:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


_hooks: dict[tuple[int, str], _Hook] = {}
_hooks_lock = threading.Lock()


@contextmanager
def media_hooks(template: Any, media: Media) -> Iterator[None]:
    """Send what `template` loads and processes through `media`; contexts may nest and overlap."""
    with ExitStack() as stack:
        stack.enter_context(_hooked(template, "_load_image", _share_image, media))
        stack.enter_context(_hooked(template, "replace_video2image", _share_frames, media))
        _hook_processor(getattr(template, "processor", None), media, stack)
        for module in filter(None, map(sys.modules.get, VIDEO_MODULES)):
            stack.enter_context(_hooked(module, "fetch_video", _share_video, media))
        yield


@contextmanager
def engine_hooks(engine: Any, media: Media) -> Iterator[None]:
    """Send what ms-swift's vLLM engine processes through `media`; another engine is left alone."""
    inner = getattr(engine, "engine", None)
    is_of_transformers = isinstance(inner, torch.nn.Module)
    renderer = None if is_of_transformers or not _knows_vllm() else getattr(inner, "renderer", None)
    if renderer is None or renderer.mm_processor is None:
        yield
        return
    with ExitStack() as stack:
        hooked: set[int] = set()

        def get_processor(media: Media, original: Any, *args: Any, **kwargs: Any) -> Any:
            processor = original(*args, **kwargs)
            if id(processor) not in hooked:
                hooked.add(id(processor))
                _hook_processor(processor, media, stack)
            return processor

        info = renderer.mm_processor.info
        stack.enter_context(_hooked(info, "get_hf_processor", get_processor, media))
        stack.enter_context(_hooked(engine.engine, "add_request", _name_images, media))
        yield


@functools.cache
def _knows_vllm() -> bool:
    missing = [text for text in map(mismatch, pins.MEDIA) if text]
    if missing:
        logger.info(
            "--media_cache_gb is for the training alone: this vLLM decodes and processes images by "
            f"itself, as without the plugin ({missing[0]})."
        )
    return not missing


def _hook_processor(processor: Any, media: Media, stack: ExitStack) -> None:
    for name in ("image_processor", "video_processor"):
        owner = getattr(processor, name, None)
        if hasattr(owner, "preprocess"):
            wrap = functools.partial(_share_processed, owner)
            stack.enter_context(_hooked(owner, "preprocess", wrap, media))


@contextmanager
def _hooked(owner: Any, name: str, wrap: Callable[..., Any], media: Media) -> Iterator[None]:
    key = (id(owner), name)
    with _hooks_lock:
        hook = _hooks.get(key) or _hooks.setdefault(key, _Hook(owner, name, wrap))
        hook.media.append(media)
    try:
        yield
    finally:
        with _hooks_lock:
            hook.media.remove(media)
            if not hook.media:
                _hooks.pop(key).remove()


def _share_image(media: Media, original: Any, image: Any, load_images: bool) -> Any:
    # A path that is not to be loaded comes back as it is.
    source = media.image_source(image) if load_images else image
    parts = (original.__qualname__, source, load_images)
    return media.share(parts, lambda: original(image, load_images), "decoded")


def _share_video(media: Media, original: Any, *args: Any, **kwargs: Any) -> Any:
    named = (original.__module__, original.__qualname__)
    parts = (named, media.video_source(args), media.video_source(kwargs))
    return media.share(parts, lambda: original(*args, **kwargs), "decoded")


def _share_frames(media: Media, original: Any, load_video: Any, *args: Any, **kwargs: Any) -> Any:
    def load(video: Any) -> Any:
        parts = (load_video, media.video_source(video))
        return media.share(parts, lambda: load_video(video), "decoded")

    return original(load, *args, **kwargs)


def _share_processed(
    owner: Any, media: Media, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    asked = _settings(owner, kwargs)
    is_per_image = getattr(owner, "model_input_names", None) in PER_IMAGE
    is_of_images = len(args) == 1 and _are_several(args[0]) and kwargs.get("videos") is None
    if is_per_image and is_of_images:
        return _share_each(media, asked, functools.partial(original, **kwargs), args[0])
    return media.share((*asked, args), lambda: original(*args, **kwargs), "processed")


def _settings(owner: Any, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All that a processor's result depends on beside its media.

    Settings may change between two calls, and two processors of a model may differ in those that
    the call overrides. transformers 5 fills in what a call leaves out from attributes
    (image_processing_utils.py, `preprocess`); other processors' attributes all count.
    """
    own = {name: value for name, value in vars(owner).items() if name != "preprocess"}
    names = own.pop("_valid_kwargs_names", ())
    given = {name: getattr(owner, name, None) for name in names} | kwargs
    own = {name: value for name, value in own.items() if name not in given}
    return type(owner), sorted(own.items()), sorted(given.items())


def _are_several(images: Any) -> bool:
    are_images = type(images) is list and all(isinstance(x, Image.Image) for x in images)
    return are_images and len(images) > 1


def _share_each(media: Media, asked: Any, process: Any, images: list[Any]) -> Any:
    """A call for each image: rollouts ask for those of a turn, training for those of all turns."""
    is_made = False

    def together() -> Any:
        nonlocal is_made
        is_made = True
        made = [
            media.share((*asked, ([image],)), functools.partial(process, [image]), "processed")
            for image in images
        ]
        whole = copy.copy(made[0])
        whole.data = {name: torch.cat([each[name] for each in made]) for name in made[0]}
        return whole

    whole = media.share((*asked, (images,)), together)
    if not is_made:
        media.count("processed", made=False, times=len(images))
    return whole


def _name_images(
    media: Media, original: Any, request_id: str, prompt: Any, *a: Any, **kw: Any
) -> Any:
    data = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
    images = (data or {}).get("image")
    names = [_uuid(image) for image in (images if isinstance(images, list) else [images])]
    if any(names) and "multi_modal_uuids" not in prompt:
        prompt = {**prompt, "multi_modal_uuids": {"image": names}}
    return original(request_id, prompt, *a, **kw)


def _uuid(image: Any) -> str | None:
    """The same for the same content in all processes; None for what vLLM has to hash."""
    key = getattr(image, "content_key", None) if isinstance(image, SharedImage) else None
    return None if key is None else hashlib.sha256(repr(key).encode()).hexdigest()
