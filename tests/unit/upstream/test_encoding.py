"""Photographs are upright in rollouts and in training, and videos have the metadata that vLLM needs
[M3]. `tests/stack/test_rows.py` trains with rows that name photographs in each form."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.ExifTags import Base
from swift.template import Template, vision_utils
from swift.template.template_inputs import StdTemplateInputs
from vllm.multimodal import image as of_vllm

from swift_grpo_ext.upstream.encoding import add_video_metadata, load_upright, load_video
from swift_grpo_ext.upstream.patches import make

PIXELS = np.random.default_rng(0).integers(0, 255, (8, 24, 3), dtype=np.uint8)


@pytest.fixture(autouse=True)
def _loads_upright() -> None:
    make(load_upright)


def photograph(form: str, orientation: int, mode: str = "RGB") -> bytes:
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    exif[Base.Make] = "a phone"
    image = Image.fromarray(PIXELS).convert(mode)
    options = {"save_all": True, "append_images": [image.copy()]} if form == "MPO" else {}
    image.save(content := io.BytesIO(), form, exif=exif, **options)
    return content.getvalue()


def as_shown(content: bytes) -> Any:
    """Return the pixels that a viewer shows."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))


def as_vllm_sees_at_last(image: Any) -> Any:
    """Return the pixels in vLLM, which parses an image twice if its cache lacks it."""
    turn = getattr(of_vllm, "normalize_image", lambda image: image)  # vLLM 0.23 turns nothing
    return np.asarray(turn(turn(image)))


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        *((form, "RGB") for form in ("JPEG", "PNG", "WEBP", "TIFF", "MPO")),
        # ms-swift's conversion to RGB loses their marks.
        *(("JPEG", "CMYK"), ("PNG", "P"), ("PNG", "I;16")),
    ],
)
def test_each_orientation_is_seen_as_it_is_shown(form: str, mode: str) -> None:
    for orientation in range(1, 9):
        content = photograph(form, orientation, mode)
        image = Template._load_image({"bytes": content, "path": None}, True)
        for seen in (np.asarray(image), as_vllm_sees_at_last(image)):
            assert np.array_equal(seen, as_shown(content))
        if orientation > 1:
            assert Base.Orientation not in image.getexif()


def test_frames_and_boxes_of_photographs_are_turned_too(tmp_path: Path) -> None:
    """The user's own image stays as it was, and a conversation's next turn changes nothing. The
    upright picture is wide where the file is high. A file that is cut short is refused."""
    path = tmp_path / "frame.jpg"
    path.write_bytes(content := photograph("JPEG", 6))
    [frames], _ = vision_utils.load_video_hf([[str(path)] * 2])
    assert np.array_equal(frames, [as_shown(content)] * 2)
    own = Image.open(path)
    image = Template._load_image(own, True)
    assert own.getexif()[Base.Orientation] == 6
    assert Template._load_image(image, True) is image
    inputs = StdTemplateInputs(messages=[], images=[image], objects={"bbox": [[0, 0, 4, 4]]})
    Template._get_height_width(inputs)
    assert (inputs.objects["width"], inputs.objects["height"]) == ([8], [24])
    with pytest.raises(OSError, match="truncated"):
        vision_utils.load_image(content[:-20])


def test_what_says_nothing_is_left_alone() -> None:
    """No orientation, orientation 1, values outside of EXIF, and a broken block."""
    for orientation in (None, 1, 0, 9, "broken"):
        image = Image.fromarray(PIXELS)
        if orientation == "broken":
            image.info["exif"] = b"Exif\0\0II*\0\xff\xff\xff\xff"
        elif orientation is not None:
            image.getexif()[Base.Orientation] = orientation
        assert vision_utils.load_image(image) is image
        assert np.array_equal(as_vllm_sees_at_last(image), PIXELS)


def test_each_video_gets_the_rate_that_it_was_sampled_at() -> None:
    """A video that has metadata keeps it."""
    known = (np.zeros((2, 3, 8, 8)), {"fps": 24.0})
    videos = [np.zeros((4, 3, 8, 8)), np.zeros((6, 3, 8, 8)), known]
    settings = {"fps": [1.0, 2.0], "do_resize": False}
    inputs: dict[str, Any] = {"videos": [*videos], "mm_processor_kwargs": settings}
    add_video_metadata(inputs)
    (first, of_first), (second, of_second), third = inputs["videos"]
    assert (first is videos[0], second is videos[1], third is known) == (True,) * 3
    for metadata, fps, seconds in ((of_first, 1.0, 4.0), (of_second, 2.0, 3.0)):
        assert (metadata["fps"], metadata["duration"]) == (fps, seconds)
        assert metadata["frames_indices"] == [*range(metadata["total_num_frames"])]
    assert settings == {"do_resize": False}
    add_video_metadata(without := {"input_ids": [1]})
    assert without == {"input_ids": [1]}


def test_a_videos_url_is_left_to_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(vision_utils, "load_vllm_video", lambda *args: given.append(args) or "it")
    assert load_video(" https://a/b.mp4", 7) == "it"
    load_video("http://a/b.mp4")
    assert given == [(" https://a/b.mp4", 7), ("http://a/b.mp4", -1)]
