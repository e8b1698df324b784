"""Reward functions and the record of a training on a server get the stop that ended each completion
(T1, T3, T4)."""

from __future__ import annotations

from pathlib import Path

from tests.rig.processes import rollout_server
from tests.rig.rounds import client_argv, run_training, server_argv
from tests.rig.stop_cases import NEW_TOKEN
from tests.rig.stop_training import STEPS, assert_ends, write_searcher


def test_a_training_stops_at_a_token_that_does_not_show(
    assets: Path, rows: Path, tmp_path: Path
) -> None:
    folder, answer = write_searcher(assets, tmp_path / "searcher")
    model = ("--model", str(folder), "--new_special_tokens", NEW_TOKEN)
    stops = ("--stop_token_ids", "1836", "--include_stop_str_in_output", "false", "--top_k", "1")
    with rollout_server(*server_argv(assets, *model), log=tmp_path / "server") as port:
        argv = (*model, *stops, *client_argv(port), "--reward_funcs", "stopped")
        finished = run_training(assets, rows, tmp_path / "a", *argv, steps=STEPS)
    assert finished.returncode == 0, finished.cause
    assert_ends(tmp_path / "a", answer[:4], " find it</", 1836)
