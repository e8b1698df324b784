"""The tool call example on plain values: what is a call, what ends a conversation, rewards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).resolve().parents[1] / "examples/tool_call"


@pytest.fixture(scope="module")
def tools() -> Any:
    spec = importlib.util.spec_from_file_location("tool_call_tools", FOLDER / "tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "stop_reason", "reward"),
    [
        ("<answer>7</answer>", "</answer>", 1.2),
        ("<answer>3</answer>", "</answer>", 0.2),
        ("It is <answer>7</answer>", "</answer>", 1.0),
        ("<answer>7</answer>", "<|im_end|>", 1.0),  # no call of its own accord
        ("<answer>7</answer>\n", "<|im_end|>", 0.0),
        ("<answer>7", None, 0.0),
        ("", "<|im_end|>", 0.0),
    ],
)
def test_rewards(tools: Any, text: str, stop_reason: str | None, reward: float) -> None:
    infos = [{"stop_reason": stop_reason}]
    assert tools.DigitCall()([text], solution=["7"], rollout_infos=infos) == [reward]


@pytest.mark.parametrize(
    ("text", "is_over"), [("<answer>7</answer>", True), ("<answer>3</answer>", False), ("7", True)]
)
def test_a_wrong_call_is_told_so_once(tools: Any, text: str, is_over: bool) -> None:
    scheduler = tools.DigitChecker(max_turns=2)
    request = SimpleNamespace(data_dict={"solution": "7"}, messages=[])
    choice = SimpleNamespace(message=SimpleNamespace(content=text), finish_reason="stop")
    assert scheduler.check_finished(request, choice, 1) == is_over
    assert scheduler.check_finished(request, choice, 2)
    if not is_over:
        assert scheduler.step(request, choice, 1) == {"infer_request": request}
        assert request.messages == [{"role": "tool", "content": "3: no"}]


def test_the_preset_stops_where_a_call_ends(tools: Any) -> None:
    preset = yaml.safe_load((FOLDER / "grpo.yaml").read_text(encoding="utf-8"))
    assert preset["stop_words"] == [tools.STOP]
