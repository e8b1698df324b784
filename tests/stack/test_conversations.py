"""Conversations have the same samples whether the training or a server leads them, also while
engines, servers, tools and trainers fail (M1, M3, F2, F3, F6).

`test_tool_call.py` has turns that end with calls, `tests/extra/test_pairs.py` each leader with each
engine.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.processes import health, rollout_server
from tests.rig.rounds import (
    BATCH,
    FATE,
    Samples,
    client_argv,
    faults,
    logged_steps,
    recorded,
    run_training,
    server_argv,
    train_with_faults,
    wait_until,
)

BY_GROUP = ("--multi_turn_scheduler", "by_group", "--max_turns", "5")
WAIT, TOOL_WAIT = 20, 90
"""Seconds of a server's --rollout_timeout and --tool_timeout."""


def turns_of(samples: Samples, step: int) -> dict[str, Any]:
    """Return the tokens of each sample of a round, by turn, and its images."""
    return {
        name: (sample["turns"], sample["images"])
        for name, sample in samples.items()
        if SampleId.parse(name).step == step
    }


@pytest.fixture(scope="module")
def colocated(assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Two rounds of two colocated ranks. Round 2 stops the run: the training would not see an image
    that the engine saw."""
    folder = tmp_path_factory.mktemp("colocated")
    argv = (*BY_GROUP, "--max_length", "256", "--truncation_strategy", "delete")
    finished = run_training(assets, rows, folder, *argv, ranks=2)
    assert finished.returncode != 0
    error = r"train round 2\.0, group 0, sample 2 in turn 2: .*<\|vision_start\|>.*"
    assert re.search(error + r"`rollout_infos\['images'\]`", finished.output), finished.cause
    assert 'conversations of a round have ended as "length"' in finished.output
    gaps = [step["rollout_gap/max"] for step in logged_steps(folder / "run")]
    assert [0 < gap < 1e-4 for gap in gaps] == [True, True]

    conversations: dict[SampleId, list[SampleRow]] = {}
    for row in to_rows(read_samples(folder / "run")):
        conversations.setdefault(replace(row.sample_id, turn=0), []).append(row)
    for name, turns in conversations.items():
        ends = [turn.finish_reason for turn in turns if len(turn.token_ids) == 0]
        is_too_long = name.group == 1 and name.index > 0
        num_turns = 4 if is_too_long else ((1, 2, 2, 3), (2,), (2,) * 4)[name.group][name.index]
        assert (len(turns), ends) == (num_turns, ["length"] if is_too_long else [])
    return recorded(folder)


def plan(folder: Path, *events: dict[str, Any]) -> None:
    """Write the events that happen from now on."""
    (folder / "plan.json").write_text(json.dumps(events))


def time_of(event: Path) -> float:
    return float(event.read_text())


def test_a_server_leads_them_while_others_fail(
    assets: Path, rows: Path, colocated: Samples, tmp_path: Path
) -> None:
    """In turn 2 of round 0 a server loses its engine; the other one goes on, and step 0 waits until
    the first one is back. In turn 2 of round 1 a server is killed. In round 2 a tool does not
    return, other samples go on, and the trainer is killed. The next one gets the server although
    that tool works, and ends with the name of its own tool that does not return."""
    folder, waits = tmp_path / "turns", tmp_path / "waits"
    folder.mkdir()
    works = {"step": 2, "turn": 1, "kind": "works", "sample": "train-2.0-2-1"}
    plan(
        folder,
        {"step": 0, "turn": 2, "kind": "engine"},
        {"step": 1, "turn": 2, "kind": "server"},
        works,
    )
    server = server_argv(
        assets,
        *("--vllm_use_async_engine", "true", *BY_GROUP),
        *("--rollout_timeout", str(WAIT), "--tool_timeout", str(TOOL_WAIT)),
        plugins=["tests/rig/schedulers.py"],
    )
    env = faults({"step": 0, "rank": 0, "kind": "wait", "waits in": str(waits)})
    with ExitStack() as servers, ThreadPoolExecutor(1) as pool:
        ports = [
            servers.enter_context(
                rollout_server(*server, log=tmp_path / name, env={"TURNS": str(folder)})
            )
            for name in ("one.log", "two.log")
        ]
        start = partial(train_with_faults, assets, rows)
        argv = (*FATE, "--rollout_timeout", "120")
        first = partial(start, tmp_path / "a", *argv, *client_argv(*ports), env=env)
        training = pool.submit(first)
        lost_at: dict[int, float] = {}

        def is_back() -> bool:
            for port in ports:
                status, answer = health(port)
                if status == 503:
                    lost_at.setdefault(port, time.time())
                elif port in lost_at and answer.get("waiting_for_weights") == 1:
                    return True
            return False

        def others_are_done() -> bool:
            met = map(json.loads, (folder / "met.jsonl").read_text().splitlines())
            last = {(group, index): 2 for group in range(3) for index in range(4)}
            last |= {(0, 0): 1, (0, 3): 3, **{(1, index): 3 for index in (1, 2, 3)}}
            sample_ids = [(SampleId.parse(name), turn) for name, turn in met]
            done = {n for n, turn in sample_ids if n.step == 2 and turn == last[n.group, n.index]}
            return len(done) == BATCH - 1

        try:
            wait_until((folder / "engine").exists, training)
            wait_until(is_back, training)
            wait_until(waits.exists, training)
            (waits / "go").touch()
            wait_until((folder / "works").exists, training)
            wait_until(others_are_done, training)
        finally:
            waits.mkdir(exist_ok=True)
            (waits / "go").touch()
            log = str(tmp_path / "a/log")  # the training's processes write to it
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    if any(file.path == log for file in process.open_files()):
                        process.kill()
        finished = training.result()
        samples = recorded(tmp_path / "a")
        for step in range(2):
            assert len(turns_of(samples, step)) == BATCH
            assert turns_of(samples, step) == turns_of(colocated, step)
        [lost] = lost_at
        assert lost_at[lost] - time_of(folder / "engine") < WAIT, (
            "told by its end, not by a timeout"
        )
        number = ports.index(lost)
        server_log = (tmp_path / ("one.log", "two.log")[number]).read_text(encoding="utf-8")
        assert "this replica ends with it" in server_log
        assert "Restarting replica 0 (1 of 3)" in server_log
        assert f"server {number} (http://127.0.0.1:{lost}) answers again" in finished.output
        [lives] = [port for port in ports if health(port)[0] == 200]

        hangs = {"step": 0, "turn": 1, "kind": "hangs", "sample": "train-0.0-1-2"}
        plan(folder, hangs)
        finished = start(tmp_path / "b", *argv, *client_argv(lives), steps=1)
    assert time_of(folder / "hangs") - time_of(folder / "works") < TOOL_WAIT
    assert finished.returncode == 1
    assert (
        "train round 0.0, group 1, sample 2 in turn 1: --multi_turn_scheduler: ByGroup.step "
        f"has not returned for {TOOL_WAIT} s (--tool_timeout)" in finished.output
    ), finished.cause
