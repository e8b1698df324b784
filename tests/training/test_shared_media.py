"""The media of a group are encoded once, and what the model sees stays bit for bit the same."""

from __future__ import annotations

import base64
import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen_vl_utils
import swift.template.base
import torch
from PIL import Image, ImageDraw
from swift.model import get_processor
from swift.template import get_template
from swift.template.template_inputs import StdTemplateInputs

from swift_grpo_ext.training.shared_media import MediaCache, MediaChangedError, shared_media
from swift_grpo_ext.upstream.media import SharedImage

NUM_SAMPLES = 4
"""Samples of a group."""


@pytest.fixture(scope="module")
def processor(assets: Path) -> Any:
    return get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")


@pytest.fixture
def template(processor: Any) -> Any:
    made = get_template(processor, template_type="qwen2_5_vl")
    made.set_mode("train")
    return made


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """Three files: RGB, RGB of another size, and a transparent one."""
    noise = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path, shape in zip(paths, [(90, 120, 3), (112, 112, 3), (60, 64, 4)], strict=True):
        Image.fromarray(noise.integers(0, 256, shape, dtype=np.uint8)).save(path)
    return paths


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, processor: Any) -> Counter[str]:
    """How often the real functions ran: `decode`, `image`, `video`, `fetch_video`."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str, label: str) -> None:
        real = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[label] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(swift.template.base, "load_image", "decode")
    count(type(processor.image_processor), "preprocess", "image")
    count(type(processor.video_processor), "preprocess", "video")
    count(qwen_vl_utils, "fetch_video", "fetch_video")
    return counts


def row(*images: Any, answer: str = "7", **fields: Any) -> dict[str, Any]:
    question = "<image>" * len(images) + "Which digit?"
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, "images": list(images), **fields}


def group(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Copies that share nothing, not even their bytes, with answers of their own."""
    rows = [copy.deepcopy(one) for _ in range(NUM_SAMPLES)]
    for index, each in enumerate(rows):
        each["messages"][-1]["content"] += " " * index
        for image in each.get("images", []):
            if isinstance(image, dict) and image["bytes"]:
                image["bytes"] = bytes(bytearray(image["bytes"]))
    return rows


