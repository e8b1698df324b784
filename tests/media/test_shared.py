"""The media of a group are encoded once, and what the model sees stays bit for bit the same."""

from __future__ import annotations

import base64
import copy
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
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
from swift.utils import get_logger

from swift_grpo_ext.media.hooks import SharedImage, _hook_processor, _knows_vllm
from swift_grpo_ext.media.shared import MediaCache, MediaChangedError, RoundMedia, shared_media
from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import Pin

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


def test_the_memory_of_an_accelerator_is_not_held() -> None:
    cache = MediaCache(2**40)
    for _ in range(2):
        assert cache.share("key", lambda: torch.zeros(3, device="meta")).shape == (3,)
    assert (cache.num_hits, cache.num_misses, cache.num_bytes) == (0, 2, 0)


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


# --- over rounds, and with an engine ---


def media_of(template: Any, gigabytes: float = 1.0) -> RoundMedia:
    return RoundMedia(gigabytes, template, lambda own: [own])


def test_later_rounds_decode_and_process_nothing(
    template: Any, images: list[Path], calls: Counter[str]
) -> None:
    rows = group(row(as_path(images[0]))) + group(row(as_bytes(images[1])))
    expected = encode(template, rows)
    media = media_of(template)
    calls.clear()
    for made in (2, 0, 0):
        with media.in_training(template):
            assert_identical(expected, encode(template, rows))
        metrics = media.end_round()
        assert metrics.pop("media/gb") == media.cache.num_bytes / 1e9 > 0  # type: ignore[union-attr]
        reused = 2 * 2 * NUM_SAMPLES - 2 * made
        assert metrics == {
            "media/decoded": made,
            "media/processed": made,
            "media/reused": reused,
        }
    assert calls == {"decode": 2, "image": 2}
    assert media.end_round() == {}


@pytest.fixture
def fetch(template: Any) -> Iterator[Callable[[RoundMedia, list[Any]], None]]:
    """Prefetch rows to the last, and leave the template as it was."""
    before = dict(vars(template)), template.processor.image_processor, template.tokenizer

    def fetched(media: RoundMedia, rows: list[Any]) -> None:
        media.prefetch(template, lambda: rows)
        for thread in threading.enumerate():
            if thread.name == "media prefetch":
                thread.join()

    yield fetched
    after = dict(vars(template)), template.processor.image_processor, template.tokenizer
    assert all(one is other for one, other in zip(before[1:], after[1:], strict=True))
    assert before[0].keys() == after[0].keys()
    assert "preprocess" not in vars(template.processor.image_processor)


def test_what_was_prefetched_is_made_once_and_has_the_same_bits(
    template: Any, images: list[Path], calls: Counter[str], fetch: Any
) -> None:
    prompts = [row(as_path(images[0])), row(as_bytes(images[1]))]
    rows = [each for prompt in prompts for each in group(prompt)]
    expected, media = encode(template, rows), media_of(template)
    calls.clear()
    fetch(media, prompts)
    assert calls == {"decode": 2, "image": 2}
    with media.in_training(template):
        assert_identical(expected, encode(template, rows))
    assert calls == {"decode": 2, "image": 2}
    metrics = media.end_round()
    assert (metrics["media/decoded"], metrics["media/processed"]) == (2, 2)
    assert metrics["media/reused"] == 2 * 2 * NUM_SAMPLES
    fetch(media, prompts)  # held already
    assert media.end_round() == {}


def test_what_was_prefetched_counts_in_the_training_round_that_it_was_for(
    template: Any, images: list[Path], fetch: Any
) -> None:
    media = media_of(template)
    media._prefetch._tokenizer = template.tokenizer
    fetch(media, [row(as_path(images[0]))])
    assert media.end_round(training=False) == {}
    with media.in_training(template):
        template.encode(row(as_path(images[1])))
    evaluation = media.end_round(training=False)
    with media.in_training(template):
        template.encode(row(as_path(images[0])))
    training = media.end_round()
    counts = [(found["media/decoded"], found["media/reused"]) for found in (evaluation, training)]
    assert counts == [(1, 0), (1, 2)]


