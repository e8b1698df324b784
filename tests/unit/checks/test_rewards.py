"""Reward functions are tried before a model is loaded; those that would end a training are
refused (R6)."""

import asyncio
import time
from contextlib import suppress
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


def reward(call: Any, base: type = ORM, **methods: Any) -> type:
    return type("Reward", (base,), {"__call__": call, **methods})


def returns(value: Any) -> type:
    return reward(lambda _, completions, **__: value)


def takes_columns(_: Any, completions: list[str], answer: list[Any], **kwargs: Any) -> Any:
    assert completions == [messages[-1]["content"] for messages in kwargs["messages"]]
    assert (answer, kwargs["level"]) == (["7", None, "7"], [None, 2, None])
    assert kwargs["trainer_state"].global_step == 0
    return [1, None, np.float32(0.5)]


def waits(*_: Any, **__: Any) -> Any:
    while True:
        with suppress(Exception):
            time.sleep(60)


def told(made: Any, monkeypatch: pytest.MonkeyPatch, **how: Any) -> str:
    monkeypatch.setattr("swift.rewards.orms", {"named": made})
    rows = how.pop("rows", ROWS)
    found = check_rewards(["named"], rows, SimpleNamespace(), setting="dataset rows.jsonl", **how)
    return "\n".join(said(found))


SOLUTION = reward(lambda _, completions, solution, **__: [])
NOT_CALLED = {"__init__": lambda _, args=None, **__: 1 / 0}  # it may load a model
MISFIT = "error: --reward_funcs named: does not fit ms-swift's call: "
COLUMNS = "--dataset rows.jsonl has the columns messages, images, answer, level."
RETURNED = "error: --reward_funcs named: returned"


def test_a_reward_function(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (reward(takes_columns), {}, ""),
        (reward(lambda _, texts, **__: asyncio.sleep(0, [0.0] * 3), AsyncORM), {}, ""),
        (returns(torch.zeros(3)), {}, ""),
        (returns([None, None, None]), {}, ""),
        (SOLUTION, {}, f"{MISFIT}missing a required argument: 'solution'; {COLUMNS} Add the col"),
        (SOLUTION, {"rows": []}, ""),
        # A user's code may raise for good reasons
        (reward(lambda *_, **__: [][9]), {}, "warning: --reward_funcs named: raised IndexError"),
        (reward(lambda _, completions, answer: []), {}, f"{MISFIT}got an unexpected keyword"),
        (reward(waits, object), {}, "cannot make it by orms['named'](args=...): TypeError: got an"),
        (lambda completions, **kwargs: [0.0], {}, "TypeError: missing a required argument: 'comp"),
        # Values: one of them would be spread over all samples
        (returns([1.0]), {}, f"{RETURNED} values of shape [1] for 3 completions."),
        (returns(0.5), {}, f"{RETURNED} float 0.5 for 3 completions."),
        (returns(["a", 1, 2]), {}, f"{RETURNED} list ['a', 1, 2] for 3 completions."),
        (returns([[1.0]] * 3), {}, f"{RETURNED} values of shape [3, 1] for 3 completions. Expecte"),
        (returns([1.0]), {"calls": False}, ""),
        (reward(waits, **NOT_CALLED), {}, ""),
        (lambda args: reward(lambda *_, **__: [0.0] * 3)(args), {}, ""),
    ]
    for made, how, expected in cases:
        text = told(made, monkeypatch, **how)
        assert expected in text
        assert (text == "") == (expected == "")
        assert text.count("\n") == 0


def test_rewards_that_are_not_waited_for_or_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow one ends; one that needs other ranks or a server's conversations is left alone."""
    monkeypatch.setattr(rewards, "MAX_SECONDS", 1)
    expected = "skipped: --reward_funcs named: gave no values for 3 made-up completions within 1 s"
    assert told(reward(waits), monkeypatch).startswith(expected)
    for source in ("torch.distributed.barrier()", "kwargs['trajectory_inputs']"):
        monkeypatch.setattr(rewards.inspect, "getsource", lambda _, source=source: source)
        assert told(returns([1.0]), monkeypatch) == ""
