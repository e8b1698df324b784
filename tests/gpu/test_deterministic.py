"""`--full_determinism true` makes training steps bitwise reproducible [R9]. The memory of a
step's parts is read from a GPU [V5]."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from xxhash import xxh3_64

from scripts.bench.passes import (
    Batch,
    group_of,
    make_model,
    once,
    plain,
    positions_of,
    why_not_installed,
)
from swift_grpo_ext.logits.packed import reason_against
from swift_grpo_ext.timing import MEMORY_PARTS
from swift_grpo_ext.upstream.determinism import deterministic
from tests.rig.logits.batch import DEVICE
from tests.rig.timed import WORK, Trainer

STEPS = 4
LEARNING_RATE = 1e-3


def group_with_image(model: Any, side: int, completion: int, group_size: int) -> Batch:
    """Return a group with a prompt that is an image of `side` x `side` patches.

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


def train(model: Any, batch: Batch, way: Callable[[Any, Batch], Tensor]) -> list[str]:
    """Return a checksum of each step's values, gradients and weights; restore the model."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    advantages_N = torch.linspace(-1, 1, len(batch.targets_N), device=model.device)
    sums = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logps_N = way(model, batch)
        (-advantages_N * logps_N).mean().backward()
        optimizer.step()
        tensors = [logps_N]
        for weight in model.parameters():
            tensors += [weight, *([] if weight.grad is None else [weight.grad])]
        hashed = xxh3_64()
        for tensor in tensors:
            bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            hashed.update(bits.numpy())
        sums.append(hashed.hexdigest())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])
    optimizer.zero_grad()
    return sums


@pytest.mark.parametrize("way", [plain, once])
@pytest.mark.parametrize(
    "attention", ["sdpa", "flash_attention_2"] if DEVICE == "cuda" else ["sdpa"]
)
def test_steps_twice(attention: str, way: Callable[[Any, Batch], Tensor]) -> None:
    """On a GPU the model has the 3B's width and vision tower. The printed checksum is the same on
    every machine with this GPU and these releases."""
    if reason := why_not_installed(attention):
        pytest.skip(reason)
    shape, of_group = (("3b", 4), (64, 256, 8)) if DEVICE == "cuda" else (("small", 2), (8, 16, 4))
    model = make_model("qwen2_5_vl", *shape, DEVICE, torch.bfloat16, attention)
    batch = group_with_image(model, *of_group)
    if way is once and (reason := reason_against(model, batch.inputs)):
        pytest.skip(f"not packed: {reason}")
    with deterministic(True):
        first, second = (train(model, batch, way) for _ in range(2))
    print(f"{attention}, {way.__name__}: after the last step {first[-1]}")
    assert first == second
    assert len(set(first)) == STEPS, "no weight moved"


GIB = 2**30


def fill(trainer: Any) -> None:
    """Leave 1 GiB on the GPU, as a pass with gradients."""
    trainer.filled = torch.zeros(GIB, dtype=torch.uint8, device=DEVICE)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_each_part_has_its_memory() -> None:
    torch.cuda.empty_cache()  # else an earlier test's memory might serve
    trainer = Trainer(device=f"{DEVICE}:0", training_step=(*WORK["training_step"], fill))
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    trainer.begin()
    trainer.step()
    trainer.clock.log_memory([trainer.clock.memory.take()])
    log = trainer.logged()
    memory = {part: log[f"memory/{part}"] for part in MEMORY_PARTS}
    assert 0 < min(memory.values()) <= max(memory.values()) <= total, memory
    assert memory["loss"] >= memory["logps"] + 0.9, memory
