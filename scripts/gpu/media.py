"""Media that are joined late, and images that a frozen tower encodes once, on streams and from
pinned memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from scripts.gpu.compare import compare, equal
from scripts.gpu.found import Comparison, Found
from scripts.gpu.models import GROUPS, Batch, made, why_missing
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


def run(device: str, model: str, dtype: str) -> Found:
    """Compare log-probabilities and gradients of a model whose tower is frozen."""
    if reason := why_missing(model):
        return Found(not_tried=reason)

    def make(is_exact: bool) -> tuple[Any, Batch]:
        made_model, batch = made(model, device, dtype, is_exact)
        made_model.get_submodule(TOWERS[model]).requires_grad_(False)
        made_model.model_meta = SimpleNamespace(
            model_arch=SimpleNamespace(vision_tower=[TOWERS[model]])
        )
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
