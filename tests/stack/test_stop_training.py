"""Reward functions and the record of a training on a server get the stop that ended each completion
(T1, T3, T4)."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from swift_grpo_ext.record.query import read_samples
from tests.rig.processes import rollout_server
from tests.rig.rounds import BATCH, client_argv, read_lines, run_training, server_argv
from tests.rig.spelled import PROMPTS_END, write_speller
from tests.rig.stop_cases import NEW_TOKEN, SEARCH, token_ids


def test_a_training_stops_at_a_token_that_does_not_show(
    assets: Path, rows: Path, tmp_path: Path
) -> None:
    """The model's answer to any prompt is ` find it</search>`. No sample counts as truncated."""
    answer = token_ids(SEARCH, AutoTokenizer.from_pretrained(assets / "tiny_vlm"))
    folder = write_speller(assets / "tiny_vlm", tmp_path / "searcher", [[PROMPTS_END, *answer]])
    model = ("--model", str(folder), "--new_special_tokens", NEW_TOKEN)
    stops = ("--stop_token_ids", "1836", "--include_stop_str_in_output", "false", "--top_k", "1")
    with rollout_server(*server_argv(assets, *model), log=tmp_path / "server") as port:
        argv = (*model, *stops, *client_argv(port), "--reward_funcs", "stopped")
        finished = run_training(assets, rows, tmp_path / "a", *argv, steps=2)
    assert finished.returncode == 0, finished.cause
    text, ids = " find it</", answer[:4]
    rewarded = read_lines(tmp_path / "a/record/rewards.jsonl")
    assert rewarded == [[text, 1836, ids, False]] * 2 * BATCH
    row = {"text": text, "token_ids": ids, "finish_reason": "stop", "stop_reason": "1836"}
    assert read_samples(tmp_path / "a/run", columns=list(row)).to_pylist() == [row] * 2 * BATCH
