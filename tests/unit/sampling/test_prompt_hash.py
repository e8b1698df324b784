"""Prompts have one hash if and only if their words, media and template settings are equal (G4,
G7)."""

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from swift_grpo_ext.sampling.prompt_hash import prompt_hash

MESSAGES = [
    {"role": "system", "content": "你是一个助手"},
    {"role": "user", "content": "<image>哪个数字?"},
]


def in_palette(color: Sequence[int]) -> Image.Image:
    made = Image.new("P", (2, 3))
    made.putpalette(color)
    return made


VALUES = [1, True, 1.0, 0, False, 0.0, -0.0, [1], [True], "\ud83d", "\ude00"]
"""A template writes numbers differently that are equal in Python. Some data sets have halves of a
surrogate pair, which UTF-8 cannot encode."""

PROMPTS = {
    "words only": {},
    "path": {"images": ["七.png"]},
    "other path": {"images": ["八.png"]},
    "two paths": {"images": ["七.png", "八.png"]},
    "video": {"videos": ["七.png"]},
    "audio": {"audios": ["七.png"]},
    "bytes": {"images": [{"bytes": b"1", "path": None}]},
    "other bytes": {"images": [{"bytes": b"2", "path": None}]},
    "bytes with a path": {"images": [{"bytes": b"1", "path": "七.png"}]},
    "bytes cut here": {"images": [b"ab", b"c"]},
    "bytes cut there": {"images": [b"a", b"bc"]},
    "pixels": {"images": [Image.frombytes("L", (2, 3), b"123456")]},
    "other pixels": {"images": [Image.frombytes("L", (2, 3), b"123457")]},
    "pixels in another shape": {"images": [Image.frombytes("L", (3, 2), b"123456")]},
    "pixels in another mode": {"images": [Image.frombytes("P", (2, 3), b"123456")]},
    "palette": {"images": [in_palette([255, 0, 0])]},
    "other palette": {"images": [in_palette([0, 0, 255])]},
    "array": {"images": [np.zeros((2, 3), np.uint8)]},
    "array in another shape": {"images": [np.zeros((3, 2), np.uint8)]},
    "tensor": {"videos": [torch.ones(2000, requires_grad=True)]},
    "other tensor": {"videos": [torch.ones(2000).index_fill(0, torch.tensor(999), 2)]},
    "array of another type": {"images": [np.zeros((2, 3), np.int8)]},
    "tools": {"tools": ["search"]},
    "objects": {"objects": {"ref": ["七"], "bbox": [[0, 0, 1, 1]]}},
    "other words": {"messages": [MESSAGES[0], {"role": "user", "content": "<image>哪个数字!"}]},
    "thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "no thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    **{f"value {value!r}": {"objects": {"value": value}} for value in VALUES},
}


def row(**changes: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "solution": "7", **changes}


def test_prompts_that_share_their_words_differ_by_their_media() -> None:
    hashes: dict[str, str] = {}
    for name, changes in PROMPTS.items():
        hash_ = prompt_hash(row(**changes))
        assert hash_ not in hashes, f"{name!r} is taken for {hashes.get(hash_)!r}"
        hashes[hash_] = name


def test_copies_and_objects_are_the_same_prompt() -> None:
    """A row of a data set, and ms-swift's sample of it, have one hash."""
    for changes in PROMPTS.values():
        prompt = row(**changes)
        assert prompt_hash(copy.deepcopy(prompt)) == prompt_hash(prompt)
        extra = {key: prompt[key] for key in ("solution", "chat_template_kwargs") if key in prompt}
        own = {key: value for key, value in prompt.items() if key not in extra}
        sample = SimpleNamespace(**own, request_id="train-0.0-0-0", extra=extra)
        assert prompt_hash(sample) == prompt_hash(prompt)
        assert len(prompt_hash(prompt)) == 32


def test_what_makes_no_difference() -> None:
    """Fields without media, other columns and the order of keys do not count."""
    plain = prompt_hash(row())
    for field in ("images", "videos", "audios", "tools", "objects"):
        assert prompt_hash(row(**{field: None})) == prompt_hash(row(**{field: []})) == plain
    assert prompt_hash(row(solution="8", add_eos=True)) == plain
    one, other = ({"objects": objects} for objects in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert prompt_hash(one) == prompt_hash(other)


def test_what_cannot_be_written_down_is_refused_by_name() -> None:
    for value in ({b"bytes": 1}, {1: 0, "1": 0}):
        with pytest.raises(ValueError, match=r"fields objects cannot be hashed"):
            prompt_hash({"objects": {"value": value}})


def test_a_prompt_is_one_in_parts_and_in_columns() -> None:
    def in_parts(image: str) -> dict[str, Any]:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": "哪个数字?"}]
        return row(messages=[MESSAGES[0], {"role": "user", "content": parts}], images=None)

    column = prompt_hash(row(images=[{"bytes": None, "path": "七.png"}]))
    assert prompt_hash(in_parts("七.png")) == column
    assert prompt_hash(in_parts("八.png")) != column
    assert prompt_hash(SimpleNamespace(**in_parts("七.png"), extra={})) == column
