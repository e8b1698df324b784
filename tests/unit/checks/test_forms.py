"""Forms of media in rows, good and bad ones: the early checks, `check`, `--truncation_strategy
delete` and a round agree on each row that ms-swift loads."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from PIL import Image
from swift.dataset import load_dataset
from swift.rl_core.data import GRPOSample

from swift_grpo_ext.checks.rows import RowError, prompt_of, question_of, row_fault
from swift_grpo_ext.training.prompts import named_request
from swift_grpo_ext.upstream.rows import read_row
from tests.rig.encoders import BothSides
from tests.rig.releases import IS_BEFORE_0_28
from tests.rig.rounds import write_video

Rows = list[dict[str, Any]]

TOKENS = 500
"""The engine's limit for a prompt and its completion."""


@pytest.fixture(scope="module")
def folder(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good files, and with bad ones of each kind."""
    folder = tmp_path_factory.mktemp("media")
    digits = sorted((assets / "digits").rglob("*.png"))[:4]
    image = Image.open(digits[0]).convert("RGB")
    image.save(folder / "1.png")
    image.save(folder / "1.jpg")
    (folder / "text.png").write_text("no image")
    (folder / "cut.jpg").write_bytes((folder / "1.jpg").read_bytes()[:-200])
    Image.new("RGB", (20_000, 28)).save(folder / "wide.png")
    Image.new("RGB", (700, 700)).save(folder / "large.png")
    Image.new("1", (20_000, 10_000)).save(folder / "huge.png")  # 200 million pixels in 25 kB
    write_video(list(map(str, digits)), folder / "1.mp4")
    (folder / "text.mp4").write_text("no video")
    image.save(folder / "1.pdf")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """The address of a server of these files."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    with server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWIFT_ALLOW_INTERNAL_URL", "1")  # for servers' checks, if a test made them
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def encoder(assets: Path) -> BothSides:
    names = {"model_type": "qwen2_5_vl", "template": "qwen2_5_vl"}
    lengths = {"max_length": 800, "vllm_max_model_len": TOKENS, "truncation_strategy": "delete"}
    return BothSides(model=str(assets / "tiny_vlm"), **names, **lengths)


def asks(text: str = "<image>Which?", **columns: Any) -> Rows:
    return [{"messages": [{"role": "user", "content": text}], **columns}]


def parts(*values: Any, **columns: Any) -> Rows:
    content = [*values, {"type": "text", "text": "Which?"}]
    return [{"messages": [{"role": "user", "content": content}], **columns}]


def content_of(path: str) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


