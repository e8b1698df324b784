"""Tiny models with batches of two groups, and a group with an image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from scripts.bench.passes import Batch, group_of, positions_of
from tests.rig.logits.models import IMAGE, build, inputs_of

GROUPS = ((10, (7, 3, 5)), (8, (1, 4)))
"""Tokens of each group's prompt, and of its completions."""

HALF = 0.5
"""Factor for the models' weights. Without it, bfloat16 changes gradients of the plain pass by 12 to
25% (Qwen2, Qwen2.5-VL, InternVL, on a CPU), which hides faults. With it, the change is 1 to 5%,
while samples that attend to each other change gradients by 38 to 76%. Gated delta nets keep their
weights: they normalize their outputs, and smaller weights make their rounding worse."""

NEEDS = {"Qwen3.5": "Qwen3_5Config", "Gemma3": "Gemma3Config"}
"""Configurations that some releases of transformers lack."""


def make(name: str, device: str, dtype: str, is_exact: bool = False) -> tuple[Any, Batch]:
    """Return a tiny model and its batch; if exact, in float32 with weights rounded to `dtype`."""
    if not hasattr(transformers, NEEDS.get(name, "Qwen2Config")):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    # TF32 would round float32 products to 10 bits, differently for each batch size. By default
    # cudnn's convolutions use it.
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
    """Return a batch on the model's device; prompts of a vision model begin with an image."""
    samples = [(g, prompt, new) for g, (prompt, news) in enumerate(GROUPS) for new in news]
    length = max(prompt + new for _, prompt, new in samples)
    inputs = inputs_of(name, (length,) * len(GROUPS))
    groups = torch.tensor([g for g, _, _ in samples])
    for key, value in inputs.items():  # repeat each group's part for its samples
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
    """Return a group whose prompt is an image of `side` x `side` patches.

    Each random completion is one token shorter than the one before.
    """
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
