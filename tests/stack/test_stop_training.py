"""Trainings whose completions stop at a stop string or token: colocated, served, without vLLM.

The model spells ` find it</search>` with two line breaks in its last token, `More`, and a token of
`--new_special_tokens`, whatever it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from swift_grpo_ext.record.reader import read_samples
from tests.stack.processes import PLUGIN, rollout_server, swift
from tests.stack.rounds import BATCH, PRESET, client_argv, server_argv, without_vllm
from tests.stack.spelled import write_speller
from tests.stack.stop_cases import NEW_TOKEN, SEARCH, one_token

pytestmark = pytest.mark.stack

PLUGINS = ("tests/stack/stop_rewards.py", "tests/stack/scenarios.py")
STEPS = 2
TOLD = STEPS * BATCH

LINE_BREAK = 198
"""The last token of every prompt, behind `<|im_start|>assistant`."""

NEW_ID = 151665
NEW = ("--new_special_tokens", NEW_TOKEN)
TURNS = ("--multi_turn_scheduler", "ask_again", "--max_turns", "2")
STRING = ("--stop_words", "</search>")
SEARCH_TEXT = " find it</search>"


@pytest.fixture(scope="module")
def search_ids(assets: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(assets / "tiny_vlm")
    return [one_token(piece, tokenizer) for piece in SEARCH]


@pytest.fixture(scope="module")
def speller(
    assets: Path, search_ids: list[int], tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Arguments that name the model."""
    folder = tmp_path_factory.mktemp("speller") / "model"
    write_speller(assets / "tiny_vlm", folder, [[LINE_BREAK, *search_ids, NEW_ID]])
    return ["--model", str(folder)]


Train = Callable[..., tuple[list[Any], list[dict[str, Any]]]]
"""What reward functions were told of each completion, and the sample log's rows."""


@pytest.fixture
def train(rows: Path, speller: list[str], tmp_path: Path) -> Train:
    def run(name: str, *argv: str, preset: Path = PRESET) -> tuple[list[Any], list[dict[str, Any]]]:
        folder = tmp_path / name
        (folder / "record").mkdir(parents=True)
        command = [
            *("rlhf", str(preset), *speller, "--dataset", str(rows)),
            *("--external_plugins", PLUGIN, *PLUGINS),
            *("--output_dir", str(folder / "run"), "--add_version", "false"),
            *("--max_steps", str(STEPS), "--save_strategy", "no", "--learning_rate", "0"),
            *("--num_generations", "4", "--per_device_train_batch_size", str(BATCH)),
            *("--top_k", "1", "--max_completion_length", "7"),
            *("--reward_funcs", "stopped", "--reward_weights", "1.0", *argv),
        ]
        finished = swift(*command, log=folder / "log", env={"RECORD_DIR": str(folder / "record")})
        assert finished.returncode == 0, finished.cause
        lines = (folder / "record/rewards.jsonl").read_text(encoding="utf-8").splitlines()
        columns = ["text", "token_ids", "finish_reason", "stop_reason"]
        return [json.loads(line) for line in lines], read_samples(
            folder / "run", columns=columns
        ).to_pylist()

    return run


class Ends(NamedTuple):
    """Settings of stops, and how each completion ends with them."""

    argv: tuple[str, ...]
    num_tokens: int
    text: str
    reason: str | int


ENDS = {
    "string": Ends((*STRING, "--max_completion_length", "5"), 5, SEARCH_TEXT, "</search>"),
    "token": Ends(
        ("--stop_token_ids", "1836", "--include_stop_str_in_output", "false"), 4, " find it</", 1836
    ),
    "new": Ends(("--stop_words", NEW_TOKEN), 7, f"{SEARCH_TEXT}\n\nMore{NEW_TOKEN}", NEW_TOKEN),
}
"""At a stop string, at the last possible token; at a stop token that does not show; at a new
token."""


def check(way: Train, name: str, spelled: list[int], *argv: str, **more: Any) -> None:
    ends = ENDS[name]
    told, logged = way(name, *argv, *NEW, *ends.argv, **more)
    ids = spelled[: ends.num_tokens]
    assert told == [[ends.text, ends.reason, ids, False]] * TOLD
    row = {"text": ends.text, "token_ids": ids, "finish_reason": "stop"}
    assert logged == [{**row, "stop_reason": str(ends.reason)}] * TOLD


def test_a_training_stops(train: Train, search_ids: list[int]) -> None:
    """Colocated; a stop string is in the conversations below."""
    check(train, "new", [*search_ids, NEW_ID])


def test_a_training_without_vllm_stops(train: Train, search_ids: list[int], tmp_path: Path) -> None:
    check(train, "string", [*search_ids, NEW_ID], preset=without_vllm(tmp_path))


def test_a_served_training_stops(
    assets: Path, speller: list[str], train: Train, search_ids: list[int], tmp_path: Path
) -> None:
    with rollout_server(*server_argv(assets, *speller, *NEW), log=tmp_path / "server") as port:
        check(train, "token", [*search_ids, NEW_ID], *client_argv(port))


def test_conversations_whose_turns_stop(train: Train, search_ids: list[int]) -> None:
    """Training takes the tokens of both turns, and no end of a turn that was not sampled: counts
    that disagree with the log-probabilities would end it."""
    turn = search_ids[:5]
    told, logged = train("turns", *TURNS, *ENDS["string"].argv)
    row = {"text": SEARCH_TEXT, "token_ids": turn, "finish_reason": "stop"}
    assert logged == [{**row, "stop_reason": "</search>"}] * (2 * TOLD)
    assert told == [[SEARCH_TEXT, "</search>", [turn, turn], False]] * TOLD
