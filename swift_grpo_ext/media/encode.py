"""Decode and process each image once: for a group, for rollout and training, and over rounds.

Symptom: the G samples of a group are encoded one by one, each decoding, resizing and processing the
same images again (ms-swift issue 4413); so do a colocated engine, each turn, and each epoch.
Upstream: ms-swift 4.6, rlhf_trainers/utils.py (`encode_sample`), template/base.py (`_load_image`,
`replace_video2image`); transformers 5, image_processing_utils.py (`preprocess`, of videos too);
qwen_vl_utils (`fetch_video`). Can go when ms-swift encodes the media of a group once.

How an image travels, of Qwen2.5-VL for one:

1. The template asks `_load_image` for it. `MediaCache` names it by its content and has it decoded
   once. Each sample gets a `SharedImage`: a view of the same pixels that knows their name.
2. The template resizes it. `SharedImage.resize` asks the cache too, by that name and the size.
3. The processor makes patches of it. The cache knows the call by the images' names, the arguments
   and the processor's settings; each sample gets tensors that share their memory.
4. The collator lays the patches of all samples in a row, which holds each image's once
   (lazy_concat.py), and a frozen vision tower encodes each once (encoder_cache.py).

What the model sees is bit for bit what it would see without. What cannot be named by its content is
not shared, and costs what it costs in ms-swift.
"""

from __future__ import annotations

import base64
import binascii
import copy
import io
import pickle
import sys
import threading
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import numpy as np
import torch
import xxhash
from cachetools import LRUCache
from PIL import Image
from swift.template import vision_utils
from swift.utils import get_logger

from swift_grpo_ext import memory
from swift_grpo_ext.flags import BYTES_PER_GB, RolloutFlags
from swift_grpo_ext.media.lazy_concat import LazyConcat, is_rows
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.upstream.patches import wrapped
from swift_grpo_ext.upstream.rows import FILE

if TYPE_CHECKING:
    from swift.infer_engine import InferEngine
    from swift.template import Template

logger = get_logger()

BATCH_BYTES = 2**30
"""Bound within a training batch, with `--media_cache_gb 0`. The samples of a group follow one
another, so the images of one row must fit: 34 MB for 1024 x 1024 pixels of Qwen2.5-VL, 410 MB for
the largest that its defaults let through (12.8 megapixels)."""

VIDEO_MODULES = ("qwen_vl_utils", "qwen_omni_utils", "keye_vl_utils")
"""Templates import `fetch_video` from them at each call; a module that is not in use is skipped."""

COLLATED = ("pixel_values", "pixel_values_videos")
"""What ms-swift's templates concatenate over the samples of a batch (template/base.py,
`_data_collator_mm_data`)."""

KINDS = ("decoded", "processed", "reused")


class MediaChangedError(RuntimeError):
    """Something wrote to a tensor that samples share."""


