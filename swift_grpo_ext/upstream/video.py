"""Videos for vLLM models that want to know how a video's frames were taken.

Symptom: `ValueError: Video metadata is required but not found in mm input` at the first video, with
Qwen2.5-VL and others; with metadata, `Field 'fps' expected float, got list`.
Upstream: vLLM 0.32 asks for it (qwen2_5_vl.py, `video_needs_metadata=True`); ms-swift 4.6 gives it
for Qwen3-VL only (template/templates/qwen.py, `replace_tag`), and the frames per second of each
video as a list, where transformers 5.19 takes one number for all, or reads them from the metadata.
Can go when ms-swift gives it for each model whose parser asks. Models that need none drop it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

DEFAULT_FPS = 2.0
"""qwen_vl_utils' own (vision_process.FPS)."""


def add_video_metadata(inputs: MutableMapping[str, Any]) -> None:
    """Give each decoded video of an encoded request its metadata, unless it has some.

    Args:
        inputs: what ms-swift's template made for vLLM: `videos` as arrays [frames, ...], sampled
            already, and their frames per second in `mm_processor_kwargs["fps"]`.
    """
    videos = inputs.get("videos") or []
    settings = inputs.get("mm_processor_kwargs") or {}
    rates = settings.pop("fps") if isinstance(settings.get("fps"), list) else []
    for i, video in enumerate(videos):
        if hasattr(video, "shape"):
            fps = float(rates[i]) if i < len(rates) else DEFAULT_FPS
            videos[i] = (video, _metadata(len(video), fps))


def _metadata(num_frames: int, fps: float) -> dict[str, Any]:
    return {
        "fps": fps,
        "duration": num_frames / fps,
        "total_num_frames": num_frames,
        "frames_indices": list(range(num_frames)),
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
