"""Reward functions are tried before a model is loaded; those that would end a training are
refused (R6)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from swift.rewards import ORM, AsyncORM

from swift_grpo_ext.checks import rewards
from swift_grpo_ext.checks.rewards import check_rewards
from tests.rig.checks import said

ASKS = [{"role": "user", "content": "Which digit?"}, {"role": "assistant", "content": "7"}]
ROWS: list[dict[str, Any]] = [
    {"messages": ASKS, "images": [], "answer": "7", "level": None},
    {"messages": ASKS, "images": [], "answer": None, "level": 2},
]


def calls(function: Callable[..., Any]) -> type[ORM]:
    """Return a reward of ms-swift's form that calls a function without `self`."""
    return type("Reward", (ORM,), {"__call__": lambda self, *args, **kw: function(*args, **kw)})


def returns(value: Any) -> type[ORM]:
    return calls(lambda completions, **_: value)


def takes_columns(completions: list[str], answer: list[Any], **kwargs: Any) -> Any:
    assert completions == [messages[-1]["content"] for messages in kwargs["messages"]]
    assert (answer, kwargs["level"]) == (["7", None, "7"], [None, 2, None])
    assert kwargs["trainer_state"].global_step == 0
    return [1, None, np.float32(0.5)]


def waits(completions: list[str], **kwargs: Any) -> Any:
    while True:
        with suppress(Exception):
            time.sleep(60)


class Waits(AsyncORM):
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)


class Solution(ORM):
    def __call__(self, completions: list[str], solution: list[str], **kwargs: Any) -> list[float]:
        raise AssertionError


class Closed(ORM):
    def __call__(self, completions: list[str], answer: list[str]) -> list[float]:
        raise AssertionError


class Served(ORM):
    def __call__(self, completions: list[str], trajectory_inputs: Any, **kwargs: Any) -> Any:
        raise AssertionError


class Loads(Closed):
    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        raise RuntimeError("no GPU")

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        raise AssertionError


class Plain:
    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        raise AssertionError


def told(made: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> str:
    monkeypatch.setattr("swift.rewards.orms", {"named": made})
    rows = how.pop("rows", ROWS)
    found = check_rewards(["named"], rows, SimpleNamespace(), setting="dataset rows.jsonl", **how)
    return "\n".join(said(found))


COLUMNS = "--dataset rows.jsonl has the columns messages, images, answer, level."
MISFIT = "error: --reward_funcs named: does not fit ms-swift's call: "
RETURNED = "error: --reward_funcs named: returned"


@pytest.mark.parametrize(
    ("made", "how", "expected"),
    [
        (calls(takes_columns), {}, ""),
        (Waits, {}, ""),
        (returns(torch.zeros(3)), {}, ""),
        (returns([None, None, None]), {}, ""),
        (Solution, {}, f"{MISFIT}missing a required argument: 'solution'; {COLUMNS} Add the col"),
        (Solution, {"rows": []}, ""),
        (Closed, {}, f"{MISFIT}got an unexpected keyword"),
        (Plain, {}, "cannot make it by orms['named'](args=...): TypeError: got an unexp"),
        (lambda completions, **kwargs: [0.0], {}, "TypeError: missing a required argument: 'comp"),
        # Values: one of them would be spread over all samples
        (returns([1.0]), {}, f"{RETURNED} values of shape [1] for 3 completions."),
        (returns(0.5), {}, f"{RETURNED} float 0.5 for 3 completions."),
        (returns(["a", 1, 2]), {}, f"{RETURNED} list ['a', 1, 2] for 3 completions."),
        (returns([[1.0]] * 3), {}, f"{RETURNED} values of shape [3, 1] for 3 completions. Expecte"),
        (returns([1.0]), {"calls": False}, ""),
        # A user's code may raise or change for good reasons.
        (
            calls(lambda texts, **_: {}[texts[0]]),
            {},
            "warning: --reward_funcs named: raised KeyEr",
        ),
        (Served, {}, ""),
        (Loads, {}, ""),
        (lambda args: Waits(args), {}, ""),
    ],
)
def test_a_reward_function(
    made: Any, how: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = told(made, monkeypatch, **how)
    assert expected in text
    assert (text == "") == (expected == "")
    assert text.count("\n") == 0


def test_what_rewards_of_ms_swift_need() -> None:
    """ms-swift would report it after it has loaded the model."""
    args = SimpleNamespace(soft_cache_length=2, soft_max_length=1)
    [found] = check_rewards(["soft_overlong"], [], args, setting="dataset")
    assert found.sentence.startswith(
        "--reward_funcs soft_overlong: ms-swift cannot make it by orms"
    )
    assert "AssertionError: orm.py, line " in found.sentence


def test_a_slow_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "MAX_SECONDS", 1)
    expected = "skipped: --reward_funcs named: gave no values for 3 made-up completions within 1 s"
    assert told(calls(waits), monkeypatch).startswith(expected)


def test_a_reward_that_speaks_to_other_ranks_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards.inspect, "getsource", lambda _: "torch.distributed.barrier()")
    assert told(returns([1.0]), monkeypatch) == ""


@pytest.mark.parametrize(
    ("name", "call", "raised"),
    [
        ("judge", "def __call__(self, texts, **_): return [len(t[9]) for t in texts]", "IndexE"),
        ("calls", "async def __call__(self, texts, **_): return json.loads(texts[1])", "JSONDe"),
    ],
)
def test_the_users_own_line_is_named(
    name: str, call: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"import json\nclass Judge:\n  def __init__(self, args): ...\n  {call}\n"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    [found] = rewards.try_reward("reward_funcs judge", import_module(name).Judge, {}, None)
    assert found.level == "warning"
    assert f"raised {raised}" in found.sentence
    assert f"({name}.py, line 4) for the first rows" in found.sentence
