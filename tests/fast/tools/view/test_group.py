"""Tokens of a group, and its images."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path

import pytest
from PIL import Image
from PIL.ExifTags import Base

from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view.group import image_bytes, read_group, shared_lengths, spans_of
from swift_grpo_ext.tools.view.runs import NotFoundError, Run
from tests.rig.view.runs import make_run

TURN = {"token_ids": [1, 2], "logprobs": None, "mask": None, "gaps": {}, "num_shared": 0}


def test_shared_beginnings() -> None:
    assert shared_lengths([[1, 2], [1, 2], [1, 2, 3]]) == [2, 2, 2]
    assert shared_lengths([[1, 9], [2, 9], [1, 8, 7], [1, 8, 6]]) == [1, 0, 2, 2]
    assert shared_lengths([[1], []]) == [0, 0]


def test_spans_hold_whole_characters() -> None:
    content = "a七👍b".encode() + b"\xff"

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    logprobs = [-float(i) for i in range(len(content))]
    mask = [True] * 3 + [False] + [True] * 6
    gaps = {2: 0.5, 3: 0.25, 8: 0.125}
    turn = {"token_ids": [*content], "logprobs": logprobs, "mask": mask, "gaps": gaps}
    assert spans_of({**turn, "num_shared": 5}, decode) == [
        ("a", True, 0.0, 0.0, False),
        ("七", True, -6.0, 0.5, True),
        ("👍", False, -22.0, 0.0, False),
        ("b", False, -8.0, 0.125, False),
        ("\N{REPLACEMENT CHARACTER}", False, -9.0, 0.0, False),
    ]


def test_unknown_and_infinite_log_probabilities_are_none() -> None:
    for logprobs in (None, [-math.inf, math.nan]):
        parts = spans_of({**TURN, "logprobs": logprobs}, lambda ids: "x" * len(ids))
        assert [part.logprob for part in parts] == [None] * 2


def test_a_first_token_keeps_its_space() -> None:
    def decode(ids: list[int]) -> str:  # like sentencepiece, without the first space
        return "".join(f" w{i}" for i in ids)[1:]

    assert [part.text for part in spans_of(TURN, decode)] == ["w1", " w2"]


def test_a_group(tmp_path: Path) -> None:
    run = Run(make_run(tmp_path / "a run"))
    run.refresh()
    group = read_group(run, RoundId("train", 1, 0), 1)
    assert group["first"]["messages"] == [("user", "<image>Question 1?")]
    assert group["first"]["media"] == [str(tmp_path / "a run/images/1.png")]
    assert group["replay"] == f"swift-grpo-ext replay '{tmp_path}/a run' --round 1.0 --group 1"
    # Without a tokenizer, texts are compared in place of tokens.
    shown = [[span.text for span in turns[0]["spans"]] for turns in group["samples"]]
    assert shown == [["g1 i", "0 s1"], ["g1 i", "1 s1"]]


def test_images_in_two_sizes(tmp_path: Path) -> None:
    Image.new("RGBA", (4096, 2048), "red").save(tmp_path / "a.tiff")
    for size, expected in (("full", (2048, 1024)), ("small", (112, 56))):
        with Image.open(io.BytesIO(image_bytes(str(tmp_path / "a.tiff"), size))) as image:
            assert (image.format, image.size) == ("PNG", expected)
            assert image.getpixel((9, 9)) == (255, 0, 0)


def test_a_photograph_is_shown_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    Image.new("RGB", (30, 10)).save(tmp_path / "a.jpg", exif=exif)
    with Image.open(io.BytesIO(image_bytes(str(tmp_path / "a.jpg"), "full"))) as image:
        assert image.size == (10, 30)


def test_what_is_no_local_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 49)
    Image.new("RGB", (10, 10)).save(tmp_path / "large.png")
    (tmp_path / "text.png").write_text("no image")
    os.mkfifo(tmp_path / "pipe.png")
    for name, message in {
        "https://example.com/a.png": "the record holds its address only",
        "gone.png": "gone.png is not on this machine",
        "pipe.png": "not on this machine",
        "text.png": "text.png is no image that can be read",
        "large.png": "large.png is no image that can be read \\(Image size",
    }.items():
        path = name if "://" in name else str(tmp_path / name)
        with pytest.raises(NotFoundError, match=message):
            image_bytes(path, "full")
