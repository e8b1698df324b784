"""Tokens of a group, and its images."""

from __future__ import annotations

import html
import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from PIL.ExifTags import Base

from swift_grpo_ext.sampling.seeding import RoundId, sample_seed
from swift_grpo_ext.tools.view.group import RunView, image_bytes, pieces, shared_lengths
from swift_grpo_ext.tools.view.pages import group_values, render, words
from swift_grpo_ext.tools.view.runs import NotFoundError
from tests.tools.view.runs import Writer, make_rows, make_run


def test_shared_beginnings() -> None:
    assert shared_lengths([[1, 2], [1, 2], [1, 2, 3]]) == [2, 2, 2]
    assert shared_lengths([[1, 9], [2, 9], [1, 8, 7], [1, 8, 6]]) == [1, 0, 2, 2]
    assert shared_lengths([[1], []]) == [0, 0]


def test_pieces_hold_whole_characters() -> None:
    content = "a七👍b".encode() + b"\xff"

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    logprobs = [-float(i) for i in range(len(content))]
    mask = [True] * 3 + [False] + [True] * 6
    assert pieces(list(content), logprobs, decode, 5, {2: 0.5, 3: 0.25, 8: 0.125}, mask) == [
        ("a", True, 0.0, 0.0, False),
        ("七", True, -6.0, 0.5, True),
        ("👍", False, -22.0, 0.0, False),
        ("b", False, -8.0, 0.125, False),
        ("\N{REPLACEMENT CHARACTER}", False, -9.0, 0.0, False),
    ]


def test_unknown_and_infinite_log_probabilities_are_none() -> None:
    for logprobs in (None, [-math.inf, math.nan]):
        parts = pieces([65, 66], logprobs, lambda ids: "x" * len(ids), 0, {})
        assert [part.logprob for part in parts] == [None] * 2


def test_a_first_token_keeps_its_space() -> None:
    def decode(ids: list[int]) -> str:  # as sentencepiece: no space at the beginning
        return "".join(f" w{i}" for i in ids)[1:]

    assert [part.text for part in pieces([1, 2], None, decode, 0, {})] == ["w1", " w2"]


def test_a_group(tmp_path: Path) -> None:
    run = RunView(make_run(tmp_path / "a run"))
    run.refresh()
    group = run.group(RoundId("train", 1, 0), 1, earlier=[(RoundId("train", 0, 0), 1, 1)])
    assert [(said.role, said.text) for said in group["prompt"]] == [("user", "Question 1?")]
    assert group["media"] == [str(tmp_path / "a run/images/1.png")]
    assert group["replay"] == f"swift-grpo-ext replay '{tmp_path}/a run' --round 1.0 --group 1"
    # Without a tokenizer, the texts tell what is shared.
    shown = [
        (s["round"], s["index"], s["is_earlier"], [p.text for p in s["pieces"]])
        for s in group["samples"]
    ]
    assert shown == [
        ("train.1.0", 0, False, ["g1 i", "0 s1"]),
        ("train.1.0", 1, False, ["g1 i1 s", "1"]),
        ("train.0.0", 1, True, ["g1 i1 s", "0"]),
    ]


def test_replay_is_offered_where_the_weights_are(tmp_path: Path) -> None:
    """Of a run that saved one checkpoint of three, and was resumed once with another seed."""
    writer, settings = Writer(tmp_path), {"seed": 42, "tuner_type": "full", "model": "models/tiny"}
    for step in range(4):
        rows = [replace(r, seed=sample_seed(42 + step // 3, r.sample_id)) for r in make_rows(step)]
        writer.write([replace(r, seed=None if r.sample_id.group else r.seed) for r in rows])
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2/model.safetensors").touch()
    run = RunView(tmp_path)
    run.refresh()

    def obstacle(step: int, group: int = 0) -> str:
        page = render(
            "group", run, **group_values(run, {"round": f"train.{step}.0", "group": group})
        )
        shown = run.group(RoundId("train", step, 0), group)["replay_obstacle"]
        assert ("<code>swift-grpo-ext replay " in page) == (not shown)
        assert not shown or words()[shown][1] in html.unescape(page)
        return str(shown)

    assert obstacle(0) == "replay_not"
    (tmp_path / "args.json").write_text(json.dumps(settings))
    assert [obstacle(step) for step in range(3)] == ["", "replay_no_weights", ""]
    assert [obstacle(3), obstacle(0, group=1)] == ["replay_no_seed"] * 2


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
        "https://example.com/a.png": "its digest or its address only",
        "gone.png": "gone.png is not on this machine",
        "pipe.png": "not on this machine",
        "text.png": "text.png is no image that can be read",
        "large.png": "large.png is no image that can be read \\(Image size",
    }.items():
        path = name if "://" in name else str(tmp_path / name)
        with pytest.raises(NotFoundError, match=message):
            image_bytes(path, "full")
