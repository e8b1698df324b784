"""Encode each image once a round, where the vision tower is frozen (`--encoder_cache_gb`).

The passes over a group show the tower its images G times: for the old policy, for the reference
model, and for each update. Where nothing in it is trained, it says the same each time. Here a call
runs it on those images alone that are new since the round began, each once, without a graph, and
repeats its outputs for the others. Images are told apart by content.

Outputs are as without it but for rounding: kernels may add in another order where fewer images
share a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import xxhash
from peft.tuners.tuners_utils import BaseTunerLayer
from swift.utils import get_logger
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swift_grpo_ext.arguments import BYTES_PER_GB
from swift_grpo_ext.logits.sharding import shard_ranks
from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.training.lazy_concat import LazyConcat, memory_of

logger = get_logger()

_PLAIN = (type(None), bool, int, float, str, torch.dtype)


class _NotByImageError(Exception):
    """An output that is not of one image after another."""


class Output(NamedTuple):
    """What a tower returns for one image."""

    leaves: list[Any]
    structure: Any
    """Of which `leaves` are the leaves, in torch's form."""

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, Tensor))


class EncoderCache:
    """The outputs of frozen vision towers, of this round's images.

    Args:
        max_gb: bound of what is held on the towers' device, for all models together. What does not
            fit is encoded once a call. 0 leaves models as they are.
        model: of the training. Where ranks gather its weights in each call, every rank makes all
            calls, and only the images of a call are shared.
        others: further models that see the same images (reference, teacher).
    """

    def __init__(self, max_gb: float, model: nn.Module, others: Iterable[Any] = ()) -> None:
        self._max_bytes = int(max_gb * BYTES_PER_GB)
        self._model = model
        self._outputs: dict[Any, Output] = {}
        self._num_bytes = 0
        self._num_encoded = 0
        self.is_sharded = False
        self.towers: list[str] = []
        for each in (model, *others) if max_gb else ():
            for name, tower in frozen_towers(each):
                FrozenTower(tower, self)
                self.towers.append(name)
        if self.towers:
            logger.info(
                f"{', '.join(dict.fromkeys(self.towers))}, frozen, encodes each image of a round "
                f"once (--encoder_cache_gb {max_gb:g})."
            )

    def begin_round(self) -> None:
        """Forget all images. Call it outside of a forward, where sharded weights show as such."""
        self.forget()
        if self.towers and not self.is_sharded:
            self.is_sharded = bool(shard_ranks(self._model).groups)

    def forget(self) -> None:
        self._outputs.clear()
        self._num_bytes = 0

    def take_encoded(self) -> int:
        """Images that went through a tower since the last call."""
        taken, self._num_encoded = self._num_encoded, 0
        return taken

    def encode(
        self, keys: Sequence[Any], run: Callable[[Sequence[int]], list[Output]]
    ) -> list[Output]:
        """For each key an output; `run` makes those of the images with these numbers."""
        held = {} if self.is_sharded else self._outputs
        new = {key: number for number, key in enumerate(keys) if key not in held}
        made = dict(zip(new, run([*new.values()]), strict=True)) if new else {}
        self._num_encoded += len(made)
        outputs = [made[key] if key in made else held[key] for key in keys]
        for key, output in made.items():
            if not self.is_sharded and self._num_bytes + output.num_bytes <= self._max_bytes:
                self._outputs[key] = output
                self._num_bytes += output.num_bytes
        return outputs


