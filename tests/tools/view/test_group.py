"""Tokens of a group, and its images."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from swift_grpo_ext.record.reader import RoundName
from swift_grpo_ext.tools.view import media
from swift_grpo_ext.tools.view.group import RunView, pieces, shared_lengths
from tests.tools.view.runs import make_run


@pytest.mark.parametrize(
    ("completions", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4], [5]], [2, 2, 0]),
        ([[1, 2], [1, 2], [1, 2, 3]], [2, 2, 2]),
        ([[1, 9], [2, 9], [1, 8, 7], [1, 8, 6]], [1, 0, 2, 2]),
        ([[1]], [0]),
        ([], []),
    ],
)
def test_shared_beginnings(completions: list[list[int]], expected: list[int]) -> None:
    assert shared_lengths(completions) == expected


def test_pieces_hold_whole_characters() -> None:
    content = "a七👍b".encode() + b"\xff"

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    found = pieces(list(content), [-float(i) for i in range(len(content))], decode)
    assert [(text, count) for text, count, _ in found] == [
        ("a", 1), ("七", 3), ("👍", 4), ("b", 1), ("\N{REPLACEMENT CHARACTER}", 1),
    ]  # fmt: skip
    assert [logprob for _, _, logprob in found] == [0.0, -6.0, -22.0, -8.0, -9.0]
    assert sum(count for _, count, _ in found) == len(content)


def test_unknown_and_infinite_log_probabilities_are_none() -> None:
    for logprobs in (None, [-math.inf, math.nan]):
        assert [p[2] for p in pieces([65, 66], logprobs, lambda ids: "x" * len(ids))] == [None] * 2


def test_a_first_token_keeps_its_space() -> None:
    def decode(ids: list[int]) -> str:  # as sentencepiece: no space at the beginning
        return "".join(f" w{i}" for i in ids)[1:]

    assert [p[0] for p in pieces([1, 2], None, decode)] == ["w1", " w2"]


@pytest.mark.parametrize("size", [(28, 28), (1000, 20), (4000, 3000), (57, 113), (10, 10)])
@pytest.mark.parametrize(("low", "high"), [(3136, 12_845_056), (4 * 28 * 28, 256 * 28 * 28)])
def test_the_size_that_the_model_saw(size: tuple[int, int], low: int, high: int) -> None:
    limits = {"factor": 28, "min_pixels": low, "max_pixels": high, "first_pixels": 0}
    height, width = smart_resize(size[1], size[0], 28, low, high)
    assert media.seen_size(*size, limits) == (width, height)


def test_a_groups_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a run")
    checkpoint = run_dir / "checkpoint-2"
    checkpoint.mkdir()
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    names = {"image_processor_type": "Qwen2VLImageProcessor", "merge_size": 2, "patch_size": 14}
    config = {"image_processor": {**names, "size": size}}
    (checkpoint / "processor_config.json").write_text(json.dumps(config), encoding="utf-8")
    run = RunView(run_dir)
    run.follower.refresh()
    found = run.group(RoundName("train", 1, 0), 1)
    assert found["prompt"] == [{"role": "user", "content": "<image>Question 1?"}]
    assert found["media"] == [{"name": "1.png", "size": (56, 28), "seen": (84, 56)}]
    assert [s["num_shared"] for s in found["samples"]] == [2, 2]
    assert [s["pieces"] for s in found["samples"]] == [None, None]  # no tokenizer
    assert [s["gaps"] for s in found["samples"]] == [{1: 0.25}, {1: 0.25}]
    assert found["replay"] == f"swift-grpo-ext replay '{run_dir}' --round 1.0 --group 1"
    with pytest.raises(KeyError):
        run.group(RoundName("train", 1, 0), 7)


def test_images_in_three_sizes(tmp_path: Path) -> None:
    name = str(make_run(tmp_path / "run") / "images/0.png")
    limits = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 10**7, "first_pixels": 0}
    content, kind = media.image_bytes(name, "full", limits)
    assert (content, kind) == (Path(name).read_bytes(), "image/png")
    for size, expected in (("seen", (84, 56)), ("small", (56, 28))):
        path = tmp_path / size
        path.write_bytes(media.image_bytes(name, size, limits)[0])
        with Image.open(path) as image:
            assert image.size == expected


@pytest.mark.parametrize("name", ["https://example.com/a.png", "blake2b:00", "gone.png", "\0", "."])
def test_what_is_no_local_image_is_refused(name: str) -> None:
    with pytest.raises(media.NoImageError):
        media.image_bytes(name, "full", None)