def good(folder: Path, url: str) -> dict[str, tuple[Rows, list[int]]]:
    """Return good rows, with the number of media of each."""
    png, mp4 = str(folder / "1.png"), str(folder / "1.mp4")
    content = content_of(png)
    part, of_url = {"type": "image", "image": png}, {"type": "image_url", "image_url": {"url": png}}
    return {
        "text alone": (asks("Which?"), [0]),
        "paths": (asks(images=[png]), [1]),
        "one path": (asks(images=png), [1]),
        "path in a dictionary": (asks(images=[{"path": png}]), [1]),
        "one dictionary": (asks(images={"path": png}), [1]),
        "another name": (asks(image=png), [1]),
        "more images than marks": (asks("Which?", images=[png, png]), [2]),
        "data URL": (asks(images=[f"data:image/png;base64,{content}"]), [1]),
        "base64": (asks(images=[content]), [1]),
        "URL": (asks(images=[f"{url}/1.png"]), [1]),
        "file URL": (asks(images=[f"file://{png}"]), [1]),
        "file URL in a part": (parts({"type": "image", "image": f"file://{png}"}), [1]),
        "spaces around": (asks(images=[f" {png} "]), [1]),
        "img": (asks(f"<img>{png}</img>Which?"), [1]),
        "img beside a video": (asks(f"<video><img>{png}</img>?", videos=[mp4]), [2]),
        "query": ([{"query": "<image>Which?", "images": [png], "response": "7"}], [1]),
        "part": (parts(part), [1]),
        "part of a URL": (parts(of_url), [1]),
        "two parts": (parts(part, of_url), [2]),
        "part for a column": (parts({"type": "image"}, images=[png]), [1]),
        "part of base64": (parts({"type": "image", "image": content}), [1]),
        "null": (asks("Which?", images=None) + asks(images=[png]), [0, 1]),
        "empty": (asks("Which?", images=[]) + asks(images=[png]), [0, 1]),
        "missing": (asks("Which?") + asks(images=[png]), [0, 1]),
        "one and many": (asks(images=png) + asks(images=[png]), [1, 1]),
        "columns and parts": (asks(images=[png]) + parts(part), [1, 1]),
        "video": (asks("<video>What?", videos=[mp4]), [1]),
        "one video": (asks("<video>What?", videos=mp4), [1]),
        "video of a file URL": (asks("<video>What?", videos=[f"file://{mp4}"]), [1]),
        "part that is a video": (parts({"type": "video", "video": mp4}), [1]),
        "frames in a part": (parts({"type": "video", "video": [png] * 4}), [1]),
        "videos beside images": (asks("<video>?", videos=[mp4]) + asks(images=[png]), [1, 1]),
        "both": (asks("<image><video>?", videos=[mp4], images=[png]), [2]),
        "HTML": (asks("What is the tag <video>?", images=None), [0]),
        "RSS": (asks("What is the tag <image>?", images=None), [0]),
        "RSS without a column": (asks("What is the tag <image>?"), [0]),
        "RSS beside an image": (asks("<image>What is the tag <image>?", images=[png]), [1]),
        "RSS beside a part": (parts(part, {"type": "text", "text": "<image>?"}), [1]),
        "SVG beside a video": (asks("<video>What are <video> and <video>?", videos=[mp4]), [1]),
        "part for nothing": (parts({"type": "image"}), [0]),
        "null, said to a teacher": (asks("?", images=None, teacher_prompt="<image>?"), [0]),
        "a teacher's images": (asks(images=[png], teacher_images=[png, png]), [1]),
        "none for a teacher": (asks(images=[png], teacher_images=[]), [1]),
    }


def bad(folder: Path) -> dict[str, tuple[Rows, str]]:
    """Return rows whose first one is refused before a model is loaded, and the reason."""
    png, mp4, text, pdf = (str(folder / name) for name in ("1.png", "1.mp4", "text.png", "1.pdf"))
    part, pad = {"type": "image", "image": png}, "<|vision_start|><|image_pad|><|vision_end|>"
    content = content_of(text)
    trl = [{"prompt": asks()[0]["messages"], "images": [png]}]
    wrong = "cannot identify image file"
    return {
        "null in a list": (asks(images=[png, None]), "images[1]: is null; expected a path"),
        "null alone": (asks(images=[None]), "images[0]: is null; expected a path"),
        "no name": (asks(images=""), "images[0]: is ''; expected a path"),
        "numbers": (asks(images=[7]), "images[0]: is 7; expected a path, URL"),
        "nested": (asks(images=[[png]]), f"images[0]: is ['{png}']; expected a path, URL"),
        "list in a part": (
            parts({"type": "image", "image": [png]}),
            f"messages[0].content[0]: is ['{png}']; expected a path, URL",
        ),
        "text of a list": (asks(images=str([png])), "does not exist"),
        "missing file": (asks(images=["none.png"]), "images[0]: 'none.png' does not exist"),
        "missing in a part": (
            parts({"type": "image", "image": "none.png"}),
            "messages[0].content[0]: 'none.png' does not exist",
        ),
        "missing file URL": (asks(images=["file:///none.png"]), "does not exist"),
        "missing video": (asks("<video>", videos=["none.mp4"]), "'none.mp4' does not exist"),
        "folder": (asks(images=[str(folder)]), "is not a file"),
        "folder of frames": (
            asks("<video>", videos=[str(folder)]),
            f"videos[0]: '{folder}' is not a file",
        ),
        "folder of sounds": (asks("<audio>", audios=[str(folder)]), "is not a file"),
        "PDF": (asks(images=[pdf]), f"'{pdf}' is not an image that can be read"),
        "missing for a teacher": (
            asks(images=[png], teacher_images=[png, "none.png"]),
            "teacher_images[1]: 'none.png' does not exist",
        ),
        "placeholder for a teacher": (
            asks(images=[png], teacher_prompt=f"<image>{pad}"),
            "the teacher's view: messages[0].content: holds '<|image_pad|>'",
        ),
        "no image": (asks(images=[text]), f"images[0]: '{text}' is not an image that can be read"),
        "no image in a part": (parts({"type": "image", "image": text}), wrong),
        "data URL of no image": (asks(images=[f"data:image/png;base64,{content}"]), wrong),
        "huge": (asks(images=[str(folder / "huge.png")]), "DecompressionBombError"),
        "part of another kind": (
            parts({"type": "picture", "picture": png}),
            "messages[0].content[0]: has the type 'picture'; expected parts such as",
        ),
        "dictionary in a part": (
            parts({"type": "image", "image": {"path": png}}),
            f"messages[0].content[0]: `image` is '{png}'; expected parts such as",
        ),
        "parts and column": (
            parts(part, images=[png]),
            "images: holds 1, and `content` has parts of type image that hold 1; expected",
        ),
        "system in parts": (
            [{"messages": [{"role": "system", "content": [{"type": "text", "text": "S"}]}]}],
            "messages[0].content: is a list of parts; expected text",
        ),
        "TRL": (trl, "holds messages; expected them in the column `messages`: rename it"),
        "frames": (asks("<video>", videos=[[png, png]]), "expected a path or URL, or a part {"),
        "missing frame": (
            parts({"type": "video", "video": [png, "none.png"]}),
            "messages[0].content[0]: 'none.png' does not exist",
        ),
        "video in a dictionary": (asks("<video>", videos=[{"path": mp4}]), f"is '{mp4}'; expected"),
        "placeholder": (
            asks(f"<image>{pad}", images=[png]),
            "messages[0].content: holds '<|image_pad|>', which is the model's own token",
        ),
        "placeholder in a part": (
            parts(part, {"type": "text", "text": pad}),
            "messages[0].content: holds '<|image_pad|>'",
        ),
    }


