"""Make the batches that benchmarks generate, and generate them as our trainer does."""

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
TEMPERATURE = 2.0  # high enough that most completions of a tiny model reach their maximum length
OCTAVES = ((4, 70.0), (16, 40.0), (64, 20.0), (256, 8.0))
"""Cells on a side, and contrast, of the noise that makes a picture; coarse to fine."""


def case_name(image_side: int) -> str:
    return f"{image_side} px" if image_side else "text"


def make_samples(
    image_side: int, num_prompts: int, group_size: int, round_number: int
) -> list[RolloutSample]:
    """Make a generation batch in the sampler's order, with neighbouring copies of each prompt.

    Samples share no image bytes, like the rows of a data loader.
    """
    round_ = RoundId("train", round_number, 0)
    samples = []
    for sample_id in sample_ids_at(round_, range(num_prompts * group_size), group_size):
        sample = RolloutSample.from_row(make_row(image_side, sample_id.group))
        sample.sample_id = sample_id
        samples.append(sample)
    return samples


def make_row(image_side: int, number: int) -> dict[str, Any]:
    """Make a row for ms-swift; an `image_side` of 0 makes a text prompt."""
    if image_side == 0:
        numbers = np.random.default_rng(number).integers(10, 100, 40)
        text = f"Add these numbers, and explain each step: {' '.join(map(str, numbers))}"
        return {"messages": [{"role": "user", "content": text}]}
    text = f"<image>Describe picture {number} in detail: what is in it, where, and in which light?"
    image = {"bytes": bytes(bytearray(make_photo(image_side, number))), "path": None}  # a copy
    return {"messages": [{"role": "user", "content": text}], "images": [image]}


@cache
def make_photo(side: int, number: int, file_format: str = "PNG") -> bytes:
    """Make an image that compresses like a photograph: soft shapes, textures and sensor noise."""
    rng = np.random.default_rng((side, number))
    pixels = np.full((side, side, 3), 128.0)
    for cells, contrast in OCTAVES:
        noise = rng.normal(0.0, contrast / 2, (min(cells, side), min(cells, side), 3))
        for channel in range(3):
            plane = Image.fromarray(noise[..., channel].astype(np.float32))
            pixels[..., channel] += np.asarray(plane.resize((side, side), Image.Resampling.BICUBIC))
    pixels += rng.normal(0.0, 2.0, pixels.shape)
    buffer = io.BytesIO()
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    image.save(buffer, format=file_format, quality=92)
    return buffer.getvalue()


def make_config(max_tokens: int) -> RequestConfig:
    """Make the request settings of ms-swift's trainer (`_prepare_rollout_params`)."""
    sampling = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    return RequestConfig(
        n=1, max_tokens=max_tokens, temperature=TEMPERATURE, **sampling, stop=[],
        return_details=True, logprobs=True,
    )  # fmt: skip


def generate_ours(samples: Sequence[Any], call_engine: CallEngine) -> list[RolloutOutput]:
    """Generate as our trainer's `_rollout` does in a training with one process."""
    return generate(
        [sample.sample_id for sample in samples],
        [prompt_hash(sample) for sample in samples],
        make_request=lambda position: samples[position].to_infer_request(),
        make_metadata=lambda sample_id, count: RequestMetadata(
            sample_id=sample_id, count=count, run_seed=RUN_SEED, as_arrays=True
        ),
        engine_ranks=RankGroup(),
        call_engine=call_engine,
    )[0]
