"""The digit example's reward functions and scripts, on plain values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import train
from rewards import DigitAccuracy, DigitFormat
from seed_table import seed_table


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


def test_the_readme_holds_the_table_of_the_published_seeds() -> None:
    root = Path(__file__).resolve().parents[1]
    results = sorted((root / "examples/digits/results").glob("seed*.json"))
    assert len(results) == 3
    assert seed_table(results) in (root / "README.md").read_text(encoding="utf-8")


def test_every_published_seed_gains_fifteen_points() -> None:
    root = Path(__file__).resolve().parents[1]
    for file in (root / "examples/digits/results").glob("seed*.json"):
        before, after = json.loads(file.read_text(encoding="utf-8"))
        assert after["greedy_accuracy"] - before["greedy_accuracy"] >= 0.15, file.name
        assert after["sampled_accuracy"] - before["sampled_accuracy"] >= 0.15, file.name
