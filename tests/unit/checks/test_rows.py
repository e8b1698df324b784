"""A row whose images cannot be read, whose prompt cannot be encoded, or that ms-swift leaves out,
is named with its field and fault (M1, G4). The early checks, `check` and `--truncation_strategy
delete` agree on each form of media; `tests/stack/test_rows.py` has the usual forms."""

import base64
import io
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image
from swift.dataset import load_dataset
from swift.model import get_processor
from swift.template import get_template

from swift_grpo_ext.checks import rows as checked
from swift_grpo_ext.checks.finding import Finding, collected
from swift_grpo_ext.checks.left_out import left_out_rows_named
from swift_grpo_ext.checks.rows import (
    check_rows,
    encoding_error,
    name_of,
    place_of,
    row_fault,
    unreadable,
)
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.upstream.placeholders import placeholder_texts
from swift_grpo_ext.upstream.rows import read_row
from tests.rig import checks
from tests.rig.encoders import BothSides
from tests.rig.releases import IS_BEFORE_0_28
from tests.rig.rounds import write_lines, write_video

Row = dict[str, Any]

PICTURE = "https://example.com/7.png"
DATA_URL = "data:image/png;base64," + "A" * 300


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "数字 七.png"
    Image.new("RGB", (28, 28)).save(path)
    return path


@pytest.fixture(scope="module")
def template(assets: Path) -> Any:
    processor = get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")
    return get_template(processor, template_type="qwen2_5_vl", max_length=100)


def asks(content: Any = "<image>Which?", **columns: Any) -> Row:
    return {"messages": [{"role": "user", "content": content}], **columns}


ANSWER = {"role": "assistant", "content": "7"}


def said(data: Any, **options: Any) -> list[str]:
    return checks.said(check_rows(data, **{"setting": "dataset", "expects_media": True, **options}))


def test_images_of_a_row(png: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(png.parent))
    for image in (png.name, png.read_bytes(), Image.new("RGB", (1, 1)), PICTURE):
        assert unreadable(image) is None
    fault = row_fault({"images": [PICTURE, DATA_URL]})
    assert str(fault).startswith(f"images[1]: '{DATA_URL[:60]}'... (322 character")


def test_a_mark_that_is_a_token_of_the_model(template: Any) -> None:
    """LLaVA's `<image>` is one: a surplus one cannot stay text."""
    rows = [asks("<image>Which?", images=[PICTURE]), asks("What is <image>?")]
    known = placeholder_texts(template)
    assert "<|image_pad|>" in known
    assert "<image>" not in known
    assert row_fault(rows[1], known) is None
    template = deepcopy(template)
    template.tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert placeholder_texts(template) == sorted([*known, "<image>"])
    [refused] = said(rows, placeholders=placeholder_texts(template))
    expected = "messages: 1 <image> marks stand for 0 images; expected equal numbers"
    assert f"'What is <image>?': {expected}" in refused


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_row_is_named_by_its_number_in_its_file(suffix: str, tmp_path: Path) -> None:
    """All rows ask the same, and ms-swift shuffles them."""
    question = "<image>How many, 多少?"
    pairs = [("a.png", "3"), ("b.png", "7"), ("c.png", "3"), ("b.png", "8"), ("d.png", "4")]
    path = tmp_path / f"rows.{suffix}"
    rows = pd.DataFrame([{"query": question, "images": i, "solution": s} for i, s in pairs])
    if suffix == "csv":
        rows.to_csv(path, index=False)
    else:
        rows.to_json(path, orient="records", lines=suffix == "jsonl")
    shuffled, _ = load_dataset([str(path)], shuffle=True, remove_unused_columns=False)
    assert sorted(map(place_of, shuffled)) == [f"row {n + 1} of {path}" for n in range(len(rows))]
    shown = name_of(next(row for row in shuffled if str(row["solution"]) == "8"))
    assert shown == f"row 4 of {path} (which asks {question!r})"
    sample = RolloutSample.from_row(next(row for row in shuffled if str(row["solution"]) == "7"))
    assert place_of(sample) == f"row 2 of {path}"
    sample.images = ["none.png"]
    assert name_of(sample).startswith("the row that asks ")
    path.unlink()
    assert place_of(shuffled[0]) == ""


def test_a_prompt_that_cannot_be_encoded(template: Any, png: Path) -> None:
    """A row's own answer counts in distillation only. A teacher's view is encoded too."""
    question = asks("Which?")["messages"]
    answered = {"messages": [*question, {**ANSWER, "content": "7 " * 50}]}
    assert encoding_error(template, answered) is None
    assert len(answered["messages"]) == 2
    template.set_mode("train")
    whole = encoding_error(template, answered, strip_response=False)
    assert str(whole).startswith("MaxLengthError: ")
    short = {"messages": [*question, ANSWER]}
    assert encoding_error(template, short, 10, strip_response=False) is None  # no engine draws
    assert encoding_error(template, {"messages": []}) == "it has no messages"
    (cut := png.with_name("cut.png")).write_bytes(png.read_bytes()[:-40])
    content = [{"bytes": cut.read_bytes(), "path": None}]  # as Parquet has them
    for columns, fault in (
        ({"teacher_prompt": "a b " * 100}, "MaxLengthError: "),
        ({"teacher_images": [str(png), str(cut)]}, f"teacher_images[1]: '{cut}' is not an image"),
        ({"images": content}, "images[0]: <"),
    ):
        row = asks("Which?", **{"images": [str(png)], **columns})
        assert str(encoding_error(template, row)).startswith(fault)


