"""The digit example's reward functions and scripts, on plain values."""

from __future__ import annotations

from pathlib import Path

import pytest
import train
from rewards import DigitAccuracy, DigitFormat


@pytest.mark.parametrize(
    ("completion", "form", "accuracy"),
    [
        ("<answer>7</answer>", 1.0, 1.0),
        (" <answer>7</answer>\n", 1.0, 1.0),
        ("<answer>3</answer>", 1.0, 0.0),
        ("It is <answer>7</answer>", 0.0, 1.0),
        ("<answer>77</answer>", 0.0, 0.0),
        ("<answer>七</answer>", 0.0, 0.0),
        ("7", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_rewards(completion: str, form: float, accuracy: float) -> None:
    assert DigitFormat()([completion]) == [form]
    assert DigitAccuracy()([completion], solution=["7"]) == [accuracy]


def test_several_digits_in_order() -> None:
    completions = ["<answer>1 2</answer>", "<answer>2 1</answer>"]
    assert DigitFormat()(completions) == [1.0, 1.0]
    assert DigitAccuracy()(completions, solution=["1 2", "1 2"]) == [1.0, 0.0]


def test_the_last_whole_checkpoint_is_resumed(tmp_path: Path) -> None:
    assert train.last_checkpoint(tmp_path) is None
    for step, whole in ((40, True), (80, True), (120, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if whole:
            (folder / "trainer_state.json").write_text("{}")
    assert train.last_checkpoint(tmp_path) == (80, tmp_path / "checkpoint-80")


def test_half_written_log_rows_wait(tmp_path: Path) -> None:
    log = tmp_path / "logging.jsonl"
    assert train.new_rows(log, 0) == []
    log.write_text('{"reward": "0.5"}\n{"eval": 1}\n{"reward": "0.6"}\n{"rewa')
    assert train.new_rows(log, 0) == [{"reward": "0.5"}, {"reward": "0.6"}]
    assert train.new_rows(log, 1) == [{"reward": "0.6"}]
