"""The early checks, `check` and `--truncation_strategy delete` agree on each form of media in a
row, good or bad (M1). `tests/stack/test_rows.py` has real rounds, and rows of the usual forms."""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from swift.dataset import load_dataset

from swift_grpo_ext.checks.rows import row_fault
from swift_grpo_ext.upstream.rows import read_row
from tests.rig.encoders import BothSides
from tests.rig.releases import IS_BEFORE_0_28
from tests.rig.rounds import write_lines, write_video

Row = dict[str, Any]
Cases = dict[str, tuple[list[Row], Any]]
"""By name: rows, and what is expected of them."""

Faults = dict[str, tuple[Row, str]]
"""By name: a row, and a part of its fault."""

TOKENS = 500
"""The engine's limit for a prompt and its completion."""

PAD = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def folder(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good files, and with bad ones of each kind."""
    folder = tmp_path_factory.mktemp("media")
    digits = sorted((assets / "digits").rglob("*.png"))[:4]
    image = Image.open(digits[0]).convert("RGB")
    for name in ("1.png", "1.jpg"):
        image.save(folder / name)
    (folder / "text.png").write_text("no image")
    (folder / "cut.jpg").write_bytes((folder / "1.jpg").read_bytes()[:-200])
    Image.new("L", (28, 28)).save(folder / "tiny.png")  # its base64 is as short as a name
    Image.new("RGB", (20_000, 28)).save(folder / "wide.png")
    Image.new("RGB", (700, 700)).save(folder / "large.png")
    Image.new("1", (20_000, 10_000)).save(folder / "huge.png")  # 200 million pixels in 25 kB
    write_video(list(map(str, digits)), folder / "1.mp4")
    (folder / "text.mp4").write_text("no video")
    return folder


@pytest.fixture(scope="module")
def encoder(assets: Path) -> BothSides:
    names = {"model_type": "qwen2_5_vl", "template": "qwen2_5_vl"}
    lengths = {"max_length": 800, "vllm_max_model_len": TOKENS, "truncation_strategy": "delete"}
    return BothSides(model=str(assets / "tiny_vlm"), **names, **lengths)


def asks(content: Any = "<image>Which?", **columns: Any) -> Row:
    return {"messages": [{"role": "user", "content": content}], **columns}


def shows(*images: Any) -> Row:
    return asks(images=[*images])


def part(kind: str, value: Any) -> Row:
    return {"type": kind, kind: value}


def parts(*values: Row, **columns: Any) -> Row:
    return asks([*values, {"type": "text", "text": "Which?"}], **columns)


def base64_of(path: str) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


def good(folder: Path) -> Cases:
    """Return good rows, with the number of media of each."""
    png, mp4 = str(folder / "1.png"), str(folder / "1.mp4")
    shown, of_url = part("image", png), part("image_url", {"url": png})
    return {
        "another name": ([asks(image=png)], [1]),
        "more images than marks": ([asks("Which?", images=[png, png])], [2]),
        "spaces around": ([shows(f" {png} ")], [1]),
        "short base64": ([shows(base64_of(str(folder / "tiny.png")))], [1]),
        "img": ([asks(f"<img>{png}</img>Which?")], [1]),
        "img beside a video": ([asks(f"<video><img>{png}</img>?", videos=[mp4])], [2]),
        "query": ([{"query": "<image>Which?", "images": [png], "response": "7"}], [1]),
        "part of a URL": ([parts(of_url)], [1]),
        "part for a column": ([parts({"type": "image"}, images=[png])], [1]),
        "null": ([asks("Which?", images=None), asks(images=[png])], [0, 1]),
        "one and many": ([asks(images=png), asks(images=[png])], [1, 1]),
        "video of a file URL": ([asks("<video>What?", videos=[f"file://{mp4}"])], [1]),
        "frames in a part": ([parts(part("video", [png] * 4))], [1]),
        "HTML": ([asks("What is the tag <video>?", images=None)], [0]),
        "RSS beside a part": ([parts(shown, {"type": "text", "text": "<image>?"})], [1]),
        "SVG beside a video": ([asks("<video>What are <video> and <video>?", videos=[mp4])], [1]),
        "null, said to a teacher": ([asks("?", images=None, teacher_prompt="<image>?")], [0]),
        "a teacher's images": ([asks(images=[png], teacher_images=[png, png])], [1]),
    }


def bad(folder: Path) -> Faults:
    """Return rows that are refused before a model is loaded, and the reason."""
    png, text = (str(folder / name) for name in ("1.png", "text.png"))
    shown, first, files = part("image", png), "messages[0].content[0]", str(folder)
    of_text = f"data:image/png;base64,{base64_of(text)}"
    system = {"messages": [{"role": "system", "content": [{"type": "text", "text": "S"}]}]}
    both = "images: holds 1, and `content` has parts of type image that hold 1; expected"
    is_missing, no_image = "'none.png' does not exist", "is not an image that can be read"
    holds = "messages[0].content: holds '<|image_pad|>'"
    return {
        "null": (shows(png, None), "images[1]: is null; expected a path"),
        "list in a part": (parts(part("image", [png])), f"{first}: is ['{png}']; expected a path"),
        "long name": (shows("a" * 255), "does not exist"),
        "longer name": (shows("a" * 256), no_image),  # without a dot: base64
        "missing video": (asks("<video>", videos=["none.mp4"]), "'none.mp4' does not exist"),
        "missing frame": (parts(part("video", [png, "none.png"])), f"{first}: {is_missing}"),
        "missing for a teacher": (
            asks(images=[png], teacher_images=[png, "none.png"]),
            f"teacher_images[1]: {is_missing}",
        ),
        "folder of frames": (asks("<video>", videos=[files]), f"videos[0]: '{files}' is not a"),
        "data URL of no image": (shows(of_text), "cannot identify image file"),
        "huge": (shows(str(folder / "huge.png")), "DecompressionBombError"),
        "another kind": (parts(part("picture", png)), f"{first}: has the type 'picture'; expect"),
        "parts and column": (parts(shown, images=[png]), both),
        "system in parts": (system, "messages[0].content: is a list of parts; expected text"),
        "TRL": (
            {"prompt": asks()["messages"], "images": [png]},
            "holds messages; expected them in the column `messages`: rename it",
        ),
        "frames": (asks("<video>", videos=[[png, png]]), "expected a path or URL, or a part {"),
        "placeholder for a teacher": (
            asks(images=[png], teacher_prompt=f"<image>{PAD}"),
            f"the teacher's view: {holds}, which is the model's own",
        ),
    }


def met(folder: Path) -> Faults:
    """Return rows with a fault that shows when they are encoded, and the fault."""
    cut, wide = (str(folder / name) for name in ("cut.jpg", "wide.png"))
    truncated = f"'{cut}' is not an image that can be read (OSError: image file is truncated"
    words = "one more word " * 300
    too_many = f"expected fewer than the {TOKENS} that the engine takes"
    return {
        "cut": (shows(cut), f"images[0]: {truncated}"),
        "cut base64": (shows(base64_of(cut)), "images[0]: '/9j/"),
        "wide": (shows(wide), f"got 714.2857142857143; it shows images[0] '{wide}'"),
        "no video": (asks("<video>", videos=[str(folder / "text.mp4")]), "it shows videos[0] '"),
        "large": (shows(str(folder / "large.png")), too_many),
        "too long": (asks(words), "MaxLengthError: Current length of row("),
    }


def loaded(cases: Cases, folder: Path) -> Iterator[tuple[str, list[Row], Any]]:
    """Yield the rows of each case as ms-swift loads them, with the case's name and what is expected
    of it. Cases with equal columns and types are one file, since each file takes half a second."""
    files = defaultdict[str, list[str]](list)
    for name, (rows, _) in cases.items():
        try:
            files[str(pa.Table.from_pylist(rows).schema)].append(name)
        except pa.ArrowException:  # rows of several types
            files[name].append(name)
    for number, names in enumerate(files.values()):
        rows = [row for name in names for row in cases[name][0]]
        data, _ = load_dataset(
            [str(write_lines(folder / f"{number}.jsonl", rows))], remove_unused_columns=False
        )
        assert len(data) == len(rows)
        left = iter(data)
        for name in names:
            yield name, [next(left) for _ in cases[name][0]], cases[name][1]


def test_forms_that_are_read(
    encoder: BothSides, folder: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    for name, rows, counts in loaded(good(folder), tmp_path):
        with subtests.test(name):
            for row, count in zip(rows, counts, strict=True):
                media = read_row(row).media
                assert len(media) == count
                assert row_fault(row, encoder.placeholder_texts) is None
                assert encoder.refusal(row) is None
                prompt, fault = encoder.encode(row)
                assert prompt.num_media == count
                has_video = any(medium.kind == "video" for medium in media)
                assert bool(fault) == (IS_BEFORE_0_28 and has_video), fault


def test_faults(
    encoder: BothSides, folder: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Faults that headers show are found before a model is loaded, others once a row is met."""
    early, late = bad(folder), met(folder)
    cases: Cases = {name: ([row], fault) for name, (row, fault) in (early | late).items()}
    for name, [row], expected in loaded(cases, tmp_path):
        with subtests.test(name):
            found, refusal = row_fault(row, encoder.placeholder_texts), encoder.refusal(row)
            assert expected in str(refusal)
            assert found == (refusal if name in early else None)
