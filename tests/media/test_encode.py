"""Media are decoded and processed once, and what the model sees stays bit for bit the same."""

from __future__ import annotations

import base64
import copy
import functools
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import qwen_vl_utils
import swift.template.base
import torch
import xxhash
from PIL import Image, ImageDraw
from swift.model import get_processor
from swift.template import get_template
from swift.template.template_inputs import StdTemplateInputs

from swift_grpo_ext.media import encode as media_encode
from swift_grpo_ext.media.encode import (
    MediaCache,
    MediaChangedError,
    SharedImage,
    content_key,
    source_key,
)
from swift_grpo_ext.ranks import RankGroup
from tests.ranks import WithOthers

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


def cache_of(
    num_bytes: int, *, is_multimodal: bool = True, ranks: RankGroup | None = None
) -> MediaCache:
    """A cache of so many bytes (with 0, what a training batch may hold)."""
    template: Any = SimpleNamespace(model_meta=SimpleNamespace(is_multimodal=is_multimodal))
    return MediaCache(num_bytes and (num_bytes + 0.5) / 1e9, template, ranks)


def row(*images: Any, answer: str = "7", **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": "<image>" * len(images) + "Which digit?"},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": messages, "images": list(images), **fields}


def group(one: dict[str, Any]) -> list[dict[str, Any]]:
    """Copies with answers of their own."""
    rows = [copy.deepcopy(one) for _ in range(NUM_SAMPLES)]
    for index, each in enumerate(rows):
        each["messages"][-1]["content"] += " " * index
    return rows