class MediaCache:
    """The decoded and processed media of one process, by content (`--media_cache_gb`).

    Threads may use it (ms-swift's engines encode requests in several): one makes a value, the
    others wait for it.

    Args:
        max_gb: bound of its memory, beside a half of this rank's share of what is free; what was
            not used for longest goes first. With 0, the samples of a training batch share their
            media, and nothing is kept.
        template: of the training. Where its model takes no media, nothing is kept either.
        ranks: all training ranks, which end rounds together; None stands for one.
    """

    def __init__(self, max_gb: float, template: Template, ranks: RankGroup | None = None) -> None:
        self.is_kept = max_gb > 0 and template.model_meta.is_multimodal
        self.counts: Counter[str] = Counter()
        """How many media this round had `decoded`, `processed`, or `reused` of either kind."""

        max_bytes = int(max_gb * BYTES_PER_GB) if self.is_kept else BATCH_BYTES
        free = memory.free_bytes()
        if self.is_kept and max_bytes > free // 2:
            # The other half is for what else a training takes: weights that sleep, batches, vLLM's
            # own cache. A container that holds 8 ranks would end at 8 times the default.
            max_bytes = free // 2
            # Nobody asked for the default.
            tell = logger.info if max_gb == RolloutFlags.media_cache_gb else logger.warning
            tell(
                f"--media_cache_gb {max_gb:g}: each process keeps media up to "
                f"{free / 2 / BYTES_PER_GB:.2g} GB, a half of its share of the memory that is free "
                "here (of the machine, or of what its container may still take)."
            )
        self._entries = LRUCache[bytes, _Entry](max_bytes, getsizeof=attrgetter("num_bytes"))
        # What is held, once more: to look at `_entries` counts as use, and changes what goes first.
        self._made = WeakSet[_Entry]()
        self._ranks = ranks or RankGroup()
        self._round = 0
        self._lock = threading.Lock()
        # A lock for each value that is being made, which goes with its last user.
        self._turns = WeakValueDictionary[bytes, threading.Lock]()
        self._hooks: dict[tuple[int, str], tuple[set[object], ExitStack]] = {}

    @property
    def num_bytes(self) -> int:
        """How many bytes are held now."""
        return int(self._entries.currsize)

    @contextmanager
    def in_training(self, template: Template, *, joins_late: bool = False) -> Iterator[None]:
        """Share the media of all that `template` encodes within the block.

        Args:
            joins_late: let collated patches be `LazyConcat`s, for towers that encode images once.

        Raises:
            MediaChangedError: at the next use or at the end, if a shared tensor was written to.
        """

        def join_late(batch: list[dict[str, Any]]) -> None:
            for encoded in batch:
                for key in COLLATED:
                    if is_rows(value := encoded.get(key)):
                        encoded[key] = LazyConcat([value])

        try:
            with self._sharing(template), ExitStack() as stack:
                if joins_late:
                    stack.enter_context(before_collating(template, join_late))
                yield
            for entry in list(self._made):
                entry.check()
        finally:
            if not self.is_kept:
                self._entries.clear()

    @contextmanager
    def in_rollout(self, engine: InferEngine) -> Iterator[None]:
        """Let a colocated engine, of vLLM or transformers, share its media with the training.

        vLLM has processors of its own, which are of the same class as the template's.
        """
        with ExitStack() as stack:
            if self.is_kept:
                stack.enter_context(self._sharing(engine.template))
            yield

    def end_round(self) -> dict[str, float]:
        """Return the round's metrics by name, over all ranks; none where it had no media."""
        self._round += 1
        counts, self.counts = self.counts, Counter()
        if not self.is_kept:  # on all ranks, which have one setting
            return {}
        gathered = self._ranks.all_gather((counts, self.num_bytes / BYTES_PER_GB))
        total = sum((counts for counts, _ in gathered), Counter[str]())
        if not total:
            return {}
        metrics = {f"media/{kind}": float(total[kind]) for kind in KINDS}
        return metrics | {"media/gb": max(gigabytes for _, gigabytes in gathered)}

    def share(self, asked: object, make: Callable[[], Any], kind: str = "") -> Any:
        """Return what `make()` returned for `asked` of the same content, else what it returns now.

        Each caller gets containers, arrays and images of its own; tensors share their storage.
        What `make` raises is not remembered.

        Args:
            asked: all that the value depends on.
            kind: under which the value is counted, if at all.
        """
        key = content_key(asked)
        if key is None:
            with self._lock:
                self.counts[kind] += bool(kind)
            return make()
        with self._lock:
            turn = self._turns.setdefault(key, threading.Lock())
        # `make` may share parts of the value meanwhile: a part never waits for its whole.
        with turn:
            with self._lock:
                entry = self._entries.get(key)
                self.counts["reused" if entry else kind] += bool(kind)
            if entry is None:
                # Templates encode in inference mode, whose tensors do not count what is written to
                # them.
                with torch.inference_mode(False), torch.no_grad():
                    entry = _Entry(make(), key, self.share)
                with self._lock:
                    # An LRUCache raises for what is larger than itself.
                    if entry.num_bytes <= self._entries.maxsize:
                        self._entries[key] = entry
                        self._made.add(entry)
        entry.check()
        return _map(_lend, entry.value)

    @contextmanager
    def _sharing(self, template: Template) -> Iterator[None]:
        """Send through the cache what the template's and its processors' functions make.

        Of processors their class is hooked, since vLLM has processors of its own.
        """
        processor = getattr(template, "processor", None)
        owners = [getattr(processor, f"{kind}_processor", None) for kind in ("image", "video")]
        hooks: list[tuple[Any, str, Callable[..., Any]]] = [
            (template, "_load_image", self._decode_image),
            (template, "replace_video2image", self._decode_frames),
            *((type(owner), "preprocess", self._process) for owner in owners),
            *((sys.modules.get(name), "fetch_video", self._fetch_video) for name in VIDEO_MODULES),
        ]
        with ExitStack() as stack:
            for owner, name, wrap in hooks:
                if getattr(owner, name, None) is not None:
                    stack.enter_context(self._hooked(owner, name, wrap))
            yield

    @contextmanager
    def _hooked(self, owner: Any, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
        """Hook a function as long as a block of any thread wants it: media are shared once in a
        block within another, and none of two side by side takes it from the other. Threads without
        a block may call it meanwhile: they get what they would have got, from the cache."""
        # Blocks of two threads may end in any order: the last one takes the hook away.
        with self._lock:
            users, hook = self._hooks.setdefault((id(owner), name), (set(), ExitStack()))
            if not users:
                hook.enter_context(wrapped(owner, name, wrap))
            users.add(user := object())
        try:
            yield
        finally:
            with self._lock:
                users.remove(user)
                if not users:
                    hook.close()

    def _decode_image(self, load: Callable[..., Any], image: object, load_images: bool) -> Any:
        # A path that is not to be loaded comes back as it is.
        source = source_key(image, self._round) if load_images else image
        asked = (load.__qualname__, source, load_images)
        return self.share(asked, lambda: load(image, load_images), "decoded")

    def _decode_frames(
        self, upstream: Callable[..., Any], load: Callable[[Any], Any], *args: Any, **kwargs: Any
    ) -> Any:
        def shared(video: object) -> Any:
            asked = (load, source_key(video, self._round))
            return self.share(asked, lambda: load(video), "decoded")

        return upstream(shared, *args, **kwargs)

    def _fetch_video(self, fetch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked = (fetch.__module__, source_key([args, kwargs], self._round))
        return self.share(asked, lambda: fetch(*args, **kwargs), "decoded")

    def _process(
        self, preprocess: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # Settings may change between two calls, and two processors of a class may differ in some
        # that the call gives. transformers 5 fills in from attributes what a call leaves out
        # (image_processing_utils.py, `preprocess`); all other attributes count too.
        settings = dict(vars(owner))
        names = settings.pop("_valid_kwargs_names", ())
        given = {name: getattr(owner, name, None) for name in names} | kwargs
        settings = {name: value for name, value in settings.items() if name not in given}
        named = (preprocess.__qualname__, type(owner), sorted(settings.items()))
        asked = (named, args, sorted(given.items()))
        return self.share(asked, lambda: preprocess(owner, *args, **kwargs), "processed")


class SharedImage(Image.Image):
    """A view of decoded pixels that other views share; whoever changes it gets pixels of its own.

    Pillow copies pixels before it writes to them where `readonly` is set. What `convert` and
    `resize` make of it is shared like the image itself. It is decoded: `thumbnail` of a JPEG can no
    longer ask the decoder for fewer pixels.
    """

    _key: bytes | None = None
    _pixels: Any = None
    _share: Callable[..., Any]

    @classmethod
    def of(cls, image: Image.Image, key: bytes, share: Callable[..., Any]) -> SharedImage:
        """Return a view of `image`, whose content `key` names; raise what decoding it raises."""
        image.load()
        view: Any = image._new(image.im)  # Pillow's way to a second image of the same pixels
        view.__class__ = cls
        view.format = image.format
        view.readonly = image.readonly = 1  # both: neither may write to what the other shows
        view._key, view._pixels, view._share = key, image.im, share
        return view

    @property
    def content_key(self) -> bytes | None:
        """The pixels' name; None once they are this image's own."""
        return self._key if self.im is self._pixels else None

    def copy(self) -> Image.Image:
        if self.content_key is None:
            return super().copy()
        return SharedImage.of(self, self.content_key, self._share)

    def convert(self, *args: Any, **kwargs: Any) -> Image.Image:
        return self._derived("convert", self.mode, args, kwargs)

    def resize(self, *args: Any, **kwargs: Any) -> Image.Image:
        return self._derived("resize", self.size, args, kwargs)

    def thumbnail(self, *args: Any, **kwargs: Any) -> None:
        self._ensure_mutable()  # Pillow takes over the pixels that `resize` returns, and writes
        super().thumbnail(*args, **kwargs)

    def _derived(self, name: str, current: object, args: Any, kwargs: Any) -> Image.Image:
        if args == (current,) and not kwargs:
            return self.copy()  # what changes nothing is a view, and takes no room
        method = getattr(super(), name)
        if self.content_key is None:
            return method(*args, **kwargs)
        return self._share((name, self, args, kwargs), lambda: method(*args, **kwargs))


class _Entry:
    """A value of the cache, its size in bytes, and what tells whether it was written to."""

    def __init__(self, made: Any, key: bytes, share: Callable[..., Any]) -> None:
        leaves: list[object] = []

        # Its images bear names from here on, so that what is made of them is found by name.
        def hold(leaf: object) -> object:
            if isinstance(leaf, Image.Image) and getattr(leaf, "content_key", None) is None:
                leaf = SharedImage.of(leaf, key + len(leaves).to_bytes(4, "big"), share)
            leaves.append(leaf)
            return leaf

        self.value = _map(hold, made)
        self.num_bytes = 0
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # A processor may work on an accelerator, whose memory is not ours to hold.
                is_here = leaf.device.type == "cpu" and leaf.layout == torch.strided
                self.num_bytes += leaf.untyped_storage().nbytes() if is_here else sys.maxsize
            elif isinstance(leaf, np.ndarray):
                self.num_bytes += leaf.nbytes
            elif isinstance(leaf, Image.Image):
                self.num_bytes += 4 * leaf.width * leaf.height  # Pillow's RGB takes four a pixel
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        tensors = [tensor for tensor in tensors if not tensor.is_inference()]  # no versions
        self._versions = [(tensor, tensor._version, content_key(tensor)) for tensor in tensors]

    def check(self) -> None:
        """Raise `MediaChangedError` where somebody wrote to a tensor of the value."""
        for i, (tensor, version, key) in enumerate(self._versions):
            if tensor._version == version:
                continue
            # vLLM 0.32 gives what it was lent another shape in place (Idefics3, `squeeze_`), which
            # counts as a version and changes nobody else's.
            if key is not None and content_key(tensor) == key:
                self._versions[i] = (tensor, tensor._version, key)
            else:
                raise MediaChangedError(
                    f"A tensor of shape {tuple(tensor.shape)} that samples of a group share was "
                    "written to in place, by the template, the collator or the model, and so all "
                    "of them changed. Expected: never written. Report the model type."
                )


def content_key(value: object) -> bytes | None:
    """Return a name that equal contents share and different ones do not.

    It is None for what cannot be written down: open files, closures, other devices' tensors.
    """
    stream = io.BytesIO()
    namer = _Namer(stream, protocol=5)
    # Without a memo, contents alone count, not which of them are one object: a row that holds one
    # string twice, and one with two equal strings, have the same name.
    namer.fast = True
    try:
        namer.dump(value)
    except Exception:  # whatever objects of other libraries raise
        return None
    return xxhash.xxh3_128_digest(stream.getbuffer())  # SHA-256 takes 20 times as long


class _Namer(pickle.Pickler):
    """Write images that have a name as that name, and tensors as arrays."""

    def persistent_id(self, value: object) -> object:
        if isinstance(value, SharedImage) and value.content_key is not None:
            return value.content_key
        if isinstance(value, torch.Tensor):
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return value.dtype, tuple(value.shape), xxhash.xxh3_128_digest(flat)
        return None


def source_key(source: object, round_: int) -> object:
    """Return what names the content of what media are loaded from, however it is given.

    ms-swift hands rows of bytes to an engine in base64 and to training as they are (4.6,
    rl_core/data.py, `to_infer_request`), and paths with and without a dictionary around. A file is
    known by its path and state, so that a replaced one is another medium. An address, and a name
    that is no file's, say nothing of content: they are good for one round.
    """
    if isinstance(source, bytes):
        return xxhash.xxh3_128_digest(source)
    if isinstance(source, dict):
        if "bytes" in source:
            return source_key(source["bytes"] or source.get("path"), round_)
        return {name: source_key(value, round_) for name, value in source.items()}
    if isinstance(source, (list, tuple)):
        return [source_key(item, round_) for item in source]
    if not isinstance(source, str):
        return source
    text = source.strip().removeprefix(FILE)
    with suppress(OSError, ValueError):
        # None for base64; a name that is no file's as it is.
        if path := vision_utils._check_path(text):
            state = Path(path).stat()
            return path, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns
    data = text.partition(";base64,")[2] if text.startswith("data:") else text
    with suppress(binascii.Error, ValueError):
        return xxhash.xxh3_128_digest(base64.b64decode(data, validate=True))
    return source, round_


@contextmanager
def before_collating(
    template: Template, change: Callable[[list[dict[str, Any]]], None]
) -> Iterator[None]:
    """Call `change` with each batch that `template.data_collator` gets within the block."""

    def collate(upstream: Callable[..., Any], batch: list[dict[str, Any]], **kwargs: Any) -> Any:
        change(batch)
        return upstream(batch, **kwargs)

    with wrapped(template, "data_collator", collate):
        yield


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` in containers of its own, with `function` applied to all that they hold."""
    if type(value) in (list, tuple):
        return type(value)(_map(function, item) for item in value)
    if type(value) is dict:
        return {key: _map(function, item) for key, item in value.items()}
    if isinstance(value, UserDict):  # what transformers' processors return
        other = copy.copy(value)
        other.data = _map(function, value.data)
        return other
    return function(value)


def _lend(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()  # shares memory and version: what is written to it shows in `check`
    return leaf.copy() if isinstance(leaf, Image.Image) else copy.deepcopy(leaf)
