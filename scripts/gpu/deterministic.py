"""Steps of a training made twice with the switch of `--full_determinism true`, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from scripts.bench.measure import medians, side_by_side
from scripts.gpu.compare import Pass, equal
from scripts.gpu.found import Found
from scripts.gpu.media import group_with_image
from scripts.gpu.models import Batch, wide
from scripts.gpu.prompt_once import once, plain, why_not_installed
from swift_grpo_ext.logits.shared_prompt import reason_against
from swift_grpo_ext.upstream.determinism import deterministic
from swift_grpo_ext.weights.checksums import weight_checksums

STEPS = 4
LEARNING_RATE = 1e-3


def run(
    device: str, size: str, layers: int, attention: str, side: int, completion: int,
    group_size: int, repetitions: int,
) -> Found:  # fmt: skip
    """Train a model with its vision tower on a group of unequal samples that see one image of
    `side` x `side` patches; compare log-probabilities, gradients and weights of each step, bit by
    bit, and measure forward and backward."""
    if reason := why_not_installed(attention):
        return Found(not_tried=reason)
    model = wide(size, layers, device, attention, sees=True)
    batch = unequal(group_with_image(model, side, completion, group_size))
    ways: dict[str, Pass] = {"plain": plain}
    reason = reason_against(model, batch.inputs)
    if not reason:
        ways["prompt once"] = once
    found, sums, repeats = Found(), {}, {}
    for name, way in ways.items():
        with deterministic(True):
            first, second = (train(model, batch, way) for _ in range(2))
        for step, (one, other) in enumerate(zip(first, second, strict=True)):
            found.comparisons.append(equal(f"{name}: step {step + 1}, twice", other, one))
        sums[name] = first[-1]
        repeats[name] = train(model, batch, way) == train(model, batch, way)

    def work(way: Pass, on: bool) -> Callable[[], None]:
        def passes() -> None:
            with deterministic(on):
                way(model, batch).sum().backward()

        return passes

    turns = {(name, on): work(way, on) for name, way in ways.items() for on in (False, True)}
    named = {f"{name}{', deterministic' if on else ''}": turn for (name, on), turn in turns.items()}
    measured = medians(side_by_side(named, repetitions, device))
    for name in ways:
        usual, slower = measured[name], measured[f"{name}, deterministic"]
        found.rows.append(
            {
                "model": f"Qwen2.5-VL {size}, {layers} layers", "attention": attention, "way": name,
                "ms": usual["seconds"] * 1e3,
                "deterministic, ms": slower["seconds"] * 1e3,
                "cost, %": 100 * (slower["seconds"] / usual["seconds"] - 1),
                "peak, GiB": usual["peak_bytes"] / 2**30,
                "deterministic peak, GiB": slower["peak_bytes"] / 2**30,
                "same bits without it": "yes" if repeats[name] else "no",
                "after the last step": sums[name],
            }
        )  # fmt: skip
    if reason:
        found.rows.append({"way": f"prompt once: left alone, {reason}"})
    return found


def unequal(batch: Batch) -> Batch:
    """Return the group with completions that end one token earlier from sample to sample, and its
    pixels joined."""
    seen, predicts = batch.inputs["attention_mask"].clone(), batch.predicts_BT.clone()
    for row in range(1, len(seen)):
        seen[row, -row:] = 0
        predicts[row, -row - 1 :] = False
    targets = batch.inputs["input_ids"].roll(-1, 1)[predicts]
    pixels = batch.inputs["pixel_values"].clone()
    inputs = {**batch.inputs, "attention_mask": seen, "pixel_values": pixels}
    return replace(batch, inputs=inputs, predicts_BT=predicts, targets_N=targets)


def train(model: Any, batch: Batch, way: Pass) -> list[str]:
    """Return a checksum of each step's values, gradients and weights; the model is as before."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    advantages_N = torch.linspace(-1, 1, len(batch.targets_N), device=model.device)
    sums = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logps_N = way(model, batch)
        (-advantages_N * logps_N).mean().backward()
        optimizer.step()
        tensors = [("values", logps_N.detach())]
        for name, weight in model.named_parameters():
            tensors.append((name, weight.detach()))
            if weight.grad is not None:
                tensors.append((f"{name}.grad", weight.grad))
        words = (text.rpartition(" ")[2] for text in weight_checksums(tensors).values())
        sums.append(f"{sum(int(word, 16) for word in words) % 2**64:016x}")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])
    optimizer.zero_grad()
    return sums
