"""Media that are joined late, and images that a frozen tower encodes once, on streams and from
pinned memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scripts.bench.measure import medians, side_by_side
from scripts.gpu.compare import compare, equal
from scripts.gpu.found import Comparison, Found
from scripts.gpu.models import (
    GROUPS,
    Batch,
    group_of,
    made,
    positions_of,
    why_missing,
    wide,
)
from scripts.gpu.prompt_once import plain
from swift_grpo_ext.media.encoder_cache import EncoderCache
from swift_grpo_ext.media.lazy_concat import LazyConcat

TOWERS = {
    "Qwen2.5-VL": "model.visual",
    "Qwen3.5": "model.visual",
    "InternVL": "model.vision_tower",
    "Gemma3": "model.vision_tower",
}
"""The name of each model's vision tower, as ms-swift knows it."""


@contextmanager
def side_stream(device: str) -> Iterator[None]:
    """Run the block on a stream of its own, after all before it and before all after it."""
    if device == "cpu":
        yield
        return
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield
    main.wait_stream(side)


def shared(parts: list[Tensor], device: str, dtype: torch.dtype) -> Tensor:
    """Return parts as a collator joins them, moved from pinned memory on a stream of their own."""
    if device != "cpu":
        pinned = {id(part): part.pin_memory() for part in parts}
        parts = [pinned[id(part)] for part in parts]
    lazy = torch.cat([LazyConcat([part]) for part in parts])
    with side_stream(device):
        return lazy.to(device, dtype, non_blocking=True)


def run_late_joining(device: str, megabytes: int) -> Found:
    """Compare what is joined late, after its way to the device, with what is joined at once."""
    torch.manual_seed(0)
    rows = megabytes * 2**20 // 4096
    image, other = torch.randn(rows, 1024), torch.randn(rows // 2, 1024)
    shown = [image, image, other, image]
    return Found(
        [c for d in (torch.float32, torch.bfloat16) for c in compare_joined(shown, device, d)]
    )


def compare_joined(shown: list[Tensor], device: str, dtype: torch.dtype) -> list[Comparison]:
    """Compare tensors, of which some are one, joined late and at once."""
    expected = torch.cat(shown).to(dtype).to(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    lazy = shared(shown, device, dtype)
    assert isinstance(lazy, LazyConcat)
    num_bytes = sum(part.nbytes for part in lazy.distinct)
    if device == "cuda":
        num_bytes = torch.cuda.memory_allocated() - before
    distinct = {id(part): part.numel() for part in shown}
    pieces = lazy.split_parts([len(part) for part in shown])
    name = str(dtype).removeprefix("torch.")
    return [
        # The allocator fills blocks of 2 MiB.
        Comparison(
            f"{name}: bytes on the device, of the distinct parts'",
            num_bytes / (sum(distinct.values()) * dtype.itemsize + len(distinct) * 2**21),
            1.0,
        ),
        equal(f"{name}: pieces", torch.cat(pieces), expected),
        equal(f"{name}: a sum that joins", lazy + 1, expected + 1),
    ]


def with_shared_pixels(batch: Batch, device: str) -> Batch:
    """Return the batch with the pixels of its samples, which a group shares, joined late."""
    pixels = batch.inputs["pixel_values"]
    of_samples = pixels.cpu().chunk(len(batch.predicts_BT))
    groups = [group for group, (_, news) in enumerate(GROUPS) for _ in news]
    parts = [of_samples[groups.index(group)] for group in groups]
    joined = shared(parts, device, pixels.dtype)
    return replace(batch, inputs={**batch.inputs, "pixel_values": joined})


def freeze(model: Any, tower: str) -> None:
    """Freeze a model's vision tower, and name it as ms-swift does."""
    model.get_submodule(tower).requires_grad_(False)
    model.model_meta = SimpleNamespace(model_arch=SimpleNamespace(vision_tower=[tower]))


def run(device: str, model: str, dtype: str) -> Found:
    """Compare log-probabilities and gradients of a model whose tower is frozen."""
    if reason := why_missing(model):
        return Found(not_tried=reason)

    def make(is_exact: bool) -> tuple[Any, Batch]:
        made_model, batch = made(model, device, dtype, is_exact)
        freeze(made_model, TOWERS[model])
        return made_model, batch

    caches: list[EncoderCache] = []

    def cached(model: Any, batch: Batch) -> Tensor:
        caches.append(EncoderCache(1.0, model))
        return again(model, batch)

    def again(model: Any, batch: Batch) -> Tensor:
        with side_stream(device):
            return plain(model, with_shared_pixels(batch, device))

    comparisons = compare(make, plain, {"cached": cached, "a later pass": again})
    [cache] = caches
    count = equal("images that were encoded", cache.num_encoded, len(GROUPS))
    problems = [tower.problem for tower in cache.towers]
    return Found([*comparisons, count, equal("problems", problems, [""])])


def run_width(
    device: str, size: str, layers: int, side: int, completion: int, group_size: int,
    repetitions: int,
) -> Found:  # fmt: skip
    """Measure a pass without gradients over a group that sees one image of `side` x `side` patches.

    With gradients ms-swift runs a frozen tower without a graph, which transformers does not.
    """
    model = wide(size, layers, device, "sdpa", sees=True)
    freeze(model, TOWERS["Qwen2.5-VL"])
    batch = group_with_image(model, side, completion, group_size)
    cache = EncoderCache(1.0, model)
    [tower] = cache.towers
    num_first = 0

    @torch.no_grad()
    def work(is_off: bool, is_first: bool = False) -> None:
        nonlocal num_first
        tower.is_off = is_off
        if is_first:
            num_first += 1
            cache.forget()
        plain(model, batch)

    ways = {
        "plain": partial(work, True),
        "cached": partial(work, False, is_first=True),
        "a later pass": partial(work, False),
    }
    measured = medians(side_by_side(ways, repetitions, device))
    found = Found([equal("images that were encoded", cache.num_encoded, num_first)])
    for name, of_way in measured.items():
        found.rows.append(
            {
                "model": f"Qwen2.5-VL {size}, {layers} layers",
                "image, tokens": side**2 // 4,
                "completion": completion,
                "G": group_size,
                "way": name,
                "ms": of_way["seconds"] * 1e3,
                "of plain": of_way["seconds"] / measured["plain"]["seconds"],
                "peak, GiB": of_way["peak_bytes"] / 2**30,
            }
        )
    return found


def group_with_image(model: Any, side: int, completion: int, group_size: int) -> Batch:
    """Return a group's samples: an image, and random tokens after it."""
    torch.manual_seed(0)
    config = model.config
    image = config.image_token_id
    prompt = [config.vision_start_token_id, *[image] * (side**2 // 4), config.vision_end_token_id]
    batch = group_of(model, torch.tensor(prompt), [completion] * group_size)
    batch.inputs["mm_token_type_ids"] = (batch.inputs["input_ids"] == image).int()
    grids = torch.tensor([[1, side, side]] * group_size, device=model.device)
    batch.inputs["image_grid_thw"] = grids
    batch.inputs["position_ids"] = positions_of(model, batch.inputs)
    vision = config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = [torch.randn(side**2, values)] * group_size
    batch.inputs["pixel_values"] = shared(pixels, str(model.device), model.dtype)
    return batch
