"""Two groups for a tiny model of each kind, and one group that sees an image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers

from scripts.bench.passes import Batch, group_of, positions_of
from tests.logits.models import IMAGE, build, inputs_of

GROUPS = ((10, (7, 3, 5)), (8, (1, 4)))
"""Each group has so many tokens in its prompt, and in its samples' completions."""

HALF = 0.5
"""The models' weights are made smaller by this. As they are, bfloat16 moves gradients of the plain
pass by 12 to 25% (Qwen2, Qwen2.5-VL, InternVL, on a CPU), which hides much; halved, by 1 to 5%,
where samples that see one another move them by 38 to 76%. Gated delta nets, which norm what they
say, would get worse."""

NEEDS = {"Qwen3.5": "Qwen3_5Config", "Gemma3": "Gemma3Config"}
"""Configurations that not all releases of transformers have."""


def made(name: str, device: str, dtype: str, is_exact: bool = False) -> tuple[Any, Batch]:
    """Return a tiny model and its batch; an exact one in float32, with the weights of `dtype`."""
    if not hasattr(transformers, NEEDS.get(name, "Qwen2Config")):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    # Else products in float32 may be rounded to 10 bits, for other sizes of a batch otherwise:
    # cudnn's convolutions are.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    model = build(name)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim > 1 and "linear_attn" not in path:
                weight.mul_(HALF)
    model = model.to(device, getattr(torch, dtype))
    model = model.float() if is_exact else model
    return model, batch_of(name, model)


def batch_of(name: str, model: Any) -> Batch:
    """Return a batch on the model's device, an image at the start of each prompt where the model
    sees."""
    samples = [(g, prompt, new) for g, (prompt, news) in enumerate(GROUPS) for new in news]
    length = max(prompt + new for _, prompt, new in samples)
    inputs = inputs_of(name, (length,) * len(GROUPS))
    groups = torch.tensor([g for g, _, _ in samples])
    for key, value in inputs.items():  # a group's part of each, for each of its samples
        inputs[key] = value.unflatten(0, (len(GROUPS), -1))[groups].flatten(0, 1)
    ids, attended = inputs["input_ids"], torch.zeros_like(inputs["input_ids"])
    predicts = torch.zeros_like(ids, dtype=torch.bool)
    for row, (_, prompt, new) in enumerate(samples):
        ids[row, prompt : prompt + new] = torch.randint(3, 150, (new,))
        ids[row, prompt + new :] = 0
        attended[row, : prompt + new] = 1
        predicts[row, prompt - 1 : prompt + new - 1] = True
    inputs["attention_mask"] = attended
    if name == "Gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).int()
    if "image_grid_thw" in inputs:
        inputs["position_ids"] = positions_of(model, inputs)
    inputs = {  # pixels in the model's precision
        key: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for key, value in inputs.items()
    }
    targets = inputs["input_ids"].roll(-1, 1)[predicts.to(model.device)]
    sizes = [(prompt, len(news)) for prompt, news in GROUPS]
    return Batch(inputs, predicts.to(model.device), targets, sizes)


def group_with_image(model: Any, side: int, completion: int, group_size: int) -> Batch:
    """Return a group's samples: an image of `side` x `side` patches, and random tokens after it.
    Each sample is one token shorter than the one before."""
    torch.manual_seed(0)
    config = model.config
    image = config.image_token_id
    prompt = [config.vision_start_token_id, *[image] * (side**2 // 4), config.vision_end_token_id]
    completions = [completion - k for k in range(group_size)]
    batch = group_of(model, torch.tensor(prompt), completions)
    batch.inputs["mm_token_type_ids"] = (batch.inputs["input_ids"] == image).int()
    grids = torch.tensor([[1, side, side]] * group_size, device=model.device)
    batch.inputs["image_grid_thw"] = grids
    batch.inputs["position_ids"] = positions_of(model, batch.inputs)
    vision = config.vision_config
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(side**2, values).repeat(group_size, 1)
    batch.inputs["pixel_values"] = pixels.to(model.device, model.dtype)
    return batch


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
