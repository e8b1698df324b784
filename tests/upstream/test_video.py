"""Videos carry what vLLM wants to know of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from swift_grpo_ext.upstream.video import add_video_metadata


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
    add_video_metadata({"input_ids": [1]})
