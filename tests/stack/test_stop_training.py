"""Trainings whose completions stop at a stop string or token: colocated, served, without vLLM.

The model spells ` find it</search>` with two line breaks in its last token, `More`, and a token of
`--new_special_tokens`, whatever it is asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("way", ["colocate", "transformers", "server"])
def test_a_training_stops(
    way: str,
    assets: Path,
    train: Train,
    speller: list[str],
    search_ids: list[int],
    tmp_path: Path,
) -> None:
    """At a stop string; at the last possible token; at a stop token that does not show; at a new
    token."""
    preset = without_vllm(tmp_path) if way == "transformers" else PRESET

    def check(name: str, argv: tuple[str, ...], ids: list[int], text: str, reason: Any) -> None:
        told, logged = train(name, *argv, preset=preset)
        assert told == [[text, reason, ids, False]] * TOLD
        row = {"text": text, "token_ids": ids, "finish_reason": "stop", "stop_reason": str(reason)}
        assert logged == [row] * TOLD

    def check_all(*argv: str) -> None:
        short = (*STRING, "--max_completion_length", "5")
        check("string", (*argv, *short), search_ids[:5], SEARCH_TEXT, "</search>")
        bare = ("--stop_token_ids", "1836", "--include_stop_str_in_output", "false")
        check("token", (*argv, *bare), search_ids[:4], " find it</", 1836)

    def check_new(*argv: str) -> None:
        text = f"{SEARCH_TEXT}\n\nMore{NEW_TOKEN}"
        argv = (*argv, *NEW, "--stop_words", NEW_TOKEN)
        check("new", argv, [*search_ids, NEW_ID], text, NEW_TOKEN)

    if way == "server":
        with rollout_server(*server_argv(assets, *speller), log=tmp_path / "server.log") as port:
            check_all(*client_argv(port))
        new = server_argv(assets, *speller, *NEW)
        with rollout_server(*new, log=tmp_path / "new.log") as port:
            check_new(*client_argv(port))
    else:
        check_all()
        check_new()


@pytest.mark.parametrize("way", ["colocate", "server"])
def test_conversations_whose_turns_stop(
    way: str,
    assets: Path,
    train: Train,
    speller: list[str],
    search_ids: list[int],
    tmp_path: Path,
) -> None:
    """Training takes the tokens of both turns, and no end of a turn that was not sampled: counts
    that disagree with the log-probabilities would end it."""
    turn = search_ids[:5]
    if way == "server":
        plugins = PLUGINS[1:]
        server = server_argv(
            assets, *speller, "--vllm_use_async_engine", "true", *TURNS, plugins=plugins
        )
        with rollout_server(*server, log=tmp_path / "server.log") as port:
            told, _ = train("turns", *client_argv(port), *STRING)
    else:
        told, logged = train("turns", *TURNS, *STRING)
        row = {"text": SEARCH_TEXT, "token_ids": turn, "finish_reason": "stop"}
        assert logged == [{**row, "stop_reason": "</search>"}] * (2 * TOLD)
    assert told == [[SEARCH_TEXT, "</search>", [turn, turn], False]] * TOLD