def met(folder: Path, url: str) -> dict[str, tuple[Rows, str]]:
    """Return rows whose fault shows when they are encoded, and the fault."""
    cut, wide, large = (str(folder / name) for name in ("cut.jpg", "wide.png", "large.png"))
    truncated = f"'{cut}' is not an image that can be read (OSError: image file is truncated"
    content = content_of(cut)
    words = "one more word " * 300
    return {
        "cut": (asks(images=[cut]), f"images[0]: {truncated}"),
        "cut in a part": (
            parts({"type": "image", "image": cut}),
            f"messages[0].content[0]: {truncated}",
        ),
        "cut base64": (asks(images=[content]), "images[0]: '/9j/"),
        "cut at a URL": (
            asks(images=[f"{url}/cut.jpg"]),
            f"bytes not processed); it shows images[0] '{url}/cut.jpg'",
        ),
        "nothing at a URL": (asks(images=[f"{url}/none.png"]), "HTTPError: 404"),
        "no image at a URL": (asks(images=[f"{url}/text.png"]), f"it shows images[0] '{url}/text"),
        "wide": (
            asks(images=[wide]),
            "ValueError: absolute aspect ratio must be smaller than 200, got 714.2857142857143; it "
            f"shows images[0] '{wide}'",
        ),
        "no video": (
            asks("<video>", videos=[str(folder / "text.mp4")]),
            f"it shows videos[0] '{folder / 'text.mp4'}'",
        ),
        "too long for the engine": (
            asks(f"<image>{words[: 14 * 200]}", images=[str(folder / "1.png")]),
            f"tokens, media included; expected fewer than the {TOKENS} that the engine takes",
        ),
        "large": (asks(images=[large]), f"expected fewer than the {TOKENS} that the engine takes"),
        "too long": (asks(words), "MaxLengthError: Current length of row("),
    }


def loaded(rows: Rows, path: Path) -> Rows:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data, _ = load_dataset([str(path)], remove_unused_columns=False)
    return list(data)


def in_a_round(encoder: BothSides, row: dict[str, Any]) -> None:
    """Process a row as a round does, up to vLLM's core; raises only `RowError`."""
    sample = GRPOSample.from_row(prompt_of(row))
    request = named_request(
        sample, lambda samples: [s.to_infer_request() for s in samples], encoder.placeholder_texts
    )
    encoder.process(request)