def encode(template: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [template.encode(copy.deepcopy(each), return_length=True) for each in rows]


def assert_identical(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert list(one) == list(other)
        for key, value in one.items():
            assert type(value) is type(other[key])
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.shape) == (other[key].dtype, other[key].shape)
                assert torch.equal(value, other[key])
            else:
                assert value == other[key]


def as_path(path: Path) -> Any:
    return str(path)


def as_dict(path: Path) -> Any:
    return {"path": str(path), "bytes": None}


def as_bytes(path: Path) -> Any:
    return {"path": None, "bytes": path.read_bytes()}


def as_base64(path: Path) -> Any:
    return base64.b64encode(path.read_bytes()).decode()


def as_data_url(path: Path) -> Any:
    return f"data:image/png;base64,{as_base64(path)}"


def as_pixels(path: Path) -> Any:
    return Image.open(path).convert("RGB")


FORMS = [as_path, as_dict, as_bytes, as_base64, as_data_url, as_pixels]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_images", [1, 3])
def test_a_group_is_encoded_once_to_the_same_bits(
    template: Any, images: list[Path], calls: Counter[str], form: Any, num_images: int
) -> None:
    rows = group(row(*(form(path) for path in images[:num_images])))
    expected = encode(template, rows)
    assert calls == {"decode": num_images * NUM_SAMPLES, "image": NUM_SAMPLES}
    calls.clear()
    with shared_media(template):
        found = encode(template, rows)
    assert_identical(expected, found)
    assert calls == {"decode": num_images, "image": num_images}


def test_collated_batches_are_the_same(template: Any, images: list[Path]) -> None:
    rows = group(row(as_path(images[0]))) + group(row(as_path(images[1])))
    expected = template.data_collator(encode(template, rows))
    with shared_media(template):
        found = template.data_collator(encode(template, rows))
    assert_identical([expected], [found])


def test_same_words_with_other_images_are_not_mixed(template: Any, images: list[Path]) -> None:
    rows = [row(form(path)) for form in FORMS for path in images[:2]] * 2
    with shared_media(template):
        found = encode(template, rows)
    assert_identical(encode(template, rows), found)
    assert not torch.equal(found[0]["pixel_values"][:4], found[1]["pixel_values"][:4])


def test_order_of_images_counts(template: Any, images: list[Path]) -> None:
    rows = [
        row(as_path(images[0]), as_path(images[1])),
        row(as_path(images[1]), as_path(images[0])),
    ]
    with shared_media(template):
        found = encode(template, rows)
    assert_identical(encode(template, rows), found)


@pytest.mark.parametrize("max_pixels", [{"max_pixels": 28 * 28 * 4}])
def test_other_settings_of_a_row_are_not_mixed(
    template: Any, images: list[Path], max_pixels: dict[str, int]
) -> None:
    rows = [row(as_path(images[0])), row(as_path(images[0]), chat_template_kwargs=max_pixels)] * 2
    with shared_media(template):
        found = encode(template, rows)
    assert_identical(encode(template, rows), found)
    assert len(found[0]["pixel_values"]) != len(found[1]["pixel_values"])


def test_other_settings_of_the_processor_are_not_mixed(
    template: Any, processor: Any, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = row(as_path(images[0]))
    (before,) = encode(template, [one])
    with shared_media(template):
        assert_identical([before], encode(template, [one]))
        monkeypatch.setattr(processor.image_processor, "image_mean", (0.0, 0.0, 0.0))
        (found,) = encode(template, [one])
    assert_identical(encode(template, [one]), [found])
    assert not torch.equal(before["pixel_values"], found["pixel_values"])


def test_a_changed_file_is_read_again_in_the_next_context(
    template: Any, images: list[Path]
) -> None:
    one = row(as_path(images[0]))
    with shared_media(template):
        (before,) = encode(template, [one])
    Image.new("RGB", (120, 90), "red").save(images[0])
    with shared_media(template):
        found = encode(template, [one])
    assert_identical(encode(template, [one]), found)
    assert not torch.equal(before["pixel_values"], found[0]["pixel_values"])


def test_text_only_rows(template: Any) -> None:
    rows = group(row())
    with shared_media(template) as cache:
        found = encode(template, rows)
    assert_identical(encode(template, rows), found)
    assert cache.num_misses == 0


def test_frames_of_videos(template: Any, images: list[Path], calls: Counter[str]) -> None:
    one = row(videos=[[str(path) for path in images[:2]]])
    one["messages"][0]["content"] = "<video>What is it?"
    rows = group(one)
    expected = encode(template, rows)
    calls.clear()
    with shared_media(template):
        found = encode(template, rows)
    assert_identical(expected, found)
    assert calls == {"fetch_video": 1, "video": 1}


def load_frames(video: str, colors: list[str]) -> list[Image.Image]:
    """Frames of a video in the way of the loaders in `swift.template.vision_utils`."""
    return [Image.new("RGB", (30, 30), color) for color in colors]


def test_videos_that_become_images(template: Any) -> None:
    colors, first_frames = ["red", "blue"], []
    with shared_media(template) as cache:
        for video in ("a.mp4", "b.mp4") * 2:
            inputs = StdTemplateInputs(messages=[], videos=[video])
            load = functools.partial(load_frames, colors=colors)
            assert template.replace_video2image(load, inputs, lambda i: [str(i)]) == ["0", "1"]
            first_frames.append(inputs.images[0])
            draw(inputs.images[1])
    assert (cache.num_hits, cache.num_misses) == (2, 2)
    assert all(frame.getpixel((0, 0)) == (255, 0, 0) for frame in first_frames)
    assert load_frames("a.mp4", colors)[0].tobytes() == first_frames[2].tobytes()


@pytest.mark.parametrize("max_bytes", [0, 50_000, 200_000])
def test_the_memory_bound_is_honoured(template: Any, images: list[Path], max_bytes: int) -> None:
    rows = [row(as_path(path)) for path in images] * NUM_SAMPLES
    with shared_media(template) as unbounded:
        expected = encode(template, rows)
    with shared_media(template, max_bytes=max_bytes) as cache:
        for one, alone in zip(rows, expected, strict=True):
            assert_identical([alone], encode(template, [one]))
            assert 0 <= cache.num_bytes <= max_bytes
    assert cache.num_hits < unbounded.num_hits


def test_threads_share_too(template: Any, images: list[Path], calls: Counter[str]) -> None:
    rows = group(row(as_path(images[0]), as_path(images[1]))) * 4
    expected = encode(template, rows)
    calls.clear()
    with shared_media(template), ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda one: encode(template, [one])[0], rows))
    assert_identical(expected, found)
    assert calls == {"decode": 2, "image": 2}


