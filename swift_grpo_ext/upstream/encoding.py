"""Loads images upright, and converts videos for vLLM and answers for a teacher's server."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict
from functools import wraps
from importlib.util import find_spec
from io import BytesIO
from types import ModuleType
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps
from PIL.ExifTags import Base

from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest

DEFAULT_FPS = 2.0  # qwen_vl_utils' (vision_process.FPS)


def apply_exif_orientation(image: Image.Image) -> Image.Image:
    """Return the image rotated by its EXIF orientation, as viewers, vLLM and `datasets.Image` do.
    Raise the decoder's errors."""
    # Loading rotates TIFF already; PNG may store its orientation after the pixels.
    image.load()
    try:
        if image.getexif().get(Base.Orientation, 1) not in range(2, 9):
            return image
        return ImageOps.exif_transpose(image)
    except Exception:  # broken EXIF; vLLM keeps such an image too
        return image


@repair(PatchPhase.TRAINING, PatchPhase.ENGINE)
def load_upright() -> None:
    """Have ms-swift's templates load images upright and without EXIF, which vLLM then keeps. Boxes
    of `objects` refer to the upright image.

    Symptom: the rollout sees a photograph upright, and training sees it rotated: log-probabilities
    differ by 0.08 to 1.2 nats (tiny models), and for a square photograph even the token ids agree.
    Upstream: ms-swift 4.6, template/vision_utils.py (`load_image`) ignores the EXIF orientation, in
    training and with its other engines; vLLM 0.32 applies it, twice (multimodal/parse.py:773 and,
    for uncached images, multimodal/processing/processor.py:1382, `normalize_image`). Can go when
    ms-swift's `load_image` applies the EXIF orientation.
    """
    from swift.template import base, vision_utils

    load = vision_utils.load_image

    @wraps(load)
    def load_image(image: Any) -> Image.Image:
        opened = vision_utils.load_file(image)
        if isinstance(opened, BytesIO):
            opened = Image.open(opened)
        # Before ms-swift converts the image, which drops some EXIF data.
        return load(apply_exif_orientation(opened) if isinstance(opened, Image.Image) else opened)

    # `base` has its own reference to the function.
    patch(vision_utils, load_image=load_image)
    patch(base, load_image=load_image)


def add_video_metadata(inputs: MutableMapping[str, Any]) -> None:
    """Add metadata to each decoded video of an encoded request that lacks it.

    Symptom: `ValueError: Video metadata is required but not found in mm input` at the first video,
    with Qwen2.5-VL and others; with metadata, `Field 'fps' expected float, got list`.
    Upstream: vLLM 0.32 requires metadata (qwen2_5_vl.py, `video_needs_metadata=True`). ms-swift 4.6
    only adds it for Qwen3-VL (template/templates/qwen.py, `replace_tag`). It passes the videos'
    frames per second as a list; transformers 5.19 takes one number, or reads metadata. Can go when
    ms-swift adds metadata for each model that requires it.

    ms-swift's template has put sampled `videos` [frames, ...] into `inputs`, and their frames per
    second into `mm_processor_kwargs["fps"]`.
    """
    videos = inputs.get("videos") or []
    settings = inputs.get("mm_processor_kwargs") or {}
    rates = settings.pop("fps") if isinstance(settings.get("fps"), list) else []
    for i, video in enumerate(videos):
        if isinstance(video, list) and len(video) == 1 and isinstance(video[0], tuple):
            [videos[i]] = video  # nested by ms-swift's base template
        if not hasattr(video, "shape"):  # it has metadata already (Qwen3-VL)
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


@repair(PatchPhase.ENGINE)
def supply_video_loader() -> None:
    """Provide the module from which ms-swift's base template loads videos for vLLM.

    Symptom: `No module named 'swift.vision_utils'` at the first video, with InternVL and other
    templates that leave videos to the base class.
    Upstream: ms-swift 4.6, template/base.py (`replace_tag`) imports a wrong module. The right one,
    template/vision_utils.py, has a `load_vllm_video` that reads other frames than training. Can go
    when ms-swift imports its own module, and reads the same frames.
    """
    name = "swift.vision_utils"
    if name not in sys.modules and find_spec(name) is None:
        module = ModuleType(name)
        vars(module).update(load_vllm_video=load_video)
        sys.modules[name] = module


def load_video(path: str, num_frames: int = -1) -> tuple[Any, dict[str, Any]]:
    """Return all frames [frames, height, width, 3] of a video, as training reads them, and its
    metadata."""
    from swift.template import vision_utils

    # ms-swift checks URLs before it reads them, with at most `num_frames`.
    if path.strip().startswith("http"):
        loaded: tuple[Any, dict[str, Any]] = vision_utils.load_vllm_video(path, num_frames)
        return loaded
    [frames], [metadata] = vision_utils.load_video_hf([path])
    return frames, asdict(metadata) | {"do_sample_frames": True}


def answers_for_servers(requests: Sequence[RolloutInferRequest]) -> Sequence[RolloutInferRequest]:
    """Convert answers that are token ids, in place, to a form that a teacher's server accepts."""
    for message in (m for request in requests for m in request.messages):
        content = message["content"]
        if isinstance(content, list) and content and isinstance(content[0], int):
            message["content"] = {"token_ids": content, "loss_scale": [1] * len(content)}
    return requests
