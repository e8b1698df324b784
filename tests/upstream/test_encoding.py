"""What vLLM makes of an image that is marked as turned; videos carry what it wants to know; where
training places images."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.ExifTags import Base
from swift.infer_engine.protocol import RolloutInferRequest
from swift.model import get_model_processor
from swift.pipelines.infer.deploy import SwiftDeploy
from swift.template import Template, get_template, vision_utils
from swift.template.vision_utils import load_video_hf
from tiny_vlm.families import FAMILIES, make_family

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import mismatch
from swift_grpo_ext.upstream.encoding import (
    add_video_metadata,
    answers_for_servers,
    drop_orientation,
    load_video,
    supply_video_loader,
    tool_calls,
)
from swift_grpo_ext.upstream.models import place_glm_ocr_images
from tests.stack.rounds import write_video
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


def test_a_video_of_the_base_template_is_what_training_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An engine that a test before this one made has supplied it; both come back at the end.
    monkeypatch.setitem(sys.modules, "swift.vision_utils", ModuleType("swift.vision_utils"))
    monkeypatch.delitem(sys.modules, "swift.vision_utils")
    images = [str(tmp_path / f"{i}.png") for i in range(20)]
    for i, image in enumerate(images):
        Image.new("RGB", (32, 16), (12 * i, 255 - 12 * i, 40)).save(image)
    path = str(write_video(images, tmp_path / "colours.mp4"))
    template = SimpleNamespace(mode="vllm", video_placeholder=["<video>"])
    row = SimpleNamespace(videos=[path])
    with pytest.raises(ModuleNotFoundError, match=r"swift\.vision_utils"):
        Template.replace_tag(template, "video", 0, row)
    supply_video_loader()
    assert Template.replace_tag(template, "video", 0, row) == ["<video>"]
    inputs = {"videos": row.videos}
    add_video_metadata(inputs)
    [(frames, metadata)] = inputs["videos"]
    [trained], _ = load_video_hf([path])
    assert frames.shape == (20, 16, 32, 3)
    assert np.array_equal(frames, trained)
    assert (metadata["fps"], metadata["total_num_frames"]) == (1.0, 20)


def test_a_videos_url_is_left_to_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(vision_utils, "load_vllm_video", lambda *args: given.append(args) or "it")
    assert load_video(" https://a/b.mp4", 7) == "it"
    load_video("http://a/b.mp4")
    assert given == [(" https://a/b.mp4", 7), ("http://a/b.mp4", -1)]


@pytest.mark.skipif(
    any(map(mismatch, pins.GLM_OCR_POSITIONS)), reason="ms-swift has no such template"
)
def test_glm_ocr_sees_images_in_training_where_transformers_places_them(tmp_path: Path) -> None:
    make_family(FAMILIES["glm_ocr"], tmp_path, seed=0)
    model, processor = get_model_processor(
        str(tmp_path), model_type="glm_ocr", torch_dtype=torch.float32
    )
    place_glm_ocr_images()
    template = get_template(processor, template_type="glm_ocr")
    template.set_mode("train")
    template.model = model
    answer = {"role": "assistant", "content": "1"}
    image = Image.new("RGB", (112, 56), "red")
    rows = [
        {"messages": [{"role": "user", "content": "<image>Which?"}, answer], "images": [image]},
        {"messages": [{"role": "user", "content": "None?"}, answer]},
    ]
    inputs = template.data_collator([template.encode(row) for row in rows])
    labels, mask = inputs.pop("labels"), inputs["attention_mask"].bool()
    with torch.no_grad():
        own = {**inputs, "position_ids": None}
        types = (inputs["input_ids"] == model.config.image_token_id).int()
        expected = model(**own, mm_token_type_ids=types).logits
        template.register_post_encode_hook([model])
        found = model(**inputs).logits
    assert (labels != -100).any()
    torch.testing.assert_close(found[mask], expected[mask], rtol=1e-4, atol=1e-4)


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