def wrong(
    cases: dict[str, tuple[Rows, Any]], folder: Path, check: Callable[[Rows, Any], None]
) -> dict[str, str]:
    """Return the failed checks, by case."""
    found = {}
    for number, (name, (rows, expected)) in enumerate(cases.items()):
        try:
            check(loaded(rows, folder / f"{number}.jsonl"), expected)
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"[:600]
        except AssertionError as e:
            found[name] = str(e)[:600]
    return found


def fault_in_a_round(encoder: BothSides, row: dict[str, Any]) -> str:
    with pytest.raises(RowError) as raised:
        in_a_round(encoder, row)
    return raised.value.fault


def test_forms_that_are_read(encoder: BothSides, folder: Path, url: str, tmp_path: Path) -> None:
    def check(rows: Rows, counts: list[int]) -> None:
        for row, count in zip(rows, counts, strict=True):
            assert row_fault(row, encoder.placeholder_texts) is None
            assert len(read_row(row).media) == count
            assert encoder.refusal(row) is None
            in_a_round(encoder, row)
            prompt, fault = encoder.encode(row)
            assert prompt.num_media == count
            has_video = any(medium.kind == "video" for medium in read_row(row).media)
            assert bool(fault) == (IS_BEFORE_0_28 and has_video), fault

    assert wrong(good(folder, url), tmp_path, check) == {}


def test_faults_that_headers_show(encoder: BothSides, folder: Path, tmp_path: Path) -> None:
    def check(rows: Rows, expected: str) -> None:
        fault = row_fault(rows[0], encoder.placeholder_texts)
        assert expected in str(fault)
        assert encoder.refusal(rows[0]) == fault
        assert fault_in_a_round(encoder, rows[0]) == fault

    assert wrong(bad(folder), tmp_path, check) == {}


def test_faults_that_show_when_a_row_is_met(
    encoder: BothSides, folder: Path, url: str, tmp_path: Path
) -> None:
    def check(rows: Rows, expected: str) -> None:
        assert row_fault(rows[0], encoder.placeholder_texts) is None
        assert expected in str(encoder.refusal(rows[0]))
        fault = fault_in_a_round(encoder, rows[0])
        # vLLM has its own words for lengths.
        assert expected in fault or "maximum" in fault

    assert wrong(met(folder, url), tmp_path, check) == {}


def test_a_row_of_any_form_is_named_by_its_question() -> None:
    [trl], [answered] = asks(), asks()
    answered["messages"] = [*answered["messages"], {"role": "assistant", "content": "7"}]
    [unreadable] = parts({"image": "1.png"})
    for row in (trl, answered):
        assert question_of(row) == "<image>Which?"
    assert question_of({"messages": [{"role": "user", "content": trl["messages"]}]}) == (
        "<image>Which?"
    )
    assert question_of(unreadable) == "Which?"


def test_content_in_a_file_of_rows(encoder: BothSides, folder: Path, tmp_path: Path) -> None:
    """Parquet has bytes; CSV has texts, and its column of answers is not part of the question."""
    png, cut = ((folder / name).read_bytes() for name in ("1.png", "cut.jpg"))
    for name, content, expected in (
        ("good", png, None),
        ("none", b"no image", "images[0]: <8 bytes> is not an image that can be read"),
        ("cut", cut, None),
    ):
        rows = asks(images=[{"bytes": content, "path": None}])
        pd.DataFrame(rows).to_parquet(path := tmp_path / f"{name}.parquet")
        data, _ = load_dataset([str(path)], remove_unused_columns=False)
        [row] = list(data)
        fault = row_fault(row, encoder.placeholder_texts)
        assert (fault is None) if expected is None else str(fault).startswith(expected), name
        refusal = encoder.refusal(row)
        if name == "cut":
            assert "bytes> is not an image that can be read (OSError: image file" in str(refusal)
        else:
            assert refusal == fault, name
    table = {"query": ["<image>Which?"], "response": ["0"], "images": ["['a.png', 'b.png']"]}
    pd.DataFrame(table).to_csv(path := tmp_path / "rows.csv", index=False)
    data, _ = load_dataset([str(path)], remove_unused_columns=False)
    with pytest.raises(RowError, match=r"asks '<image>Which.'\) cannot .* does not exist"):
        in_a_round(encoder, dict(data[0]))
