"""The examples' rewards, schedulers and published gains are what their pages say.
`tests/stack/test_tool_call.py` trains with the tool."""

from importlib import import_module
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import band
import pytest
import records
from rewards import DigitAccuracy, DigitFormat
from swift.rewards import orms

from swift_grpo_ext.tools.share import SHARE

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PASSAGES = ["Eiffel Tower: in Paris, of 1889", "Paris: the capital of France", "Rhine: a river"]


def test_the_promised_gain_is_what_the_published_seeds_of_the_demo_show() -> None:
    """By Student's t, one more run gains more with a probability of 99%."""
    gains = [record.gain for record in records.published(80)]
    assert len(gains) == 10
    assert band.prediction_interval(gains, miss=0.02).low >= band.PROMISED_GAIN


def choice(text: str, finish_reason: str = "stop") -> SimpleNamespace:
    return SimpleNamespace(message=SimpleNamespace(content=text), finish_reason=finish_reason)


@pytest.mark.parametrize(
    ("completion", "solution", "form", "accuracy"),
    [
        (" <answer>7</answer>\n", "7", 1.0, 1.0),
        ("<answer>3</answer>", "7", 1.0, 0.0),
        ("It is <answer>7</answer>", "7", 0.0, 1.0),
        ("<answer>2 1</answer>", "1 2", 1.0, 0.0),
    ],
)
def test_digits(completion: str, solution: str, form: float, accuracy: float) -> None:
    assert DigitFormat()([completion]) == [form]
    assert DigitAccuracy()([completion], solution=[solution]) == [accuracy]


def test_a_search_is_answered_and_its_last_answer_rewarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "search")
    search = import_module("search")
    searcher = search.Searcher(PASSAGES)
    assert searcher.find("When was the tower in Paris built?")[0] == PASSAGES[0]
    assert searcher.find("zebra") == []
    monkeypatch.setattr(search, "corpus", lambda: searcher)
    scheduler = search.SearchScheduler(max_turns=3)
    request = SimpleNamespace(messages=[])
    turn = choice("I look it up. <search>river</search>")
    assert not scheduler.check_finished(request, turn, 1)
    assert scheduler.check_finished(request, turn, 3)
    assert scheduler.check_finished(request, choice("<search>a</search>", "length"), 1)
    assert scheduler.check_finished(request, choice("<answer>b</answer>"), 1)
    result = scheduler.step(request, turn, 1)["infer_request"]
    assert result.messages[-1] == {"role": "user", "content": "<result>Rhine: a river</result>"}
    answers = ["<answer>Seine</answer> no: <answer>The Rhine.</answer>", "The Rhine"]
    assert search.SearchAnswer()(answers, solution=["The Rhine"] * 2) == [1.0, 0.0]


def test_the_reward_to_start_from() -> None:
    run_path(str(SHARE / "plugins/my_reward.py"))
    completions = ["<think>2 + 1</think> <answer> 3\n</answer>", "<answer>4</answer>", "3"]
    assert orms["my_reward"]()(completions, solution=["3"] * 3) == [1.0, 0.0, 0.0]
