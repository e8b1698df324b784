"""What vLLM makes of an image that is marked as turned; videos carry what it wants to know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from PIL.ExifTags import Base
from swift.infer_engine.protocol import RolloutInferRequest
from swift.pipelines.infer.deploy import SwiftDeploy
from swift.template import vision_utils

from swift_grpo_ext.upstream.encoding import (
    add_video_metadata,
    answers_for_servers,
    drop_orientation,
    load_video,
    tool_calls,
)
from tests.turned import TURNS, as_vllm_sees


def photograph(path: Path, orientation: int) -> Image.Image:
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    pixels = np.random.default_rng(0).integers(0, 255, (8, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)
    return Image.open(path).convert("RGB")  # as ms-swift loads it


@pytest.mark.parametrize("orientation", range(1, 9))
def test_vllm_sees_what_training_sees(orientation: int, tmp_path: Path) -> None:
    """Each image of a row as it is stored; what is no image is handed on as it is."""
    image = photograph(tmp_path / "photo.jpg", orientation)
    pixels = np.asarray(image).copy()
    assert np.array_equal(np.asarray(as_vllm_sees(image)), pixels) == (
        orientation == 1 or not TURNS
    )
    inputs = {"images": [image, "photo.jpg", image]}
    drop_orientation(inputs)
    for i in (0, 2):
        assert np.array_equal(np.asarray(as_vllm_sees(inputs["images"][i])), pixels)
    assert inputs["images"][1] == "photo.jpg"
    assert (inputs["images"][0] is image) == (orientation == 1)
    assert image.getexif().get(Base.Orientation) == orientation  # the user's image is as it was


def test_each_video_gets_the_rate_that_it_was_sampled_at() -> None:
    videos = [np.zeros((4, 3, 8, 8)), np.zeros((6, 3, 8, 8))]
    settings = {"fps": [1.0, 2.0], "do_resize": False}
    inputs: dict[str, Any] = {"videos": list(videos), "mm_processor_kwargs": settings}
    add_video_metadata(inputs)
    metadata = [m for _, m in inputs["videos"]]
    assert all(kept is video for (kept, _), video in zip(inputs["videos"], videos, strict=True))
    assert [(m["fps"], m["duration"], m["total_num_frames"]) for m in metadata] == [
        (1.0, 4.0, 4),
        (2.0, 3.0, 6),
    ]
    assert metadata[1]["frames_indices"] == [0, 1, 2, 3, 4, 5]
    assert settings == {"do_resize": False}


def test_what_has_metadata_or_no_video_is_left_alone() -> None:
    known = (np.zeros((2, 3, 8, 8)), {"fps": 24.0})
    inputs: dict[str, Any] = {"videos": [known], "mm_processor_kwargs": {"fps": 24.0}}
    add_video_metadata(inputs)
    assert inputs["videos"][0] is known
    assert inputs["mm_processor_kwargs"] == {"fps": 24.0}
    unmarked: dict[str, Any] = {"images": [Image.new("L", (2, 2))]}
    [image] = unmarked["images"]
    drop_orientation(unmarked)
    assert unmarked["images"][0] is image
    for without in ({"input_ids": [1]}, {"images": [], "videos": []}):
        before = dict(without)
        add_video_metadata(without)
        drop_orientation(without)
        assert without == before


def test_a_videos_url_is_left_to_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(vision_utils, "load_vllm_video", lambda *args: given.append(args) or "it")
    assert load_video(" https://a/b.mp4", 7) == "it"
    load_video("http://a/b.mp4")
    assert given == [(" https://a/b.mp4", 7), ("http://a/b.mp4", -1)]


def test_tool_calls_are_read_as_the_release_reads_them() -> None:
    newer = SimpleNamespace(
        _get_toolcall=lambda response, template_inputs: (response, template_inputs)
    )
    older = SimpleNamespace(_get_toolcall=lambda text: text)
    assert tool_calls(newer, "text", "inputs") == ("text", "inputs")
    assert tool_calls(older, "text", "inputs") == "text"


@pytest.mark.skipif(
    not hasattr(SwiftDeploy, "_prepare_request_media"), reason="ms-swift 4.4 has no such teachers"
)
def test_a_teachers_server_takes_answers_in_token_ids() -> None:
    """ms-swift's own server, which looks for media in messages, and takes ids for parts of one."""
    parts = [{"type": "text", "text": "Which digit?"}]

    def request() -> Any:
        answers = [{"role": "assistant", "content": ids} for ids in ([5, 6], [7])]
        return RolloutInferRequest(messages=[{"role": "user", "content": parts}, *answers])

    def served(request: Any) -> list[Any]:
        with SwiftDeploy._prepare_request_media(request) as prepared:
            return [message["content"] for message in prepared.messages]

    with pytest.raises(AttributeError, match="'int' object has no attribute 'get'"):
        served(request())
    [found] = answers_for_servers([request()])
    assert served(found) == [
        parts,
        {"token_ids": [5, 6], "loss_scale": [1, 1]},
        {"token_ids": [7], "loss_scale": [1]},
    ]
