"""A group's page: its tokens, its conversations turn by turn, and its images (V2)."""

from __future__ import annotations

import io
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from PIL.ExifTags import Base

from swift_grpo_ext.sampling.seeding import RoundId
from swift_grpo_ext.tools.view.group import (
    image_bytes,
    read_group,
    read_image,
    spans_of,
)
from swift_grpo_ext.tools.view.pages import render
from swift_grpo_ext.tools.view.runs import NotFoundError, Run
from tests.rig.record.rows import open_log
from tests.rig.view.runs import make_conversations, open_run, write

TURN = {"token_ids": [1, 2], "logprobs": None, "mask": None, "gaps": {}, "num_shared": 0}
CONVERSATIONS = RoundId("train", 3, 0)


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


def test_spans_of_odd_tokens() -> None:
    """Unknown and infinite log-probabilities are None; a first token keeps its space."""

    def decode(ids: list[int]) -> str:  # like sentencepiece, without the first space
        return "".join(f" w{i}" for i in ids)[1:]

    for logprobs in (None, [-math.inf, math.nan]):
        spans = spans_of({**TURN, "logprobs": logprobs}, decode)
        assert [(span.text, span.logprob) for span in spans] == [("w1", None), (" w2", None)]


def test_a_group(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"round": "train.1.0", "group": "1"}
    text = render([run], 0, "group", place)
    assert '<i class="shared" style="--p:0.10" title="-0.500">w7</i>' in text
    assert '<i style="--p:0.20" title="-1.000"> w1</i>' in text
    assert '<i class="shared" style="--p:0.05;--g:0.25" title="-0.250 ± 0.250"> w1</i>' in text
    page = text.partition("<main")[2].partition("</main>")[0]
    assert not any(word in page for word in ("Turn", "seconds", "masked"))
    monkeypatch.setattr(run, "decode", None)
    group = read_group(run, RoundId("train", 1, 0), 1)
    assert group["first"]["messages"] == [("user", "<image>Question 1?")]
    assert group["first"]["media"] == [str(run.run_dir / "images/1.png")]
    assert group["replay"] == f"swift-grpo-ext replay '{run.run_dir}' --round 1.0 --group 1"
    # Without a tokenizer, texts are compared in place of tokens.
    shown = [[span.text for span in turns[0]["spans"]] for turns in group["samples"]]
    assert shown == [["g1 i", "0 s1"], ["g1 i", "1 s1"]]


def test_a_conversation_turn_by_turn(run: Run) -> None:
    group = read_group(run, CONVERSATIONS, 1)
    assert group["has_one_prompt"]
    assert [len(turns) for turns in group["samples"]] == [1, 3]
    first, second, third = group["samples"][1]
    assert second["messages"] == [("tool", "<image>看这里 \\ud83d")]
    assert [span.is_masked for span in second["spans"]] == [False, True]
    # Position 4 of the sample is the second token of its second turn.
    gaps = [[span.gap for span in turn["spans"]] for turn in (first, second, third)]
    assert gaps == [[0.5, 0, 0], [0, 0.25], []]
    assert third["messages"] == [("tool", '{"tool_calls": [{"f": "找"}]}')]
    assert third["spans"] == []
    whole = render([run], 0, "group", {"round": "train.3.0", "group": "1"})
    text = whole[whole.index('id="sample-train.3.0-1-1"') :]
    image = "index=1&amp;turn=1&amp;number=0"
    places = [text.index(part) for part in ("</span> 2</h4>", image, "看这里", "找")]
    assert places == sorted(places)
    assert "<i>tool_seconds</i> 3" in text
    assert 'class=" masked"' in text
    assert "Struck out" in whole


def test_each_conversation_has_its_own_question_where_they_differ(tmp_path: Path) -> None:
    rows = make_conversations(0)
    rows = [replace(r, fingerprint=f"own {r.sample_id.index}.{r.sample_id.turn}") for r in rows]
    write(open_log(tmp_path), rows, [])
    page = render([open_run(tmp_path)], 0, "group", {"round": "train.0.0", "group": "0"})
    assert page.count("Question 0?") == 2


# --- images ---


def test_images_of_the_record(run: Run) -> None:
    """A turn has the media that it names. The record holds the picture that a tool made."""
    place = {"round": "train.3.0", "group": "1", "index": "1", "turn": "1", "number": "0"}
    with Image.open(io.BytesIO(read_image(run, place))) as crop:
        assert (crop.format, crop.size) == ("PNG", (8, 4))
    with Image.open(io.BytesIO(read_image(run, {**place, "turn": "0"}))) as shown:
        assert (shown.size, shown.getpixel((0, 0))) == ((56, 28), (200, 30, 0))
    for wrong in ({"turn": "2"}, {"number": "1"}, {"group": "7"}):
        with pytest.raises(NotFoundError, match="has no such medium"):
            read_image(run, {**place, **wrong})


def test_images_are_shown_upright_in_two_sizes(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[Base.Orientation] = 6
    Image.new("RGB", (30, 10), "red").save(tmp_path / "a.jpg", exif=exif)
    Image.new("RGBA", (4096, 2048), "red").save(tmp_path / "a.tiff")
    for name, side, expected in (
        ("a.jpg", "full", (10, 30)),
        ("a.tiff", "full", (2048, 1024)),
        ("a.tiff", "small", (112, 56)),
    ):
        with Image.open(io.BytesIO(image_bytes(str(tmp_path / name), side))) as image:
            assert (image.format, image.mode, image.size) == ("PNG", "RGB", expected)


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