def test_a_row_that_cannot_be_prefetched_fails_where_it_is_needed(
    template: Any, images: list[Path], calls: Counter[str], fetch: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(images[1].read_bytes()[:2000])
    media = media_of(template)
    media._prefetch._tokenizer = template.tokenizer
    fetch(media, [row(as_path(broken)), row(as_path(images[0]))])
    assert calls == {"decode": 2, "image": 1}
    with media.in_training(template):
        with pytest.raises(OSError, match="truncated"):
            encode(template, [row(as_path(broken))])
        encode(template, [row(as_path(images[0]))])
    assert media.end_round()["media/decoded"] == 1

    def unreadable() -> Any:
        raise OSError("no such row")

    media.prefetch(template, unreadable)
    assert media.end_round() == {}


def test_prefetch_drives_out_nothing_of_its_own_round(
    template: Any, images: list[Path], calls: Counter[str], fetch: Any
) -> None:
    """The bound holds one of the images, or none of them."""
    one = media_of(template)
    with one.in_training(template):
        template.encode(row(as_path(images[0])))
    assert one.cache is not None
    rows = [row(as_path(images[0])), row(as_path(images[1])), row(as_path(images[2]))]
    for share in (1.5, 0.5, 0.0):
        calls.clear()
        media = media_of(template, share * one.cache.num_bytes / 1e9)
        media._prefetch._tokenizer = template.tokenizer  # copied in the tests before
        fetch(media, rows)
        assert calls["decode"] == (share > 0), share


def test_a_round_that_begins_ends_the_prefetch(
    template: Any, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the row at hand; the round waits for what it needs of it, and makes the rest."""
    began, may_go_on = threading.Event(), threading.Event()
    real, decoded = swift.template.base.load_image, []

    def slow(path: Any) -> Any:
        decoded.append((threading.current_thread().name, Path(path).name))
        if len(decoded) == 1:
            began.set()
            assert may_go_on.wait(10)
        return real(path)

    monkeypatch.setattr(swift.template.base, "load_image", slow)
    media, rows = media_of(template), [row(as_path(image)) for image in images]
    media._prefetch._tokenizer = template.tokenizer
    media.prefetch(template, lambda: rows)
    assert began.wait(10)
    with media.in_training(template):
        threading.Timer(0.05, may_go_on.set).start()
        for each in rows:
            template.encode(copy.deepcopy(each))
    assert media.end_round()["media/decoded"] == 3
    assert decoded == [
        ("media prefetch", "0.png"),
        ("MainThread", "1.png"),
        ("MainThread", "2.png"),
    ]


def test_a_file_that_changed_between_rounds_is_read_again(
    template: Any, images: list[Path]
) -> None:
    one, media = row(as_path(images[0])), media_of(template)
    with media.in_training(template):
        (before,) = encode(template, [one])
    Image.new("RGB", (120, 90), "red").save(images[0])
    with media.in_training(template):
        found = encode(template, [one])
    assert_identical(encode(template, [one]), found)
    assert not torch.equal(before["pixel_values"], found[0]["pixel_values"])


@pytest.mark.parametrize("gigabytes", [0.0, 100e3 / 1e9, 400e3 / 1e9])
def test_rounds_stay_within_the_bound(template: Any, images: list[Path], gigabytes: float) -> None:
    media = media_of(template, gigabytes)
    for number in range(6):
        one = row(*(as_path(images[i % 3]) for i in range(number, number + 2)))
        with media.in_training(template):
            assert_identical(encode(template, [one]), encode(template, [one]))
        media.end_round()
        held = media.cache.num_bytes if media.cache else 0
        assert held <= gigabytes * 1e9


def test_models_of_text_alone_keep_and_gather_nothing(template: Any) -> None:
    def gather(own: Any) -> Any:
        raise AssertionError("a gather")

    text = copy.copy(template)
    text.model_meta = SimpleNamespace(is_multimodal=False)
    media = RoundMedia(4.0, text, gather)
    assert media.cache is None
    assert media.end_round() == {}


def test_a_turn_with_one_more_image_processes_that_one(
    template: Any, images: list[Path], calls: Counter[str]
) -> None:
    turns = [row(*map(as_path, images[:count])) for count in (1, 2, 3)]
    expected = encode(template, turns)
    calls.clear()
    with shared_media(template):
        assert_identical(expected, encode(template, turns))
    assert calls == {"decode": 3, "image": 3}


@pytest.mark.parametrize("settings", [{}, {"do_resize": False}, {"do_normalize": False}])
def test_images_of_one_call_are_those_of_a_call_for_each(
    template: Any, processor: Any, images: list[Path], settings: dict[str, bool]
) -> None:
    """Equal sizes, which the processor resizes and normalizes as one tensor, and others."""
    pictures = [Image.open(path).convert("RGB").resize((112, 112)) for path in images]
    pictures.append(Image.open(images[0]).resize((84, 56)))
    call = functools.partial(processor.image_processor, pictures, return_tensors="pt", **settings)
    whole = call()
    with shared_media(template):
        each = call()
    assert_identical([dict(whole)], [dict(each)])
    assert type(whole) is type(each)


def test_processors_share_where_the_call_decides(
    template: Any, processor: Any, images: list[Path], calls: Counter[str]
) -> None:
    """vLLM loads a processor of its own, with the settings that a request brings."""
    other = copy.deepcopy(processor.image_processor)
    other.do_resize = False
    picture = Image.open(images[1]).resize((28, 28))  # fewer pixels than `size` asks for
    with shared_media(template) as cache, ExitStack() as stack:
        _hook_processor(SimpleNamespace(image_processor=other), cache, stack)
        for owner in (processor.image_processor, other):
            owner(images=[picture], return_tensors="pt", do_resize=False)
        assert calls["image"] == 1
        resized, whole = (
            owner(images=[picture], return_tensors="pt")["pixel_values"]
            for owner in (processor.image_processor, other)
        )
        assert calls["image"] == 2  # the other one's own setting is what the call said before
        other.image_mean = (0.0, 0.0, 0.0)
        other(images=[picture], return_tensors="pt", do_resize=False)
    assert calls["image"] == 3
    assert len(resized) > len(whole)


class RecordingEngine:
    """What the hooks meet of ms-swift's colocated engine and vLLM's."""

    def __init__(self, template: Any, processor: Any) -> None:
        self.template, self.prompts = template, []
        info = SimpleNamespace(get_hf_processor=lambda **_: processor)
        self.engine = self
        self.renderer = SimpleNamespace(mm_processor=SimpleNamespace(info=info))

    prompts: list[Any]

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        self.prompts.append(prompt)
        return request_id


def test_an_engine_is_told_what_images_it_gets(
    template: Any, processor: Any, images: list[Path], calls: Counter[str]
) -> None:
    """The same image in all forms has one name; vLLM's processor takes what training made."""
    if not _knows_vllm():
        pytest.skip("this vLLM has no place for it (pins.MEDIA)")
    engine, media = RecordingEngine(template, copy.deepcopy(processor)), media_of(template)
    forms = [as_path, as_dict, as_bytes, as_base64, as_data_url]
    with media.in_rollout(engine):
        for one in [row(form(path)) for path in images[:2] for form in forms]:
            (picture,) = template.encode(one, return_template_inputs=True)["template_inputs"].images
            prompt = {"prompt_token_ids": [1], "multi_modal_data": {"image": picture}}
            assert engine.add_request("name", prompt, None) == "name"
        info = engine.renderer.mm_processor.info
        info.get_hf_processor(do_resize=False).image_processor(
            images=[picture], return_tensors="pt", do_resize=False
        )
        draw(picture)
        engine.add_request("changed", {"multi_modal_data": {"image": picture}}, None)
        engine.add_request("text", {"prompt_token_ids": [1]}, None)
    assert calls == {"decode": 2, "image": 2}
    *named, changed, text = engine.prompts
    uuids = [prompt["multi_modal_uuids"]["image"] for prompt in named]
    assert uuids == [uuids[0]] * len(forms) + [uuids[-1]] * len(forms)
    assert uuids[0] != uuids[-1]
    assert "multi_modal_uuids" not in {**changed, **text}
    assert "add_request" not in vars(engine)
    engine.add_request("after", {"multi_modal_data": {"image": picture}}, None)
    assert "multi_modal_uuids" not in engine.prompts[-1]


@pytest.fixture
def unknown_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A release without one of the names that sharing with an engine is made of."""
    monkeypatch.setattr(pins, "MEDIA", (*pins.MEDIA, Pin("vllm", "no_such_name")))
    _knows_vllm.cache_clear()
    yield
    _knows_vllm.cache_clear()


@pytest.mark.usefixtures("unknown_vllm")
def test_an_engine_that_is_not_known_is_left_alone(
    template: Any, processor: Any, images: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine, media = RecordingEngine(template, processor), media_of(template)
    prompt = {"multi_modal_data": {"image": Image.open(images[0])}}
    get_logger().addHandler(caplog.handler)
    try:
        for _ in range(2):
            with media.in_rollout(engine):
                engine.add_request("name", prompt, None)
    finally:
        get_logger().removeHandler(caplog.handler)
    assert engine.prompts == [prompt] * 2
    told = [text for text in caplog.messages if "--media_cache_gb is for the training" in text]
    assert len(told) == 1


def test_what_changes_nothing_takes_no_room(shared: Callable[[], Image.Image]) -> None:
    image = shared()
    assert isinstance(image, SharedImage)
    for view in (image.convert("RGB"), image.resize(image.size), image.copy()):
        assert isinstance(view, SharedImage)
        assert view.content_key == image.content_key
        assert view.im is image.im