def frozen_towers(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The vision towers of a model that ms-swift knows, in which nothing is trained or adapted."""
    base: Any = base_model(model)
    architecture = getattr(getattr(base, "model_meta", None), "model_arch", None)
    for name in getattr(architecture, "vision_tower", None) or ():
        try:
            tower = base.get_submodule(name)
        except AttributeError:
            continue
        if is_constant(tower):
            yield name, tower


def is_constant(tower: nn.Module) -> bool:
    """Whether equal images have equal outputs, whatever is trained and whatever else is seen."""
    if any(parameter.requires_grad for parameter in tower.parameters()):
        return False
    changing = (BaseTunerLayer, nn.modules.batchnorm._BatchNorm)
    return not any(isinstance(module, changing) for module in tower.modules())


@dataclass
class Call:
    """The images that a tower is called with."""

    pixels: Tensor
    """Of all images, one after the other in dimension 0."""

    sizes: list[int]
    """Rows of `pixels` of each image."""

    grids: list[Any]
    """Patches in time, height and width of each image; None where images have one size."""

    rest: dict[str, Any]
    """Further arguments, plain values."""

    @property
    def images(self) -> Sequence[Tensor]:
        if isinstance(self.pixels, LazyConcat):
            return self.pixels.split_parts(self.sizes)
        return self.pixels.split(self.sizes)

    @property
    def how(self) -> tuple[Any, ...]:
        """What an image's output depends on, beside the image and the tower."""
        is_autocast = torch.is_autocast_enabled(self.pixels.device.type)
        return self.pixels.dtype, is_autocast, *self.rest.items()


class FrozenTower:
    """Stands in for a tower's `forward`.

    Towers take either patches [sum of t x h x w, values] with `grid_thw` [images, 3] (Qwen-VL,
    GLM-V) or images [images, channels, height, width] (SigLIP, CLIP, InternViT). Other calls, of
    audio towers for one, pass as they are.
    """

    def __init__(self, tower: nn.Module, cache: EncoderCache) -> None:
        self._tower, self._cache = tower, cache
        self._own = own = tower.forward
        self._is_separable: dict[Any, bool] = {}

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = self._read(*args, **kwargs)
            if call is None or not is_constant(tower):
                return own(*args, **kwargs)
            with torch.no_grad():
                is_separable = self._is_separable.get(call.how)
                if is_separable is None:
                    self._is_separable[call.how] = is_separable = self._probe(call)
                return self._encode(call) if is_separable else own(*args, **kwargs)

        tower.forward = forward

    def _read(self, *args: Any, **kwargs: Any) -> Call | None:
        # By position as towers name them; ms-swift wraps some, so that no signature says it.
        given = dict(zip(("pixel_values", "grid_thw"), args, strict=False)) | kwargs
        pixels = given.pop("pixel_values" if "pixel_values" in given else "hidden_states", None)
        # ms-swift's positions of the text, which transformers hands on to Qwen3-VL's tower as well.
        given.pop("text_position_ids", None)
        grid = given.pop("grid_thw", None)
        is_plain = all(isinstance(value, _PLAIN) for value in given.values())
        if len(args) > 2 or not is_plain or not isinstance(pixels, Tensor) or pixels.requires_grad:
            return None
        if grid is None:
            count = len(pixels) if pixels.ndim == 4 else 0
            call = Call(pixels, [1] * count, [None] * count, given)
        else:
            grids = [tuple(row) for row in grid.tolist()]
            call = Call(pixels, [t * h * w for t, h, w in grids], grids, given)
        return call if call.sizes and sum(call.sizes) == len(pixels) else None

    def _probe(self, call: Call) -> bool:
        """Whether an image's output is its own, whatever other image is in the call."""
        image, size, grid = call.images[0], call.sizes[0], call.grids[0]
        other = 1 - image.flip(0, -1)
        pair = Call(torch.cat([image, other]), [size] * 2, [grid] * 2, call.rest)
        try:
            beside, alone = self._run(pair, [0, 1])[0], self._run(call, [0])[0]
        except _NotByImageError:
            is_separable = False
        else:
            is_separable = all(map(_are_close, beside.leaves, alone.leaves))
        if not is_separable:
            logger.warning(
                f"--encoder_cache_gb has no effect on {type(self._tower).__name__}: what it says "
                "of an image cannot be told from what it says of the other images of a call."
            )
        return is_separable

    def _encode(self, call: Call) -> Any:
        keys = [(id(self._tower), key) for key in image_keys(call)]
        outputs = self._cache.encode(keys, partial(self._run, call))
        leaves = [
            torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*(output.leaves for output in outputs), strict=True)
        ]
        return pytree.tree_unflatten(leaves, outputs[0].structure)

    def _run(self, call: Call, numbers: Sequence[int]) -> list[Output]:
        """The tower's outputs for some of the images of a call."""
        images, sizes = call.images, [call.sizes[n] for n in numbers]
        pixels = torch.cat([images[n] for n in numbers])
        rest, merged = dict(call.rest), 1
        if call.grids[0] is not None:
            grids = [call.grids[n] for n in numbers]
            rest["grid_thw"] = torch.tensor(grids, device=pixels.device)
            merged = getattr(self._tower, "spatial_merge_size", 1) ** 2
        leaves, structure = pytree.tree_flatten(self._own(pixels, **rest))
        parts = [_split(leaf, sizes, merged) for leaf in leaves]
        return [Output(list(of_image), structure) for of_image in zip(*parts, strict=True)]


def image_keys(call: Call) -> list[Any]:
    """For each image a key that says its content, and how it is encoded."""
    images, keys = call.images, list[Any]()
    digests: dict[Any, bytes] = {}
    for number, (image, grid) in enumerate(zip(images, call.grids, strict=True)):
        memory = memory_of(image)
        if memory not in digests:
            # The samples of a group stand together; to compare costs less than to copy and digest.
            is_like = number > 0 and torch.equal(image, images[number - 1])
            digests[memory] = keys[-1][-1] if is_like else _digest(image)
        keys.append((call.how, grid, image.shape, digests[memory]))
    return keys


def _digest(image: Tensor) -> bytes:
    values = image.detach().cpu().contiguous().view(torch.uint8).numpy()
    return xxhash.xxh3_128_digest(values)


def _split(leaf: Any, sizes: list[int], merged: int) -> list[Any]:
    """A leaf of an output, for each image; `merged` patches may have become one row."""
    if isinstance(leaf, _PLAIN):
        return [leaf] * len(sizes)
    for each in (1, merged):
        rows = [size // each for size in sizes]
        if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) * each == sum(sizes):
            # A slice would keep the outputs of all images.
            return [part.clone() if len(sizes) > 1 else part for part in leaf.split(rows)]
    raise _NotByImageError


def _are_close(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return a == b
    if a.shape != b.shape:
        return False
    limit = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0.0
    return float((a - b).abs().max()) <= limit * float(b.abs().max())
