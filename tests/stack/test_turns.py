"""What schedulers do: images, long answers of tools, calls that end turns, and what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from swift_grpo_ext.record.reader import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from tests.stack.processes import rollout_server
from tests.stack.rounds import BATCH, client_argv, logged_steps, run_training, server_argv
from tests.stack.spelled import PROMPTS_END, write_speller

pytestmark = pytest.mark.stack

SCHEDULERS = ["tests/stack/scenarios.py"]
CALL = '<tool_call>{"name": "zoom"}</tool_call>'


def conversations(run: Path) -> dict[str, list[SampleRow]]:
    """The turns of each sample in the record."""
    found: dict[str, list[SampleRow]] = {}
    for row in to_rows(read_samples(run)):
        found.setdefault(replace(row.sample_id, turn=0).request_id, []).append(row)
    return found


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("look_closer", r"in turn 2: .*<\|vision_start\|>.*`rollout_infos\['images'\]`"),
        pytest.param("other_rules", "in turn 1: .*Be quick", marks=pytest.mark.extra),
    ],
    ids=["images", "system prompt"],
)
def test_what_training_would_not_see_stops_the_run(
    name: str, told: str, assets: Path, rows: Path, tmp_path: Path
) -> None:
    """With sample and turn; `test_pairs.py` has images that training sees."""
    argv = ("--multi_turn_scheduler", name, "--max_turns", "2")
    finished = run_training(assets, rows, tmp_path, *argv, steps=1)
    assert finished.returncode == 1
    assert re.search(rf"train round 0\.0, group 0, sample 0 {told}", finished.output)


@pytest.mark.parametrize(
    "strategy", [pytest.param("left", marks=pytest.mark.extra), "delete", "served"]
)
def test_tools_that_say_too_much(strategy: str, assets: Path, rows: Path, tmp_path: Path) -> None:
    """A conversation ends as "length" where its next prompt has no room, beyond `--max_length` or
    in the engine, and is trained on as far as it came."""
    argv = ["--multi_turn_scheduler", "long_tool", "--max_turns", "5"]
    run = tmp_path / "a"
    if strategy == "served":
        server = server_argv(assets, "--vllm_use_async_engine", "true", *argv, plugins=SCHEDULERS)
        with rollout_server(*server, log=tmp_path / "server.log") as port:
            finished = run_training(assets, rows, run, *client_argv(port), steps=1)
    else:
        argv += ["--max_length", "256", "--truncation_strategy", strategy]
        finished = run_training(assets, rows, run, *argv, steps=1)
    assert finished.returncode == 0, finished.cause
    assert '9 of 12 conversations of a round have ended as "length"' in finished.output
    found = conversations(run / "run")
    assert len(found) == BATCH
    for turns in found.values():
        ends = [turn.finish_reason for turn in turns if len(turn.token_ids) == 0]
        is_first = turns[0].sample_id.index == 0
        assert (len(turns), ends) == ((2, []) if is_first else (4, ["length"]))
    [step] = logged_steps(run / "run")
    assert 0 < step["rollout_gap/max"] < 1e-5


@pytest.mark.extra
def test_turns_that_end_with_a_call(assets: Path, rows: Path, tmp_path: Path) -> None:
    """A model that writes `</tool_call>`, the stop string: the engine and the training have the
    same tokens in each turn, and none after it."""
    tokenizer = AutoTokenizer.from_pretrained(assets / "tiny_vlm")
    spelled = tokenizer(f"{CALL}\n\nMore", add_special_tokens=False)["input_ids"]
    folder = write_speller(assets / "tiny_vlm", tmp_path / "speller", [[PROMPTS_END, *spelled]])
    argv = [
        *("--model", str(folder), "--top_k", "1", "--max_completion_length", "40"),
        *("--stop_words", "</tool_call>", "--multi_turn_scheduler", "ask_again"),
        *("--max_turns", "2", "--rollout_mismatch", "stop"),
    ]
    finished = run_training(assets, rows, tmp_path / "a", *argv, steps=1)
    assert finished.returncode == 0, finished.cause
    for turns in conversations(tmp_path / "a/run").values():
        assert [turn.text for turn in turns] == [CALL] * 2
        assert [turn.stop_reason for turn in turns] == ["</tool_call>"] * 2
        assert all(tokenizer.decode(turn.token_ids) == CALL for turn in turns)
