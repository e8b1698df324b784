"""The examples' rewards, schedulers and published gains are what their pages say."""

from __future__ import annotations

import base64
import importlib.util
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import band
import experiment
import pytest
import records
from PIL import Image
from rewards import DigitAccuracy, DigitFormat

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PASSAGES = ["Eiffel Tower: in Paris, of 1889", "Paris: the capital of France", "Rhine: a river"]


def test_a_run_is_held_against_the_band_of_its_own_start_model() -> None:
    """Only the published start model must also be in the band of the published seeds."""
    published = records.published(200)
    run = published[0]
    high = replace(run, after={**run.after, "greedy_accuracy": 0.9})
    elsewhere = replace(high, before={**run.before, "greedy_accuracy": 0.4765625})
    assert experiment.verdict(run, published)[1] is False
    assert experiment.verdict(high, published)[1] is True
    assert experiment.verdict(elsewhere, published)[1] is False


def test_the_promised_gain_is_what_the_published_seeds_of_the_demo_show() -> None:
    """By Student's t, one more run gains more with a probability of 99%."""
    gains = [record.gain for record in records.published(80)]
    assert len(gains) == 10
    assert band.prediction_interval(gains, miss=0.02).low >= band.PROMISED_GAIN


def module_of(file: str) -> Any:
    spec = importlib.util.spec_from_file_location(file.replace("/", "_"), EXAMPLES / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def choice(text: str, finish_reason: str = "stop") -> SimpleNamespace:
    return SimpleNamespace(message=SimpleNamespace(content=text), finish_reason=finish_reason)


@pytest.mark.parametrize(
    ("completion", "solution", "form", "accuracy"),
    [
        (" <answer>7</answer>\n", "7", 1.0, 1.0),
        ("<answer>3</answer>", "7", 1.0, 0.0),
        ("It is <answer>7</answer>", "7", 0.0, 1.0),
        ("<answer>77</answer>", "7", 0.0, 0.0),
        ("<answer>2 1</answer>", "1 2", 1.0, 0.0),
    ],
)
def test_digits(completion: str, solution: str, form: float, accuracy: float) -> None:
    assert DigitFormat()([completion]) == [form]
    assert DigitAccuracy()([completion], solution=[solution]) == [accuracy]


def test_a_wrong_call_of_a_tool_brings_a_crop(tmp_path: Path) -> None:
    """`tests/stack/test_tool_call.py` trains with images in all forms, and without."""
    tools = module_of("tool_call/tools.py")
    scheduler = tools.DigitChecker(max_turns=2)
    Image.linear_gradient("L").save(path := tmp_path / "image.png")
    request = SimpleNamespace(data_dict={"solution": "7"}, messages=[], images=[str(path)])
    right, wrong = choice("<answer>7</answer>"), choice("<answer>3</answer>")
    turns = [(right, 1), (wrong, 1), (wrong, 2)]
    assert [scheduler.check_finished(request, *turn) for turn in turns] == [True, False, True]
    result = scheduler.step(request, wrong, 1)
    assert result["infer_request"].messages == [{"role": "tool", "content": "3: no. <image>"}]
    assert result["rollout_infos"]["images"] == request.images
    shown = Image.open(io.BytesIO(base64.b64decode(request.images[1]))).convert("L")
    # Of 0 to 255, an eighth is cut off at each end.
    assert (shown.size, shown.getextrema()) == ((256, 256), (32, 223))
    # A turn that ends at the stop string is a call.
    infos = [{"stop_reason": tools.STOP}, {"stop_reason": "<|im_end|>"}]
    answers = ["<answer>7</answer>"] * 2
    assert tools.DigitCall()(answers, solution=["7"] * 2, rollout_infos=infos) == [1.2, 1.0]


def test_a_search_is_answered_and_its_last_answer_rewarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = module_of("search/search.py")
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
