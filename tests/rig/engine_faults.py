"""A plugin for tests: engines with faults, and trainings that report each round's gap.

The folder `ENGINE_FAULTS` holds the file `fault`: the name of an engine's fault. A training takes
the faults of its rounds from `FAULTS_OF_ROUNDS`, a JSON list. It compares each round with its
rounding, not the first two alone. With `--rollout_mismatch warn` it appends the kinds of rows that
it names to the file `rounds`. The faults are in vLLM's classes for Qwen2.5-VL: weights, tower,
positions, caches, and requests.
"""

import json
import os
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration as Model
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from swift_grpo_ext.training import gap
from swift_grpo_ext.upstream.patches import replaced

FOLDER = Path(os.environ["ENGINE_FAULTS"])


def current() -> str:
    """Return the engine's fault, "" for none."""
    path = FOLDER / "fault"
    return path.read_text() if path.exists() else ""


def set_fault(name: str) -> None:
    (FOLDER / "fault").write_text(name)


def patched(owner: Any, name: str) -> Callable[[Any], Any]:
    """Return a decorator: the function takes the method's place, and gets it as first argument."""

    def patch(function: Any) -> Any:
        method = getattr(owner, name)
        setattr(owner, name, wraps(method)(lambda *args, **kw: function(method, *args, **kw)))
        return function

    return patch


# --- weights ---

_weights: dict[str, torch.Tensor] = {}
"""Those of the last update."""


@patched(Model, "load_weights")
def load_weights(
    method: Any, self: Any, weights: Iterable[tuple[str, torch.Tensor]], **kwargs: Any
) -> Any:
    sent = {name: tensor.clone() for name, tensor in weights}
    if current() == "stale weights":
        sent = {name: _weights[name] for name in sent}
    _weights.update(sent)
    return method(self, sent.items(), **kwargs)


# --- the tower ---


@patched(Model, "embed_multimodal")
def embed(method: Any, self: Any, **kwargs: Any) -> Any:
    if current() != "another checkpoint's tower":
        features = method(self, **kwargs)
        kept = {"blind tower": 0.0, "weaker tower": 0.75}.get(current(), 1.0)
        return tuple(kept * f for f in features)
    own = {p: p.data.clone() for p in self.visual.parameters()}
    noise = torch.Generator().manual_seed(3)
    for parameter in own:
        random = torch.randn(parameter.shape, generator=noise).to(parameter)
        parameter.data += random * (parameter.data.float().std() if parameter.numel() > 1 else 0.0)
    try:
        return method(self, **kwargs)
    finally:
        for parameter, data in own.items():
            parameter.data.copy_(data)


# --- positions ---


@patched(MRotaryEmbedding, "__init__")
def init(method: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    method(self, *args, **kwargs)
    rotate = self._forward_method

    def forward(positions: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if current() == "M-RoPE rows dropped" and positions.ndim > 1:
            positions = positions[:1].expand_as(positions)
        return rotate(positions, *args, **kwargs)

    self._forward_method = forward


@patched(Model, "get_mrope_input_positions")
def positions_of(method: Any, self: Any, tokens: Any, features: Any, *args: Any) -> Any:
    positions, delta = method(self, tokens, features, *args)
    if current() == "positions off behind an image" and features:
        end = max(f.mm_position.offset + f.mm_position.length for f in features)
        positions = positions.clone()
        positions[:, end:] += 1
        delta += 1
    return positions, delta


# --- requests ---

_last: dict[tuple[int, int], Image.Image] = {}
"""The last image of another request, by size."""


def spoil(image: Image.Image, fault: str) -> Image.Image:
    width, height = image.size
    if fault == "images of rows swapped":
        other, _last[image.size] = _last.get(image.size, image), image
        return other
    if fault == "other pixel limits":  # the template has resized it to multiples of 28
        return image.resize((width + 28, height))
    if fault == "halved and enlarged":
        half = image.resize((width // 2, height // 2), Image.Resampling.NEAREST)
        return half.resize(image.size, Image.Resampling.NEAREST)
    if fault == "enlarged and reduced":
        larger = image.resize((width * 9 // 8, height * 9 // 8), Image.Resampling.BICUBIC)
        return larger.resize(image.size, Image.Resampling.BILINEAR)
    if fault == "colour channels swapped":
        return Image.merge("RGB", image.split()[::-1])
    return image


def last_frames(video: Any) -> Any:
    """Return a video of as many frames, all taken from the last two."""
    if isinstance(video, tuple):  # with its metadata
        return last_frames(video[0]), *video[1:]
    return np.concatenate([video[-2:]] * len(video))[: len(video)]


@patched(LLMEngine, "add_request")
def add_request(
    method: Any, self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kw: Any
) -> Any:
    fault = current()
    if fault == "one seed for all":
        params.seed = 7
    elif fault == f"adapter ignored by replica {os.environ.get('SWIFT_ROLLOUT_DP_RANK')}":
        kw["lora_request"] = None
    media = dict(prompt.get("multi_modal_data") or {}) if isinstance(prompt, dict) else {}
    shown = {kind: of if isinstance(of, list) else [of] for kind, of in media.items()}
    if "image" in shown and fault:
        images = [spoil(image.convert("RGB"), fault) for image in shown["image"]]
        if fault == "one of several images blank" and len(images) > 1:
            images[-1] = Image.new("RGB", images[-1].size, (127, 127, 127))
        prompt = {**prompt, "multi_modal_data": {**media, "image": images}}
    if "video" in shown and fault == "other video frames":
        videos = [*map(last_frames, shown["video"])]
        prompt = {**prompt, "multi_modal_data": {**media, "video": videos}}
    return method(self, request_id, prompt, params, *args, **kw)


# --- caches ---

for owner, cache in (
    (LLMEngine, "encoder"),
    (GPUModelRunner, "encoder"),  # the scheduler and the worker each have a part of the cache
    (LLMEngine, "prefix"),
):

    @patched(owner, f"reset_{cache}_cache")
    def reset(method: Any, self: Any, *args: Any, own: str = cache, **kwargs: Any) -> Any:
        return True if current() == f"stale {own} cache" else method(self, *args, **kwargs)


# --- the training ---

if "FAULTS_OF_ROUNDS" in os.environ:
    faults = json.loads(os.environ["FAULTS_OF_ROUNDS"])
    gap.NUM_EARLY = 10**9
    set_fault(faults[0])

    @patched(gap.GapCheck, "check")
    def check(method: Any, self: Any, gaps: Any, step: int, **kwargs: Any) -> Any:
        fault = current()
        number = self._num_rounds + 1
        set_fault(faults[number] if number < len(faults) else "")
        named: dict[str, str] = {}

        def report(_: int, beyond: Any, *args: Any, **kwargs: Any) -> None:
            named.update({" ".join(source): why for source, why in beyond.items()})

        if self._args.rollout_mismatch == "stop":
            return method(self, gaps, step, **kwargs)
        with replaced(self, "_report", report):
            metrics = method(self, gaps, step, **kwargs)
        with (FOLDER / "rounds").open("a", encoding="utf-8") as file:
            print(json.dumps({"fault": fault, "named": named}), file=file)
        return metrics
