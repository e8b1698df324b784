"""Trainings whose completions stop: the arguments of reward functions, and the record.

Whatever the prompt, the model spells ` find it</search>` with two line breaks in its last token,
then `More` and a token of `--new_special_tokens`.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoTokenizer

from swift_grpo_ext.record.query import read_samples
from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    BATCH,
    client_argv,
    read_lines,
    run_training,
    server_argv,
)
from tests.rig.spelled import PROMPTS_END, write_speller
from tests.rig.stop_cases import NEW_TOKEN, SEARCH, one_token

NUM_SAMPLES = 2 * BATCH

NEW_ID = 151665
SEARCH_TEXT = " find it</search>"
STRING = ("--stop_words", "</search>", "--max_completion_length", "5")
NEW = ("--new_special_tokens", NEW_TOKEN)


class Ends(NamedTuple):
    """Settings of stops, and how each completion ends with them."""

    argv: tuple[str, ...]
    num_tokens: int
    text: str
    reason: str | int


ENDS = {
    # at a new token
    "colocated": Ends(
        (*NEW, "--stop_words", NEW_TOKEN), 7, f"{SEARCH_TEXT}\n\nMore{NEW_TOKEN}", NEW_TOKEN
    ),
    # at a stop string, at the last possible token
    "at a string": Ends((*NEW, *STRING), 5, SEARCH_TEXT, "</search>"),
    # at a stop token that does not show
    "served": Ends(
        (*NEW, "--stop_token_ids", "1836", "--include_stop_str_in_output", "false"),
        4,
        " find it</",
        1836,
    ),
}


OTHERS = [pytest.param(way, marks=pytest.mark.extra) for way in ENDS if way != "served"]


@pytest.mark.parametrize("way", ["served", *OTHERS])
def test_a_training_stops(way: str, assets: Path, rows: Path, tmp_path: Path) -> None:
    ends, folder, run = ENDS[way], tmp_path / "speller", tmp_path / "a"
    tokenizer = AutoTokenizer.from_pretrained(assets / "tiny_vlm")
    spelled = [*(one_token(piece, tokenizer) for piece in SEARCH), NEW_ID]
    write_speller(assets / "tiny_vlm", folder, [[PROMPTS_END, *spelled]])
    model = ("--model", str(folder))
    argv = (*model, "--top_k", "1", "--max_completion_length", "7", *ends.argv)
    with ExitStack() as servers:
        if way == "served":
            server = rollout_server(*server_argv(assets, *model, *NEW), log=tmp_path / "server")
            argv += (*client_argv(servers.enter_context(server)),)
        reward = ("--reward_funcs", "stopped")
        finished = run_training(assets, rows, run, *argv, *reward, steps=2)
    assert finished.returncode == 0, finished.cause
    ids = spelled[: ends.num_tokens]
    expected = [ends.text, ends.reason, ids, False]
    assert read_lines(run / "record/rewards.jsonl") == [expected] * NUM_SAMPLES
    row = {"text": ends.text, "token_ids": ids, "finish_reason": "stop"}
    row["stop_reason"] = str(ends.reason)
    logged = read_samples(run / "run", columns=list(row)).to_pylist()
    assert logged == [row] * NUM_SAMPLES
