"""Encode each image once a round, where the vision tower is frozen (`--encoder_cache_gb`).

The passes over a group show the tower its images G times: for the old policy, for the reference
model, and for each update. Where nothing in it is trained, it says the same each time. Here a call
runs it on those images alone that are new since the round began, each once, without a graph, and
repeats its outputs for the others. Equal content is one image.

Outputs are as without it but for rounding: kernels may add in another order where fewer images
share a call. Ranks that share a tower's weights (ZeRO-3, FSDP) gather them in each of its runs, so
that all have to run it equally often: such towers are left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from swift.utils import get_logger
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from xxhash import xxh3_128

from swift_grpo_ext.flags import BYTES_PER_GB
from swift_grpo_ext.logits.sharding import shard_ranks
from swift_grpo_ext.logits.shim import base_model
from swift_grpo_ext.media.lazy_concat import LazyConcat, memory_of
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.upstream.patches import patch

logger = get_logger()

_INTEGERS = (torch.int64, torch.int32)
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
Grid = tuple[int, int, int]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _NotByImageError(Exception):
    """The tower's output cannot be split by image."""


class Output(NamedTuple):
    """What a tower returns for one image: the leaves of torch's pytree, and its structure."""

    leaves: list[Any]
    structure: pytree.TreeSpec


@dataclass
class Call:
    """The images that a tower is called with."""

    pixels: Tensor
    """Those of all images, one after the other in dimension 0."""

    sizes: list[int]
    """How many rows of `pixels` each image has."""

    grids: list[Grid | None]
    """Patches in time, height and width of each image; None where images have one size."""

    rest: dict[str, Any]
    """Further arguments by name, plain values."""

    def images(self) -> Sequence[Tensor]:
        """Return the pixels of each image."""
        if isinstance(self.pixels, LazyConcat):
            return self.pixels.split_parts(self.sizes)
        return self.pixels.split(self.sizes)

    def how(self) -> tuple[Hashable, ...]:
        """Return what an image's output depends on, beside the image and the tower."""
        is_autocast = torch.is_autocast_enabled(self.pixels.device.type)
        return self.pixels.dtype, is_autocast, *self.rest.items()


class EncoderCache:
    """The outputs of frozen vision towers for this round's images.

    Args:
        max_gb: bound of what is held on the towers' device, for all models together. What does not
            fit is encoded once a call. 0 leaves models as they are.
        model: of the training.
        others: further models that see the same images (reference, teacher).
    """

    def __init__(self, max_gb: float, model: nn.Module, others: Iterable[nn.Module] = ()) -> None:
        self.max_bytes = int(max_gb * BYTES_PER_GB)
        self.outputs: dict[Hashable, Output] = {}
        self.num_bytes = 0
        self.num_encoded = 0
        """How many images went through a tower since ranks last agreed."""

        self.towers: list[FrozenTower] = []
        for each in (model, *others) if max_gb else ():
            base: Any = base_model(each)
            architecture = getattr(getattr(base, "model_meta", None), "model_arch", None)
            for name in getattr(architecture, "vision_tower", None) or ():
                try:
                    tower = base.get_submodule(name)
                except AttributeError:  # the list is a family's: a model may lack one of its towers
                    continue
                if is_constant(tower):
                    self.towers.append(FrozenTower(name, tower, self))

    @property
    def is_on(self) -> bool:
        """Whether there is a tower that encodes each image once."""
        return not all(tower.is_off for tower in self.towers)

    def forget(self) -> None:
        """Forget all images. Call it outside of a forward, where sharded weights show as such."""
        self.outputs.clear()
        self.num_bytes = 0
        for tower in self.towers:
            # All ranks see the shards, and switch it off together without a word.
            if not tower.is_off and shard_ranks(tower.module).groups:
                tower.is_off = True
                logger.info(
                    f"--encoder_cache_gb has no effect on {tower.name}: ranks share its weights "
                    "(ZeRO-3, FSDP), and have to run it equally often."
                )

    def agree(self, ranks: RankGroup) -> int:
        """Switch off on all ranks the towers that were switched off on one, and say why, once.

        Returns:
            How many images went through a tower since the last time, on all ranks.
        """
        problems = [tower.problem for tower in self.towers]
        counts, by_rank = zip(*ranks.all_gather((self.num_encoded, problems)), strict=True)
        self.num_encoded = 0
        for tower, found in zip(self.towers, zip(*by_rank, strict=True), strict=True):
            tower.problem = ""
            if problem := next(filter(None, found), ""):
                tower.is_off = True
                logger.warning(f"--encoder_cache_gb has no effect on {tower.name}: {problem}")
        return sum(counts)


