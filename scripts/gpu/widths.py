"""Times and peaks of the passes over a group, at the widths of real models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from scripts.bench.measure import medians, side_by_side
from scripts.gpu.compare import Pass
from scripts.gpu.found import Comparison, Found
from scripts.gpu.models import group_of, wide
from scripts.gpu.prompt_once import once, packed, plain, why_not_installed
from swift_grpo_ext.logits.shared_prompt import reason_against

NATS = 0.1
"""Bound of the mean difference of log-probabilities. On a CPU, with widths of 64 and 512 and
prompts of 128 and 1,500 tokens, bfloat16 lies 0.03 to 0.04 from float32; a prompt that is read once
0.006 at most from the plain pass, and one in which samples see one another 0.33 to 1.07."""

CHUNK_SIZE = 512


def run(
    device: str, size: str, layers: int, attention: str, prompt: int, completion: int,
    group_size: int, repetitions: int,
) -> Found:  # fmt: skip
    """Measure forward and backward over a group of samples of one length.

    Without padding, the plain pass takes its fastest kernel.
    """
    if reason := why_not_installed(attention):
        return Found(not_tried=reason)
    model = wide(size, layers, device, attention)
    torch.manual_seed(0)
    prompt_T = torch.randint(model.config.vocab_size, (prompt,), device=model.device)
    batch = group_of(model, prompt_T, [completion] * group_size)
    ways: dict[str, Pass] = {"plain": plain, "chunked": partial(plain, chunk_size=CHUNK_SIZE)}
    positions = dict.fromkeys(ways, batch.predicts_BT.numel())
    reason = reason_against(model, batch.inputs)
    if not reason:
        ways["prompt once"] = once
        positions["prompt once"] = packed(model, batch).predicts_1L.numel()

    found = Found()
    with torch.no_grad():
        expected_N = plain(model, batch)
        for name, way in list(ways.items())[1:]:
            nats = float((way(model, batch) - expected_N).abs().mean())
            found.comparisons.append(Comparison(f"{name}: mean difference, nats", nats, NATS))

    def work(way: Pass) -> Callable[[], None]:
        return lambda: way(model, batch).sum().backward()

    works = {name: work(way) for name, way in ways.items()}
    measured = medians(side_by_side(works, repetitions, device))
    of_case: dict[str, Any] = {
        "model": f"Qwen2.5 {size}, {layers} layers", "attention": attention, "prompt": prompt,
        "completion": completion, "G": group_size,
    }  # fmt: skip
    first = measured["plain"]
    for name, of_way in measured.items():
        found.rows.append(
            {
                **of_case,
                "way": name,
                "ms": of_way["seconds"] * 1e3,
                "of plain": of_way["seconds"] / first["seconds"],
                "peak, GiB": of_way["peak_bytes"] / 2**30,
                "of plain's peak": of_way["peak_bytes"] / first["peak_bytes"],
                "of plain's positions": positions[name] / positions["plain"],
            }
        )
    if reason:
        found.rows.append({**of_case, "way": f"prompt once: left alone, {reason}"})
    return found
