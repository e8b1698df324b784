"""Reward functions and the record of a colocated training get the stop that ended each completion
(T1, T3, T4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.rounds import run_training
from tests.rig.stop_cases import NEW_TOKEN
from tests.rig.stop_training import STEPS, assert_ends, write_searcher

TEXT = " find it</search>"


@pytest.mark.parametrize(
    ("stop", "max_tokens", "text"),
    [(NEW_TOKEN, 7, f"{TEXT}\n\nMore{NEW_TOKEN}"), ("</search>", 5, TEXT)],
    ids=["at a new token", "at a string, at the last possible token"],
)
def test_a_colocated_training_stops(
    stop: str, max_tokens: int, text: str, assets: Path, rows: Path, tmp_path: Path
) -> None:
    folder, answer = write_searcher(assets, tmp_path / "searcher")
    model = ("--model", str(folder), "--new_special_tokens", NEW_TOKEN, "--top_k", "1")
    stops = ("--stop_words", stop, "--max_completion_length", str(max_tokens))
    argv = (*model, *stops, "--reward_funcs", "stopped")
    finished = run_training(assets, rows, tmp_path / "a", *argv, steps=STEPS)
    assert finished.returncode == 0, finished.cause
    assert_ends(tmp_path / "a", answer[:max_tokens], text, stop)
