"""Videos have the metadata that vLLM needs [M3]; a teacher's server takes answers as token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from swift.infer_engine.protocol import RolloutInferRequest
from swift.pipelines.infer.deploy import SwiftDeploy
from swift.template import vision_utils

from swift_grpo_ext.upstream.encoding import (
    add_video_metadata,
    answers_for_servers,
    load_video,
)


def test_each_video_gets_the_rate_that_it_was_sampled_at() -> None:
    """A video that has metadata keeps it."""
    known = (np.zeros((2, 3, 8, 8)), {"fps": 24.0})
    videos = [np.zeros((4, 3, 8, 8)), np.zeros((6, 3, 8, 8)), known]
    settings = {"fps": [1.0, 2.0], "do_resize": False}
    inputs: dict[str, Any] = {"videos": list(videos), "mm_processor_kwargs": settings}
    add_video_metadata(inputs)
    assert inputs["videos"][2] is known
    for (kept, metadata), video, rate in zip(
        inputs["videos"], videos[:2], (1.0, 2.0), strict=False
    ):
        assert kept is video
        assert metadata["fps"] == rate
        assert metadata["duration"] == len(video) / rate
        assert metadata["frames_indices"] == [*range(metadata["total_num_frames"])]
    assert settings == {"do_resize": False}


def test_a_request_without_videos_is_left_alone() -> None:
    for without in ({"input_ids": [1]}, {"images": [], "videos": []}):
        before = dict(without)
        add_video_metadata(without)
        assert without == before


def test_a_videos_url_is_left_to_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(vision_utils, "load_vllm_video", lambda *args: given.append(args) or "it")
    assert load_video(" https://a/b.mp4", 7) == "it"
    load_video("http://a/b.mp4")
    assert given == [(" https://a/b.mp4", 7), ("http://a/b.mp4", -1)]


def test_a_teachers_server_takes_answers_in_token_ids() -> None:
    """ms-swift's server looks for media in messages, and would read token ids as parts."""
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
