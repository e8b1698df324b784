"""Videos and answers in the form that vLLM and a teacher's server take (images: upright.py)."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.upstream.patches import Moment, repair

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest

DEFAULT_FPS = 2.0  # qwen_vl_utils' (vision_process.FPS)


def add_video_metadata(inputs: MutableMapping[str, Any]) -> None:
    """Give each decoded video of an encoded request its metadata, unless it has some.

    Symptom: `ValueError: Video metadata is required but not found in mm input` at the first video,
    with Qwen2.5-VL and others; with metadata, `Field 'fps' expected float, got list`.
    Upstream: vLLM 0.32 asks for it (qwen2_5_vl.py, `video_needs_metadata=True`); ms-swift 4.6 gives
    it for Qwen3-VL only (template/templates/qwen.py, `replace_tag`), and the frames per second of
    each video as a list, where transformers 5.19 takes one number, or reads metadata. Can go when
    ms-swift gives it for each model that asks.

    ms-swift's template has put sampled `videos` [frames, ...] into `inputs`, and their frames per
    second into `mm_processor_kwargs["fps"]`.
    """
    videos = inputs.get("videos") or []
    settings = inputs.get("mm_processor_kwargs") or {}
    rates = settings.pop("fps") if isinstance(settings.get("fps"), list) else []
    for i, video in enumerate(videos):
        if isinstance(video, list) and len(video) == 1 and isinstance(video[0], tuple):
            [videos[i]] = video  # nested by ms-swift's base template
        if not hasattr(video, "shape"):  # it has its metadata, as Qwen3-VL's has
            continue
        num_frames, fps = len(video), float(rates[i]) if i < len(rates) else DEFAULT_FPS
        metadata = {
            "fps": fps,
            "duration": num_frames / fps,
            "total_num_frames": num_frames,
            "frames_indices": list(range(num_frames)),
            "video_backend": "opencv",
            "do_sample_frames": False,  # ms-swift has chosen the frames
        }
        videos[i] = (video, metadata)


@repair(
    Moment.ENGINE,
    symptom="`No module named 'swift.vision_utils'` at the first video, with InternVL and "
    "others whose template leaves videos to the base class.",
    upstream="ms-swift 4.6, template/base.py (`replace_tag`); the module is "
    "template/vision_utils.py, and reads other frames there than training does.",
    until="ms-swift finds its own module, and reads alike",
)
def supply_video_loader() -> None:
    """Let ms-swift's base template find what loads videos for vLLM."""
    name = "swift.vision_utils"
    if name not in sys.modules and find_spec(name) is None:
        module = ModuleType(name)
        vars(module).update(load_vllm_video=load_video)
        sys.modules[name] = module


def load_video(path: str, num_frames: int = -1) -> tuple[Any, dict[str, Any]]:
    """Return all frames [frames, height, width, 3] of a video, read as for training, and its
    metadata. ms-swift checks and reads a URL, with `num_frames` at most."""
    from swift.template import vision_utils

    if path.strip().startswith("http"):
        loaded: tuple[Any, dict[str, Any]] = vision_utils.load_vllm_video(path, num_frames)
        return loaded
    [frames], [metadata] = vision_utils.load_video_hf([path])
    return frames, asdict(metadata) | {"do_sample_frames": True}


def answers_for_servers(requests: Sequence[RolloutInferRequest]) -> Sequence[RolloutInferRequest]:
    """Turn answers that are token ids into what a teacher's server lets pass, in place."""
    for message in (m for request in requests for m in request.messages):
        content = message["content"]
        if isinstance(content, list) and content and isinstance(content[0], int):
            message["content"] = {"token_ids": content, "loss_scale": [1] * len(content)}
    return requests
