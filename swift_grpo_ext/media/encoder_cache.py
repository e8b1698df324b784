"""Encode each image once a round, where the vision tower is frozen (`--encoder_cache_gb`).

The passes over a group show the tower its images G times: for the old policy, for the reference
model, and for each update. Where nothing in it is trained, it says the same each time. Here a call
runs it on those images alone that are new since the round began, each once, without a graph, and
repeats its outputs for the others. Images are told apart by content.

Outputs are as without it but for rounding: kernels may add in another order where fewer images
share a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import xxhash
from peft.tuners.tuners_utils import BaseTunerLayer
from swift.utils import get_logger
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swift_grpo_ext.flags import BYTES_PER_GB
from swift_grpo_ext.logits.sharding import shard_ranks
from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.media.lazy_concat import LazyConcat, memory_of

logger = get_logger()

_INTEGERS = (torch.int64, torch.int32)
_PLAIN = (type(None), bool, int, float, str, torch.dtype)


Inputs = tuple[Tensor, dict[str, Any]]
"""A tower's pixels, and its further arguments by name."""


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
        model: of the training.
        others: further models that see the same images (reference, teacher).
    """

    def __init__(self, max_gb: float, model: nn.Module, others: Iterable[Any] = ()) -> None:
        self._max_bytes = int(max_gb * BYTES_PER_GB)
        self._outputs: dict[Any, Output] = {}
        self._num_bytes = 0
        self.num_encoded = 0
        """Images that went through a tower since ranks last agreed."""

        self.towers = [
            FrozenTower(name, tower, self)
            for each in ((model, *others) if max_gb else ())
            for name, tower in frozen_towers(each)
        ]
        if self.towers:
            names = ", ".join(dict.fromkeys(tower.name for tower in self.towers))
            logger.info(
                f"{names}, frozen, encodes each image of a round once (--encoder_cache_gb "
                f"{max_gb:g})."
            )

    @property
    def is_on(self) -> bool:
        return not all(tower.is_off for tower in self.towers)

    def forget(self) -> None:
        """Forget all images. Call it outside of a forward, where sharded weights show as such."""
        self.clear()
        for tower in self.towers:
            tower.look_for_shards()

    def clear(self) -> None:
        self._outputs.clear()
        self._num_bytes = 0

    def agree(self, all_gather: Callable[[Any], list[Any]]) -> int:
        """Switch off on all ranks the towers that were switched off on one, and say why, once.

        Returns:
            How many images went through a tower since the last time, on all ranks.
        """
        own = self.num_encoded, [tower.problem for tower in self.towers]
        counts, problems = zip(*all_gather(own), strict=True)
        self.num_encoded = 0
        for tower, of_ranks in zip(self.towers, zip(*problems, strict=True), strict=True):
            tower.problem = ""
            if problem := next(filter(None, of_ranks), ""):
                tower.is_off = True
                logger.warning(f"--encoder_cache_gb has no effect on {tower.name}: {problem}")
        return sum(counts)

    def encode(
        self, keys: Sequence[Any], run: Callable[[Sequence[int]], list[Output]]
    ) -> list[Output]:
        """For each key an output; `run` makes those of the images with these numbers."""
        new = {key: number for number, key in enumerate(keys) if key not in self._outputs}
        made = dict(zip(new, run([*new.values()]), strict=True)) if new else {}
        self.num_encoded += len(made)
        outputs = [made[key] if key in made else self._outputs[key] for key in keys]
        for key, output in made.items():
            if self._num_bytes + output.num_bytes <= self._max_bytes:
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
    audio towers for one, pass as they are. So do all calls once something has failed here.

    Ranks that share a tower's weights gather them in each of its runs. There it runs three times in
    its first call and once in each later one, whatever a rank's images are and whatever fails
    beside it. An error of the tower itself is raised, since the other ranks wait in it.
    """

    def __init__(self, name: str, tower: nn.Module, cache: EncoderCache) -> None:
        self.name, self.is_off = name, False
        self.problem = ""
        """Why it was switched off on this rank, until ranks agree."""

        self._tower, self._cache = tower, cache
        self._own = own = tower.forward
        self._separable = set[Any]()
        """How images are seen where what the tower says of one is known to be its own."""

        self._is_sharded = self._has_been_called = False
        # Of the class: ms-swift wraps `forward` of some, so that no signature says it.
        signature = inspect.signature(type(tower).forward)
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [p.name for p in signature.parameters.values() if p.kind in positional][1:]

        @wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            def as_it_is() -> Any:
                joined = pytree.tree_map_only(LazyConcat, LazyConcat.join, (args, kwargs))
                return own(*joined[0], **joined[1])

            if self.is_off or not is_constant(tower):
                return as_it_is()
            call = None
            with self._spared():
                call = self._read(*args, **kwargs)
            if self._is_sharded:
                return self._run_equally_often(call, as_it_is)
            with self._spared(), torch.no_grad():
                if call is not None and self._is_apart(call):
                    keys = [(id(tower), key) for key in image_keys(call)]
                    return _join(self._cache.encode(keys, partial(self._run, call)))
            return as_it_is()

        self._shared = forward
        self.install()

    def install(self) -> None:
        self._tower.forward = self._shared

    def remove(self) -> None:
        """Give the tower its own `forward` back."""
        self._tower.forward = self._own

    def look_for_shards(self) -> None:
        self._is_sharded = self._is_sharded or bool(shard_ranks(self._tower).groups)

    @contextmanager
    def _spared(self) -> Iterator[None]:
        """Spare the run an error within the block, which switches this tower off instead."""
        try:
            yield
        except Exception as e:
            self._switch_off(f"{type(e).__name__}: {e}")

    def _switch_off(self, problem: str) -> None:
        self.is_off, self.problem = True, problem
        self._cache.clear()

    @torch.compiler.disable
    def _read(self, *args: Any, **kwargs: Any) -> Call | None:
        """The images of a call; None where it is another kind of call."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        first = "pixel_values" if "pixel_values" in given else "hidden_states"
        pixels = given.pop(self._names[0] if args else first, None)
        # ms-swift's positions of the text, which transformers hands on to Qwen3-VL's tower as well.
        given.pop("text_position_ids", None)
        grid = given.pop("grid_thw", None)
        is_plain = all(isinstance(value, _PLAIN) for value in given.values())
        if len(args) > len(self._names) or not is_plain or not isinstance(pixels, Tensor):
            return None
        if pixels.requires_grad or not pixels.numel():
            return None
        if grid is None:
            count = len(pixels)
            return Call(pixels, [1] * count, [None] * count, given) if pixels.ndim == 4 else None
        if not isinstance(grid, Tensor) or grid.shape[1:] != (3,) or grid.dtype not in _INTEGERS:
            return None
        grids = [tuple(row) for row in grid.tolist()]
        call = Call(pixels, [t * h * w for t, h, w in grids], grids, given)
        return call if sum(call.sizes) == len(pixels) else None

    def _run_equally_often(self, call: Call | None, as_it_is: Callable[[], Any]) -> Any:
        """The output for a call, whose images are shared with no other call."""
        inputs: list[Inputs] = []
        if not self._has_been_called:
            self._has_been_called = True
            with self._spared():
                inputs = self._probes(call) if call else []
            with torch.no_grad():
                outputs = [self._own(pixels, **rest) for pixels, rest in inputs]
                for _ in range(2 - len(outputs)):
                    as_it_is()
            with self._spared():
                if call and outputs:
                    self._judge(call, outputs)
        inputs = []
        with self._spared():
            if call and call.how in self._separable and not self.is_off:
                keys = image_keys(call)
                numbers = {key: number for number, key in enumerate(keys)}
                inputs = [self._inputs(call, [*numbers.values()])]
        if not call or not inputs:
            return as_it_is()
        self._cache.num_encoded += len(numbers)
        [(pixels, rest)] = inputs
        with torch.no_grad():
            # Of the kind that the probe has seen, so that it can be taken apart as well.
            made = self._by_image(call, [*numbers.values()], self._own(pixels, **rest))
            by_key = dict(zip(numbers, made, strict=True))
            return _join([by_key[key] for key in keys])

    def _is_apart(self, call: Call) -> bool:
        """Whether an image's output is its own; the tower is run to find out, once."""
        if call.how not in self._separable:
            self._judge(call, [self._own(pixels, **rest) for pixels, rest in self._probes(call)])
        return not self.is_off

    def _probes(self, call: Call) -> list[Inputs]:
        """Inputs of an image beside another one, and of that image alone."""
        image, size, grid = call.images[0], call.sizes[0], call.grids[0]
        other = 1 - image.flip(0, -1)
        pair = Call(torch.cat([image, other]), [size] * 2, [grid] * 2, call.rest)
        return [self._inputs(pair, [0, 1]), self._inputs(call, [0])]

    def _judge(self, call: Call, outputs: Sequence[Any]) -> None:
        """Note whether the outputs for `_probes` say the same of their first image."""
        size, grid = call.sizes[0], call.grids[0]
        pair = Call(call.pixels, [size] * 2, [grid] * 2, call.rest)
        try:
            beside = self._by_image(pair, [0, 1], outputs[0])[0]
            alone = self._by_image(call, [0], outputs[1])[0]
        except _NotByImageError:
            is_apart = False
        else:
            is_apart = all(map(_are_close, beside.leaves, alone.leaves))
        if is_apart:
            self._separable.add(call.how)
        else:
            self._switch_off(
                f"what {type(self._tower).__name__} says of an image cannot be told from what it "
                "says of the other images of a call."
            )

    def _inputs(self, call: Call, numbers: Sequence[int]) -> Inputs:
        """What the tower is given for some of the images of a call."""
        images, rest = call.images, dict(call.rest)
        pixels = torch.cat([images[n] for n in numbers])
        if call.grids[0] is not None:
            grids = [call.grids[n] for n in numbers]
            rest["grid_thw"] = torch.tensor(grids, device=pixels.device)
        return pixels, rest

    def _by_image(self, call: Call, numbers: Sequence[int], output: Any) -> list[Output]:
        """Take what the tower returned for these images apart."""
        is_patches = call.grids[0] is not None
        merged = getattr(self._tower, "spatial_merge_size", 1) ** 2 if is_patches else 1
        leaves, structure = pytree.tree_flatten(output)
        parts = [_split(leaf, [call.sizes[n] for n in numbers], merged) for leaf in leaves]
        return [Output(list(of_image), structure) for of_image in zip(*parts, strict=True)]

    def _run(self, call: Call, numbers: Sequence[int]) -> list[Output]:
        pixels, rest = self._inputs(call, numbers)
        return self._by_image(call, numbers, self._own(pixels, **rest))


def _join(outputs: Sequence[Output]) -> Any:
    """One output for all images, as the tower returns it."""
    leaves = [
        torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
        for parts in zip(*(output.leaves for output in outputs), strict=True)
    ]
    return pytree.tree_unflatten(leaves, outputs[0].structure)


@torch.compiler.disable
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
