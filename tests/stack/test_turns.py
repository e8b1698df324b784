"""Schedulers with faults, and tools with long answers. `test_tool_call.py` has calls that end
turns."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from tests.rig.processes import rollout_server
from tests.rig.rounds import BATCH, client_argv, logged_steps, run_training, server_argv

SCHEDULERS = ["tests/rig/scenarios.py"]


def conversations(run: Path) -> dict[str, list[SampleRow]]:
    """Return the recorded turns of each sample."""
    found: dict[str, list[SampleRow]] = {}
    for row in to_rows(read_samples(run)):
        found.setdefault(replace(row.sample_id, turn=0).request_id, []).append(row)
    return found


def test_an_image_that_training_would_not_see_stops_the_run(
    assets: Path, rows: Path, tmp_path: Path
) -> None:
    """The error names sample and turn. `test_pairs.py` has images that training sees."""
    argv = ("--multi_turn_scheduler", "look_closer", "--max_turns", "2")
    finished = run_training(assets, rows, tmp_path, *argv, steps=1)
    assert finished.returncode == 1
    error = r"train round 0\.0, group 0, sample 0 in turn 2: .*<\|vision_start\|>.*"
    assert re.search(error + r"`rollout_infos\['images'\]`", finished.output)


@pytest.mark.parametrize(
    "strategy", [pytest.param("left", marks=pytest.mark.extra), "delete", "served"]
)
def test_tools_that_say_too_much(strategy: str, assets: Path, rows: Path, tmp_path: Path) -> None:
    """A conversation ends as "length" if its next prompt exceeds `--max_length` or the engine's
    context. Training uses the turns before."""
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