def test_a_failure_is_raised_in_all_samples_and_not_remembered(
    template: Any, images: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(images[0].read_bytes()[:2000])
    with shared_media(template):
        for one in group(row(as_path(broken))):
            with pytest.raises(OSError, match="truncated"):
                encode(template, [one])
        broken.write_bytes(images[0].read_bytes())
        found = encode(template, [row(as_path(broken))])
    assert_identical(encode(template, [row(as_path(images[0]))]), found)


def hooks(template: Any) -> list[Any]:
    processor = template.processor
    owners = [template, processor.image_processor, processor.video_processor]
    names = ("_load_image", "replace_video2image", "preprocess")
    return [*(name for owner in owners for name in names if name in vars(owner)), fetch_video()]


def fetch_video() -> Any:
    return qwen_vl_utils.fetch_video


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_everything_is_put_back(template: Any, error: type[BaseException] | None) -> None:
    before = hooks(template)

    def enter() -> None:
        with shared_media(template):
            assert len(hooks(template)) == 5
            if error:
                raise error

    if error:
        with pytest.raises(error):
            enter()
    else:
        enter()
    assert hooks(template) == before == [fetch_video()]


def test_contexts_may_nest_and_overlap(template: Any, images: list[Path]) -> None:
    one = row(as_path(images[0]))
    expected, before = encode(template, [one]), hooks(template)
    first, second = shared_media(template), shared_media(copy.copy(template))
    first.__enter__()
    with shared_media(template):
        second.__enter__()
        assert_identical(expected, encode(template, [one]))
    first.__exit__(None, None, None)
    assert_identical(expected, encode(template, [one]))
    second.__exit__(None, None, None)
    assert hooks(template) == before


def test_a_copy_made_within_works_without(template: Any, images: list[Path]) -> None:
    one = row(as_path(images[0]))
    with shared_media(template):
        copied = copy.copy(template)
    assert_identical(encode(template, [one]), encode(copied, [one]))


@pytest.fixture
def shared(images: list[Path]) -> Iterator[Callable[[], Image.Image]]:
    cache = MediaCache(2**20)
    yield lambda: cache.share(str(images[0]), lambda: Image.open(images[0]))
    cache.check()


def draw(image: Image.Image) -> None:
    ImageDraw.Draw(image).rectangle((0, 0, 50, 50), fill="red")


def shrink(image: Image.Image) -> None:
    image.thumbnail((20, 20))
    image.paste("red", (0, 0, 20, 20))


def thumbnail(image: Image.Image) -> Image.Image:
    small = image.copy()
    small.thumbnail((20, 20))
    return small


CHANGES: list[Callable[[Image.Image], Any]] = [
    draw,
    shrink,
    lambda image: image.paste("red", (0, 0, 50, 50)),
    lambda image: image.putpixel((0, 0), (1, 2, 3)),
    lambda image: image.putalpha(3),
    lambda image: image.frombytes(bytes(image.width * image.height * 3)),
    lambda image: draw(image.convert("RGB")),
    lambda image: draw(image.resize((60, 60))),
    lambda image: draw(image.copy()),
    lambda image: image.info.update(dpi=1),
]


@pytest.mark.parametrize("change", CHANGES)
def test_who_changes_an_image_changes_only_his(
    shared: Callable[[], Image.Image], images: list[Path], change: Any
) -> None:
    original = Image.open(images[0])
    mine, theirs = shared(), shared()
    change(mine)
    for image in (theirs, shared()):
        assert image.tobytes() == original.tobytes()
        assert image.info == original.info
        assert image.resize((60, 60)).tobytes() == original.resize((60, 60)).tobytes()
        assert image.convert("RGB").tobytes() == original.convert("RGB").tobytes()
        assert thumbnail(image).tobytes() == thumbnail(original).tobytes()


def test_a_changed_image_is_known_by_its_new_pixels(
    shared: Callable[[], Image.Image], images: list[Path]
) -> None:
    mine, original = shared(), Image.open(images[0]).convert("RGB")
    assert isinstance(mine, SharedImage)
    for image in (mine, original):
        draw(image)
    assert mine.content_key is None
    assert mine.resize((60, 60)).tobytes() == original.resize((60, 60)).tobytes()


def test_a_write_to_a_shared_tensor_is_refused(template: Any, images: list[Path]) -> None:
    rows = group(row(as_path(images[0])))

    def write_and_go_on() -> None:
        with shared_media(template):
            encode(template, rows[:1])[0]["pixel_values"].mul_(2)
            encode(template, rows[1:])

    def write_last() -> None:
        with shared_media(template):
            encode(template, rows)[-1]["pixel_values"].mul_(2)

    for write in (write_and_go_on, write_last):
        with pytest.raises(MediaChangedError, match=r"shape .* written to in place"):
            write()
    assert hooks(template) == [fetch_video()]


def test_arrays_and_containers_are_each_callers_own() -> None:
    cache = MediaCache(2**20)
    made = [cache.share("key", lambda: {"a": np.zeros(3), "b": [1, (2,)]}) for _ in range(3)]
    made[0]["a"] += 1
    made[0]["b"].append(3)
    made[1]["c"] = 4
    assert list(made[2]) == ["a", "b"]
    assert made[2]["a"].tolist() == [0, 0, 0]
    assert made[2]["b"] == [1, (2,)]


def test_what_never_fits_drives_nothing_out() -> None:
    """A pixel of an image takes four bytes."""
    cache = MediaCache(100)
    for _ in range(2):
        cache.share("small", lambda: Image.new("RGB", (2, 3)))
        assert cache.num_bytes == 4 * 2 * 3
        cache.share("large", lambda: torch.zeros(100))
    assert (cache.num_hits, cache.num_misses, cache.num_bytes) == (1, 3, 24)


@dataclass
class Setting:
    value: int


@pytest.mark.parametrize("part", [open, threading.Lock(), object(), [{1: iter([])}]])
def test_content_without_a_name_is_not_shared(part: Any) -> None:
    cache = MediaCache(2**20)
    made = [cache.share(part, lambda: torch.zeros(1)) for _ in range(2)]
    assert made[0].data_ptr() != made[1].data_ptr()
    assert cache.num_hits == cache.num_misses == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        ("1", 1),
        ("a", b"a"),
        ([1, 2], (1, 2)),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, {"a": 2}),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), np.zeros(2, dtype=np.float32)),
        (Image.new("L", (2, 2)), Image.new("L", (4, 1))),
        (Image.new("RGB", (2, 2)), Image.new("YCbCr", (2, 2))),
        ("x" * 300, "x" * 300 + "y"),
        (Setting(1), Setting(2)),
    ],
)
def test_contents_that_differ_are_told_apart(one: Any, other: Any) -> None:
    cache = MediaCache(2**20)
    assert cache.share(one, lambda: "one") == "one"
    assert cache.share(other, lambda: "other") == "other"
    assert cache.share(copy.deepcopy(one), lambda: "again") == "one"