def encode(template: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [template.encode(copy.deepcopy(each), return_length=True) for each in rows]


def assert_identical(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert list(one) == list(other)
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.shape) == (other[key].dtype, other[key].shape)
                assert torch.equal(value, other[key])
            else:
                assert (type(value), value) == (type(other[key]), other[key])


def forms(path: Path) -> dict[str, Any]:
    """Return one image in the ways of rows, and of ms-swift on the way to an engine."""
    data = path.read_bytes()
    text = base64.b64encode(data).decode()
    return {
        "path": str(path),
        "path in a dictionary": {"path": str(path), "bytes": None},
        "bytes": {"path": None, "bytes": data},
        "base64": text,
        "data": f"data:image/png;base64,{text}",
        "pixels": Image.open(path).convert("RGB"),
    }


def test_what_differs_is_not_mixed(
    template: Any, processor: Any, images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other images, their order, settings of the row, and settings of the processor."""
    a, b = (forms(path) for path in images[:2])
    small = {"chat_template_kwargs": {"max_pixels": 28 * 28 * 4}}
    rows = [row(form) for each in (a, b) for form in each.values()]
    rows += [row(a["path"], b["path"]), row(b["path"], a["path"]), row(a["path"], **small), row()]
    alone = encode(template, rows * 2)
    some = encode(template, rows[:1] * 2 + rows[6:7])
    collated = template.data_collator(copy.deepcopy(some))
    with cache_of(10**9).in_training(template, joins_late=True):
        made = encode(template, rows * 2)
        assert_identical(made, alone)
        batch = template.data_collator([*made[:1], *made[16:17], *made[6:7]])
        assert [len(part) for part in batch["pixel_values"].distinct] == [48, 64]
        assert_identical([batch], [collated])
        monkeypatch.setattr(processor.image_processor, "image_mean", (0.0, 0.0, 0.0))
        changed = encode(template, rows)
    assert_identical(encode(template, rows), changed)
    assert not torch.equal(alone[0]["pixel_values"], changed[0]["pixel_values"])


def test_videos(template: Any, images: list[Path], calls: Counter[str]) -> None:
    one = row(videos=[[str(path) for path in images[:2]]])
    one["messages"][0]["content"] = "<video>What is it?"
    rows = group(one)
    expected = encode(template, rows)
    calls.clear()
    with cache_of(10**9).in_training(template):
        assert_identical(encode(template, rows), expected)
    assert calls == {"fetch_video": 1, "video": 1}


def load_frames(video: str, colors: list[str]) -> list[Image.Image]:
    """Frames of a video in the way of the loaders in `swift.template.vision_utils`."""
    return [Image.new("RGB", (30, 30), color) for color in colors]


def test_videos_that_become_images(template: Any) -> None:
    cache, first_frames = cache_of(10**9), []
    with cache.in_training(template):
        for video in ("a.mp4", "b.mp4") * 2:
            inputs = StdTemplateInputs(messages=[], videos=[video])
            load = functools.partial(load_frames, colors=["red", "blue"])
            assert template.replace_video2image(load, inputs, lambda i: [str(i)]) == ["0", "1"]
            first_frames.append(inputs.images[0])
            draw(inputs.images[1])
            assert inputs.images[1].getpixel((0, 0)) == (255, 0, 0)
    assert cache.counts == {"decoded": 2, "reused": 2}
    assert [frame.getpixel((0, 0)) for frame in first_frames] == [(255, 0, 0)] * 4


def test_threads_share_too(template: Any, images: list[Path], calls: Counter[str]) -> None:
    rows = group(row(str(images[0]), str(images[1]))) * 4
    expected = encode(template, rows)
    calls.clear()
    with cache_of(10**9).in_training(template), ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda one: encode(template, [one])[0], rows))
    assert_identical(made, expected)
    assert calls == {"decode": 2, "image": 1}


def test_a_failure_is_raised_in_all_samples_and_not_remembered(
    template: Any, images: list[Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(images[0].read_bytes()[:2000])
    with cache_of(10**9).in_training(template):
        for one in group(row(str(broken))):
            with pytest.raises(OSError, match="truncated"):
                encode(template, [one])
        broken.write_bytes(images[0].read_bytes())
        made = encode(template, [row(str(broken))])
    assert_identical(encode(template, [row(str(images[0]))]), made)


def hooks(template: Any) -> list[Any]:
    """Those of the attributes that are hooked that stand where they can be hooked."""
    processor = template.processor
    owners = [template, type(processor.image_processor), type(processor.video_processor)]
    names = ("_load_image", "replace_video2image", "data_collator", "preprocess")
    own = [vars(owner).get(name) for owner in owners for name in names]
    return [*filter(None, own), qwen_vl_utils.fetch_video]


def test_blocks_of_two_threads_may_cross(
    template: Any, images: list[Path], calls: Counter[str]
) -> None:
    """The one that ends first takes nothing from the other, and the last puts all back."""
    before, cache = hooks(template), cache_of(10**9)
    first, second = (cache.in_training(template) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    encode(template, group(row(str(images[0]))))
    assert calls == {"decode": 1, "image": 1}
    second.__exit__(None, None, None)
    assert hooks(template) == before


def test_everything_is_put_back(template: Any, images: list[Path]) -> None:
    """After nested blocks and errors; a copy that was made within works on."""
    before, one = hooks(template), row(str(images[0]))
    expected = encode(template, [one])

    def fail() -> None:
        with cache_of(0).in_training(template, joins_late=True):
            assert qwen_vl_utils.fetch_video is not before[-1]
            raise KeyError

    with cache_of(0).in_training(template):
        with pytest.raises(KeyError):
            fail()
        assert_identical(encode(template, [one]), expected)
        copied = copy.copy(template)
    assert hooks(template) == before
    assert_identical(encode(copied, [one]), expected)


# --- images that share their pixels ---


def draw(image: Image.Image) -> None:
    ImageDraw.Draw(image).rectangle((0, 0, 50, 50), fill="red")


def shrink(image: Image.Image) -> None:
    image.thumbnail((20, 20))
    draw(image)


@pytest.mark.parametrize(
    "change",
    [draw, shrink, lambda i: draw(i.resize((60, 60))), lambda i: i.info.update(dpi=1)],
)
def test_who_changes_an_image_changes_only_his(
    images: list[Path], change: Callable[[Image.Image], Any]
) -> None:
    """It has the content's name for as long as it has the content's pixels."""
    cache, original = cache_of(2**20), Image.open(images[0]).convert("RGB")
    mine, theirs = (cache.share("a", lambda: Image.open(images[0])) for _ in range(2))
    for view in (mine.convert("RGB"), mine.resize(mine.size), mine.copy()):  # take no room
        assert isinstance(view, SharedImage)
        assert view.content_key == mine.content_key is not None
        assert view.im is mine.im
    for make in (lambda i: i.resize((30, 30)), lambda i: i.convert("L")):  # are made once
        assert make(mine).im is make(theirs).im
    change(mine)
    assert theirs.info == {}
    assert theirs.tobytes() == original.tobytes()
    assert theirs.resize((60, 60)).tobytes() == original.resize((60, 60)).tobytes()
    assert theirs.convert("L").tobytes() == original.convert("L").tobytes()
    if change in (draw, shrink):
        change(original)
        assert mine.content_key is None
        assert mine.resize((9, 9)).tobytes() == original.resize((9, 9)).tobytes()
        assert mine.copy().tobytes() == original.tobytes()


# --- what is held ---


def test_a_write_to_a_shared_tensor_is_refused(template: Any, images: list[Path]) -> None:
    """At its next use; at the end of the block where there is none."""
    rows, text = [row(str(images[0]))], r"shape \(48, 1176\) .* written to in place"

    def write() -> None:
        with cache_of(0).in_training(template):
            encode(template, rows)[0]["pixel_values"].mul_(2)
            with pytest.raises(MediaChangedError, match=text):
                encode(template, rows)

    with pytest.raises(MediaChangedError, match=text):
        write()


def test_another_shape_of_a_shared_tensor_is_no_write() -> None:
    cache = cache_of(2**20)
    first, second = (cache.share("key", lambda: torch.ones(1, 5)) for _ in range(2))
    first.squeeze_(0)
    assert cache.share("key", lambda: None).shape == second.shape == (1, 5)
    second.mul_(2)
    with pytest.raises(MediaChangedError):
        cache.share("key", lambda: None)


def test_arrays_and_containers_are_each_callers_own() -> None:
    cache = cache_of(2**20)
    made = [cache.share("key", lambda: {"a": np.zeros(3), "b": [1, (2,)]}) for _ in range(3)]
    made[0]["a"] += 1
    made[0]["b"].append(3)
    made[1]["c"] = 4
    assert list(made[2]) == ["a", "b"]
    assert made[2]["a"].tolist() == [0, 0, 0]
    assert made[2]["b"] == [1, (2,)]


@pytest.mark.parametrize(
    ("max_gb", "kept_gb", "level"),
    [(4.0, 1.5, "info"), (2.0, 1.5, "warning"), (1.5, 1.5, ""), (1.0, 1.0, "")],
)
def test_what_is_free_bounds_it(
    max_gb: float, kept_gb: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 ranks in a container of 32 GB would else take all of it, 4 GB each."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(media_encode.logger, "info", lambda text: told.append(("info", text)))
    monkeypatch.setattr(media_encode.logger, "warning", lambda t: told.append(("warning", t)))
    monkeypatch.setattr(media_encode.memory, "free_bytes", lambda: 3 * 10**9)
    meta = SimpleNamespace(is_multimodal=True)
    cache = MediaCache(max_gb, cast("Any", SimpleNamespace(model_meta=meta)))
    for excess in (1, 0):  # torch takes memory that nothing touches from nobody
        cache.share(
            f"{excess}", lambda n=excess: torch.empty(int(kept_gb * 1e9) + n, dtype=torch.uint8)
        )
        assert cache.num_bytes == (0 if excess else kept_gb * 1e9)
    assert [how for how, _ in told] == ([level] if level else [])
    for _, text in told:
        assert text.startswith(
            f"--media_cache_gb {max_gb:g}: each process keeps media up to 1.5 GB"
        )


def test_what_was_not_used_for_longest_goes_first() -> None:
    cache, made = cache_of(30), []

    def ask(name: str, size: int = 10) -> None:
        def make() -> torch.Tensor:
            made.append(name)
            return torch.zeros(size, dtype=torch.uint8)

        cache.share(name, make)
        assert 0 <= cache.num_bytes <= 30

    for name in "abcadab":
        ask(name)
    ask("large", 31)  # drives nothing out
    for name in "abd":
        ask(name)
    assert made == [*"abcdb", "large"]


@pytest.mark.parametrize(
    ("make", "num_bytes"),
    [
        (lambda: Image.new("RGB", (2, 3)), 4 * 2 * 3),
        (lambda: [torch.zeros(10)[:2], {"a": np.zeros(3)}], 40 + 24),
        (lambda: torch.zeros(3, device="meta"), 0),  # as an accelerator's: not ours to hold
    ],
)
def test_the_size_of_what_is_held(make: Callable[[], Any], num_bytes: int) -> None:
    cache = cache_of(2**40)
    for _ in range(2):
        cache.share("key", make, "decoded")
    assert cache.num_bytes == num_bytes
    assert cache.counts["decoded"] == (1 if num_bytes else 2)


CONTENTS: list[Callable[[], Any]] = [
    lambda: torch.zeros(2, 3),
    lambda: torch.zeros(3, 2),
    lambda: torch.ones(2, 3),
    lambda: torch.zeros(2),
    lambda: torch.zeros(2, dtype=torch.int32),
    lambda: np.zeros(2),
    lambda: Image.new("L", (2, 2)),
    lambda: Image.new("L", (4, 1)),
    functools.partial(functools.partial, load_frames, colors=["red"]),
    functools.partial(functools.partial, load_frames, colors=["blue"]),
]
"""Values that differ, made anew by each call."""


def test_contents_have_names_of_their_own() -> None:
    names = [content_key(make()) for make in CONTENTS]
    assert None not in names
    assert len(set(names)) == len(CONTENTS)
    assert [content_key(make()) for make in CONTENTS] == names
    same = ["".join(["a", "b"]) for _ in range(2)]
    assert content_key([same[0], same[0]]) == content_key(same)


@pytest.mark.parametrize("part", [lambda: 1, torch.zeros(2, device="meta")])
def test_content_without_a_name_is_not_shared(part: Any) -> None:
    cache = cache_of(2**20)
    made = [cache.share([part], lambda: torch.zeros(1), "decoded") for _ in range(2)]
    assert made[0].data_ptr() != made[1].data_ptr()
    assert (cache.counts, cache.num_bytes) == ({"decoded": 2}, 0)


def test_media_are_named_by_content_or_for_a_round(images: list[Path]) -> None:
    data = images[0].read_bytes()
    given = [data, {"bytes": data, "path": "elsewhere.png"}]
    given += [forms(images[0])[form] for form in ("bytes", "base64", "data")]
    name = xxhash.xxh3_128_digest(data)
    assert [source_key(source, round_) for round_ in (0, 1) for source in given] == [name] * 10
    for source in ("https://host/a.png", "missing.png", "a" * 2001 + "!", "a" * 5001):
        assert source_key(source, 1) == (source, 1)


def test_a_file_has_one_name_until_it_changes(
    images: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = images[0]
    texts = [f" {path} ", f"file://{path}", {"path": str(path), "bytes": None}]
    name = source_key(str(path), 0)
    assert [source_key(text, 1) for text in texts] == [name] * 3
    assert source_key(path.name, 1) == (path.name, 1)
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(path.parent))
    assert source_key(path.name, 1) == name
    monkeypatch.delenv("ROOT_IMAGE_DIR")
    monkeypatch.setenv("HOME", str(path.parent))
    assert source_key(f"~/{path.name}", 1) == name
    state = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # the same size and time
    assert source_key(str(path), 1) != name
    frames = ([str(path), "b.mp4"], {"video": "c.mp4", "fps": 2.0})
    named = source_key(frames, 7)
    assert named == [[source_key(str(path), 7), ("b.mp4", 7)], {"video": ("c.mp4", 7), "fps": 2.0}]


# --- over rounds, and with an engine ---


def test_later_rounds_decode_and_process_nothing(
    template: Any, images: list[Path], calls: Counter[str]
) -> None:
    rows = group(row(str(images[0]))) + group(row(forms(images[1])["bytes"]))
    expected, cache = encode(template, rows), cache_of(10**9)
    calls.clear()
    for made in (2, 0, 0):
        with cache.in_training(template):
            assert_identical(encode(template, rows), expected)
        metrics = cache.end_round()
        assert metrics.pop("media/gb") == cache.num_bytes / 1e9 > 0
        reused = 2 * 2 * NUM_SAMPLES - 2 * made
        assert metrics == {"media/decoded": made, "media/processed": made, "media/reused": reused}
    assert calls == {"decode": 2, "image": 2}
    assert cache.end_round() == {}
    others = WithOthers((Counter({"decoded": 2, "processed": 1, "reused": 5}), 0.5))
    cache = cache_of(10**9, ranks=others)
    cache.share("key", lambda: 1, "decoded")
    expected_metrics = {"decoded": 3, "processed": 1, "reused": 5, "gb": 0.5}
    assert cache.end_round() == {f"media/{name}": n for name, n in expected_metrics.items()}


@pytest.mark.parametrize(("num_bytes", "is_multimodal"), [(0, True), (10**9, False)])
def test_nothing_is_kept_where_nothing_may_be(
    template: Any, images: list[Path], num_bytes: int, is_multimodal: bool
) -> None:
    """With a bound of 0, and for models of text alone, whose ranks gather nothing either."""
    ranks: Any = SimpleNamespace(all_gather=lambda _: pytest.fail("a gather"))
    cache = cache_of(num_bytes, is_multimodal=is_multimodal, ranks=ranks)
    with cache.in_training(template):
        encode(template, group(row(str(images[0]))))
        assert cache.num_bytes > 0
    assert (cache.num_bytes, cache.end_round()) == (0, {})
    engine: Any = SimpleNamespace(template=template)
    with cache.in_rollout(engine):
        assert "_load_image" not in vars(template)


def test_an_engine_and_its_processor_share_with_the_training(
    template: Any, processor: Any, images: list[Path], calls: Counter[str]
) -> None:
    """What a call says counts, and a processor's own setting where it says nothing."""
    cache, engine = cache_of(10**9), SimpleNamespace(template=copy.copy(template))
    engines_own = copy.deepcopy(processor.image_processor)
    engines_own.do_resize = False
    picture = Image.open(images[1]).resize((28, 28))  # fewer pixels than `size` asks for

    def process(each: Any, **options: Any) -> int:
        return len(each(images=[picture], return_tensors="pt", **options)["pixel_values"])

    with cache.in_training(template):
        template.encode(row(forms(images[0])["base64"]))
        process(processor.image_processor, do_resize=False)
    assert calls == {"decode": 1, "image": 2}
    with cache.in_rollout(engine):  # type: ignore[arg-type]
        engine.template.encode(row(forms(images[0])["data"]))
        process(engines_own, do_resize=False)
        assert calls == {"decode": 1, "image": 2}
        assert process(engines_own) < process(processor.image_processor)
        assert calls["image"] == 3  # the engine's own setting is what the call said before
        engines_own.image_mean = (0.0, 0.0, 0.0)
        process(engines_own, do_resize=False)
    assert calls["image"] == 4
