"""The batches that benchmarks generate, and our way of asking an engine for them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from PIL import Image
from swift.infer_engine.protocol import RequestConfig, RolloutOutput

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.rollout.generate import CallEngine, generate
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.rounds import sample_ids_at
from swift_grpo_ext.sampling.seeding import RoundId

RUN_SEED = 42
TEMPERATURE = 2.0  # so hot that hardly a completion of the tiny model ends before `--max-tokens`
OCTAVES = ((4, 70.0), (16, 40.0), (64, 20.0), (256, 8.0))
"""A picture has these (cells a side, contrast), from coarse to fine."""


def name_of(image_side: int) -> str:
    """Return what tables call prompts with an image of so many pixels; 0: text alone."""
    return f"{image_side} px" if image_side else "text"


def make_samples(
    image_side: int, num_prompts: int, group_size: int, round_number: int
) -> list[RolloutSample]:
    """Make a generation batch: neighbouring copies of each prompt, as the sampler has them. Each
    sample owns its image's bytes, as a data loader's rows do."""
    round_ = RoundId("train", round_number, 0)
    samples = []
    for sample_id in sample_ids_at(round_, range(num_prompts * group_size), group_size):
        sample = RolloutSample.from_row(make_row(image_side, sample_id.group))
        sample.sample_id = sample_id
        samples.append(sample)
    return samples


def make_row(image_side: int, number: int) -> dict[str, Any]:
    """Make prompt `number` as a row of ms-swift's; it shares nothing with another row."""
    if image_side == 0:
        numbers = np.random.default_rng(number).integers(10, 100, 40)
        text = f"Add these numbers, and explain each step: {' '.join(map(str, numbers))}"
        return {"messages": [{"role": "user", "content": text}]}
    text = f"<image>Describe picture {number} in detail: what is in it, where, and in which light?"
    data = bytes(bytearray(make_photo(image_side, number)))
    image = {"bytes": data, "path": None}
    return {"messages": [{"role": "user", "content": text}], "images": [image]}


@cache
def make_photo(side: int, number: int, kind: str = "PNG") -> bytes:
    """Make an image that weighs what a photograph does: soft shapes, textures, a sensor's noise."""
    rng = np.random.default_rng((side, number))
    pixels = np.full((side, side, 3), 128.0)
    for cells, contrast in OCTAVES:
        noise = rng.normal(0.0, contrast / 2, (min(cells, side), min(cells, side), 3))
        for channel in range(3):
            plane = Image.fromarray(noise[..., channel].astype(np.float32))
            pixels[..., channel] += np.asarray(plane.resize((side, side), Image.Resampling.BICUBIC))
    pixels += rng.normal(0.0, 2.0, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, format=kind, quality=92)
    return buffer.getvalue()


def make_config(max_tokens: int) -> RequestConfig:
    """Make what ms-swift's trainer asks its engines with (`_prepare_rollout_params`)."""
    return RequestConfig(
        n=1,
        max_tokens=max_tokens,
        temperature=TEMPERATURE,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        repetition_penalty=1.0,
        stop=[],
        return_details=True,
        logprobs=True,
    )


def draw_ours(samples: Sequence[Any], run_seed: int | None, ask: CallEngine) -> list[RolloutOutput]:
    """Generate as our trainer's `_rollout` does, in a training of one process."""
    return generate(
        [sample.sample_id for sample in samples],
        [prompt_hash(sample) for sample in samples],
        make_request=lambda position: samples[position].to_infer_request(),
        make_metadata=lambda sample_id, count: RequestMetadata(
            sample_id=sample_id, count=count, run_seed=run_seed, as_arrays=True
        ),
        engine_ranks=RankGroup(),
        call_engine=ask,
    )[0]