def is_constant(tower: nn.Module) -> bool:
    """Return whether equal images have equal outputs, whatever is trained or seen otherwise.

    The reference pass switches adapters off; batch normalization counts what it sees.
    """
    if any(parameter.requires_grad for parameter in tower.parameters()):
        return False
    changing = (BaseTunerLayer, nn.modules.batchnorm._BatchNorm)
    return not any(isinstance(module, changing) for module in tower.modules())


class FrozenTower:
    """Stands in for a tower's `forward`.

    Towers take either patches [sum of t x h x w, values] with `grid_thw` [images, 3] (Qwen-VL,
    GLM-V) or images [images, channels, height, width] (SigLIP, CLIP, InternViT). Other calls, of
    audio towers for one, pass as they are. So do all calls once something has failed here: this
    saves time, and ends no run.
    """

    def __init__(self, name: str, tower: nn.Module, cache: EncoderCache) -> None:
        self.name, self.is_off = name, False
        self.problem = ""
        """Why it was switched off on this rank, until ranks agree."""

        self.module, self._cache = tower, cache
        self._upstream = upstream = tower.forward
        self._separable = set[Hashable]()
        """Ways of seeing an image in which the tower's output for one is known to be its own."""

        # Of the class: ms-swift wraps `forward` of some, so that no signature says it.
        signature = inspect.signature(type(tower).forward)
        self._names = [p.name for p in signature.parameters.values() if p.kind in _POSITIONAL][1:]

        @wraps(upstream)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.is_off and is_constant(tower):  # a callback may have unfrozen it
                try:
                    with torch.no_grad():
                        call = self._read(*args, **kwargs)
                        if call is not None and self._is_apart(call):
                            return self._encode(call)
                except Exception as e:  # the plain call says whether it was the tower's own error
                    self.switch_off(f"{type(e).__name__}: {e}")
            args, kwargs = pytree.tree_map_only(LazyConcat, LazyConcat.join, (args, kwargs))
            return upstream(*args, **kwargs)

        patch(tower, forward=forward)

    def switch_off(self, problem: str) -> None:
        """Leave all further calls as they are."""
        self.is_off, self.problem = True, problem

    @torch.compiler.disable
    def _read(self, *args: Any, **kwargs: Any) -> Call | None:
        """Return the images of a call; None where it is another kind of call."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        # transformers gives the images by position, or under one of these names.
        first = "pixel_values" if "pixel_values" in given else "hidden_states"
        first = self._names[0] if args else first
        pixels = given.pop(first, None)
        # ms-swift's positions of the text, which transformers hands on to Qwen3-VL's tower as well.
        given.pop("text_position_ids", None)
        grid = given.pop("grid_thw", None)
        others = [name for name, value in given.items() if not isinstance(value, _PLAIN)]
        if len(args) > len(self._names) or not isinstance(pixels, Tensor):
            return None
        if others:
            # As Pixtral's sizes of images, which lie in one row, or places of Gemma 4's patches.
            if pixels.ndim == 4 or first == "pixel_values":
                tower = type(self.module).__name__
                self.switch_off(f"{tower} takes {', '.join(others)} beside images.")
            return None
        if pixels.requires_grad or not pixels.numel():
            return None
        if grid is None:
            count = len(pixels)
            return Call(pixels, [1] * count, [None] * count, given) if pixels.ndim == 4 else None
        if not isinstance(grid, Tensor) or grid.shape[1:] != (3,) or grid.dtype not in _INTEGERS:
            return None
        grids = [(t, h, w) for t, h, w in grid.tolist()]
        call = Call(pixels, [t * h * w for t, h, w in grids], [*grids], given)
        return call if sum(call.sizes) == len(pixels) else None

    def _is_apart(self, call: Call) -> bool:
        """Return whether an image's output is its own; run the tower to find out, once.

        It sees the first image beside another one, and alone.
        """
        how = call.how()
        if how not in self._separable:
            image, grid = call.images()[0], call.grids[0]
            other = 1 - image.flip(0, -1)  # another image of the same grid, in any range of values
            try:
                beside = self._run([image, other], [grid, grid], call.rest)[0]
                alone = self._run([image], [grid], call.rest)[0]
                is_apart = all(map(_are_close, beside.leaves, alone.leaves))
            except _NotByImageError:
                is_apart = False
            if is_apart:
                self._separable.add(how)
            else:
                self.switch_off(
                    f"the output of {type(self.module).__name__} for an image depends on the other "
                    "images of a call, or cannot be split by image."
                )
        return not self.is_off

    def _encode(self, call: Call) -> Any:
        """Return the tower's output for all images of a call; the tower runs on the new ones."""
        images, cache = call.images(), self._cache
        # By tower: the reference model has its own weights.
        keys: list[Hashable] = [(id(self.module), key) for key in image_keys(call)]
        made: dict[Hashable, Output] = {}
        # Of equal images the last number stands: each is shown once.
        if new := {key: number for number, key in enumerate(keys) if key not in cache.outputs}:
            numbers = [*new.values()]
            shown, grids = [images[n] for n in numbers], [call.grids[n] for n in numbers]
            made = dict(zip(new, self._run(shown, grids, call.rest), strict=True))
        outputs = [made[key] if key in made else cache.outputs[key] for key in keys]
        cache.num_encoded += len(made)
        for key, output in made.items():
            num_bytes = sum(leaf.nbytes for leaf in output.leaves if isinstance(leaf, Tensor))
            # Not the newest instead: each pass asks for all images of a round in the same order,
            # and would find none of those that it asks for first.
            if cache.num_bytes + num_bytes <= cache.max_bytes:
                cache.outputs[key] = output
                cache.num_bytes += num_bytes
        leaves = [
            torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
            for parts in zip(*(output.leaves for output in outputs), strict=True)
        ]
        return pytree.tree_unflatten(leaves, outputs[0].structure)

    def _run(
        self, images: Sequence[Tensor], grids: Sequence[Grid | None], rest: dict[str, Any]
    ) -> list[Output]:
        """Run the tower on some images, and take apart what it returns."""
        pixels, merged = torch.cat([*images]), 1
        if grids[0] is not None:
            rest = {**rest, "grid_thw": torch.tensor(grids, device=pixels.device)}
            # So many patches may have become one row.
            merged = getattr(self.module, "spatial_merge_size", 1) ** 2
        leaves, structure = pytree.tree_flatten(self._upstream(pixels, **rest))
        parts: list[list[Any]] = []
        for leaf in leaves:
            if isinstance(leaf, _PLAIN):
                parts.append([leaf] * len(images))
                continue
            rows = len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else 0
            patches_of_row = next((n for n in (1, merged) if rows * n == len(pixels)), None)
            if patches_of_row is None:
                raise _NotByImageError
            image_parts = leaf.split([len(image) // patches_of_row for image in images])
            # A slice would keep the outputs of all images.
            parts.append([part.clone() for part in image_parts] if len(images) > 1 else [leaf])
        return [Output(list(leaves), structure) for leaves in zip(*parts, strict=True)]


@torch.compiler.disable
def image_keys(call: Call) -> list[Hashable]:
    """Return for each image a key that says its content, and how it is encoded."""
    how = call.how()
    keys = list[Hashable]()
    digests: dict[Hashable, bytes] = {}
    for image, grid in zip(call.images(), call.grids, strict=True):
        # The samples of a group share memory, where they were joined late.
        memory = memory_of(image)
        if memory not in digests:
            values = image.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            digests[memory] = xxh3_128(values).digest()
        keys.append((how, grid, image.shape, digests[memory]))
    return keys


def _are_close(a: Any, b: Any) -> bool:
    """Return whether two leaves of outputs are equal but for rounding."""
    if not isinstance(a, Tensor):
        return bool(a == b)
    if a.shape != b.shape:
        return False
    # Half of the digits: other shapes may take other kernels, but an output that depends on other
    # images differs in its first digits.
    limit = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0.0
    return float((a - b).abs().max()) <= limit * float(b.abs().max())
