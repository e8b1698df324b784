"""Media that are joined late, and images that a frozen tower encodes once, on streams and from
pinned memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.bench.passes import Batch, plain
from swift_grpo_ext.media.encoder_cache import EncoderCache
from swift_grpo_ext.media.lazy_concat import LazyConcat
from tests.gpu.compare import assert_within, compare
from tests.gpu.models import GROUPS, joined_late, made, side_stream

TOWERS = {
    "Qwen2.5-VL": "model.visual",
    "Qwen3.5": "model.visual",
    "InternVL": "model.vision_tower",
    "Gemma3": "model.vision_tower",
}
"""The name of each model's vision tower, as ms-swift knows it."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_joined_late(dtype: torch.dtype, device: str) -> None:
    """On the device, as what is joined at once; each part goes there once."""
    torch.manual_seed(0)
    rows = (256 if device == "cuda" else 4) * 256
    image, other = torch.randn(rows, 1024), torch.randn(rows // 2, 1024)
    shown = [image, image, other, image]
    expected = torch.cat(shown).to(dtype).to(device)
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    lazy = joined_late(shown, device, dtype)
    assert isinstance(lazy, LazyConcat)
    num_bytes = sum(part.nbytes for part in lazy.distinct)
    if device == "cuda":
        num_bytes = torch.cuda.memory_allocated() - before
    distinct = (image.numel() + other.numel()) * dtype.itemsize
    assert num_bytes <= distinct + 2 * 2**21  # the allocator fills blocks of 2 MiB
    assert torch.equal(torch.cat(lazy.split_parts([len(part) for part in shown])), expected)
    assert torch.equal(lazy + 1, expected + 1)


def with_shared_pixels(batch: Batch, device: str) -> Batch:
    """The batch with the pixels of its samples, which a group shares, joined late."""
    pixels = batch.inputs["pixel_values"]
    of_samples = pixels.cpu().chunk(len(batch.predicts_BT))
    groups = [group for group, (_, news) in enumerate(GROUPS) for _ in news]
    parts = [of_samples[groups.index(group)] for group in groups]
    joined = joined_late(parts, device, pixels.dtype)
    return replace(batch, inputs={**batch.inputs, "pixel_values": joined})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", TOWERS)
def test_images_that_are_encoded_once(model: str, dtype: str, device: str) -> None:
    def make(is_exact: bool) -> tuple[Any, Batch]:
        made_model, batch = made(model, device, dtype, is_exact)
        tower = TOWERS[model]
        made_model.get_submodule(tower).requires_grad_(False)
        arch = SimpleNamespace(vision_tower=[tower])
        made_model.model_meta = SimpleNamespace(model_arch=arch)
        return made_model, batch

    caches: list[EncoderCache] = []

    def cached(model: Any, batch: Batch) -> Tensor:
        caches.append(EncoderCache(1.0, model))
        return again(model, batch)

    def again(model: Any, batch: Batch) -> Tensor:
        with side_stream(device):
            return plain(model, with_shared_pixels(batch, device))

    assert_within(compare(make, plain, {"cached": cached, "a later pass": again}))
    [cache] = caches
    assert cache.num_encoded == len(GROUPS)
    assert [tower.problem for tower in cache.towers] == [""]