# --- data sets ---


def test_a_bad_row_is_named(png: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("text")
    row = asks("<image><image>哪个数字?" + 99 * "x")
    row["messages"].insert(0, {"role": "system", "content": "Look."})
    good, bad = {"path": str(png)}, {"path": str(tmp_path / "bad.png")}
    data = [{**row, "images": images} for images in ([good] * 2, [good, bad], [good, bad])]
    question = r"the row that asks '<image><image>哪个数字\?x{41}'"
    named = rf"{question}: images\[1\]: '.*bad\.png' is not an image"
    [refused] = said(data)
    assert re.match(rf"error: --dataset: {named}.*\. Correct.*strategy delete", refused)
    warned, _ = said(data, deletes_bad_rows=True)
    assert re.match(f"warning: --dataset: 2 of 3 rows .* The first: {named}", warned)


def test_marks_without_media() -> None:
    """ms-swift leaves them as text: with a misspelt column a row is trained on without its
    image."""
    asked = asks("<image>Which digit?")
    fine = {**asked, "images": [PICTURE]}
    warned, _ = said([fine, {**asked, "image_path": PICTURE}, asked])
    assert warned.startswith(
        "warning: --dataset: 2 of 3 rows have marks without media, which stay text. The first: the "
        "row that asks '<image>Which digit?': messages: 1 <image> marks stand for 0 images."
    )
    assert said([fine, asks("What is the tag <video>?")]) == []


def test_rows_of_large_data_sets_are_chosen_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 50th row lacks its image here: a stride of 50 would see no other rows."""
    opened: list[str] = []
    monkeypatch.setattr(checked, "MAX_ROWS", 20)
    monkeypatch.setattr(checked, "unreadable", lambda image, **_: opened.append(image))
    data = [{"images": [] if i % 50 == 0 else [f"{i:03}.png"]} for i in range(1000)]
    assert said(data) == []
    first, opened[:] = list(opened), []
    assert said(data) == []
    assert opened == first
    assert len(set(first)) == len(first)
    assert 15 <= len(first) <= 20
    assert len({int(name[:3]) % 50 for name in first}) > 10
    opened.clear()
    assert said(data[:20]) == []
    assert opened == [f"{i:03}.png" for i in range(1, 20)]


def test_content_in_rows_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit each rank read 42 GB of 20,000 rows of 1 MB."""
    rows = []
    for color in ("red", "red", "blue", "blue"):
        Image.new("RGB", (200, 200), color).save(content := io.BytesIO(), "bmp")
        rows.append(asks("<image>Which?", images=[{"bytes": content.getvalue(), "path": None}]))
    for limit, expected in ((2**31, "2 of 4 rows"), (2 * 120_000, "1 of 2 rows")):
        monkeypatch.setattr(checked, "MAX_CONTENT", limit)
        [warned] = said(rows)
        assert warned.startswith(f"warning: --dataset: {expected} repeat an earlier row's prompt")


# --- rows that ms-swift leaves out ---

BOXES = {"ref": ["a"], "bbox": [[1, 2, 3, 4]]}
HALF = [asks("Which?", objects=objects) for objects in (BOXES, {}) * 3]
SOME = "warning: Data set {0}: ms-swift leaves out "
EMPTY = "KeyError: 'bbox' (objects: {{}}; expected {{"


def test_rows_that_a_training_leaves_out(tmp_path: Path) -> None:
    cases: list[tuple[Any, ...]] = [
        ([asks("?"), asks("?", objects=None), asks("?", objects=BOXES)], {}, None),
        (HALF, {"num_proc": 2}, SOME + "3 of 6 rows; the first is row 2 of {0}..." + EMPTY),
        (HALF[1::2], {}, "error: Data set {0}: no row is left of 3; ...--columns renames columns."),
        ([HALF[0], asks(None)], {}, SOME + "...: AssertionError: message: {{'role': 'user', 'cont"),
        ([HALF[0], {"messages": []}], {}, SOME + "...: MessagesPreprocessor returns no row for it"),
    ]
    for number, (rows, options, expected) in enumerate(cases):
        path = write_lines(tmp_path / f"{number}.jsonl", rows)
        found: list[Finding] = []
        with collected(found.append), left_out_rows_named(), suppress(ZeroDivisionError):
            load_dataset([str(path)], remove_unused_columns=False, shuffle=True, **options)
        checks.assert_says(found, expected and expected.format(path))
        assert "(objects" not in "".join(checks.said(found)) or "objects" in rows[-1]


# --- forms of media ---

Cases = dict[str, tuple[list[Row], Any]]
"""Each name has rows, and what the test expects of them."""

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
