"""Conversations that a server leads, while engines, servers, tools and trainers fail."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.fixtures import once
from tests.rig.processes import health, rollout_server
from tests.rig.rounds import (
    BATCH,
    FATE,
    Samples,
    client_argv,
    faults,
    recorded,
    server_argv,
    train,
    train_with_faults,
    wait_until,
)

ASK_AGAIN = ("--multi_turn_scheduler", "ask_again", "--max_turns", "2")
EVENTFUL = (
    *("--multi_turn_scheduler", "eventful", "--max_turns", "2"),
    *("--vllm_use_async_engine", "true"),
)


@pytest.fixture(scope="module")
def undisturbed(assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Two rounds of conversations on one colocated rank."""

    def make(folder: Path) -> Samples:
        return train(assets, rows, folder, *ASK_AGAIN, steps=2)

    return recorded(once(tmp_path_factory, "conversations", make))


def assert_same_turns(samples: Samples, undisturbed: Samples, step: int) -> None:
    def turns(of: Samples) -> dict[str, Any]:
        return {n: s["turns"] for n, s in of.items() if SampleId.parse(n).step == step}

    assert len(turns(samples)) == BATCH
    assert turns(samples) == turns(undisturbed)


def plan(folder: Path, *events: dict[str, Any]) -> dict[str, str]:
    """Write the events that happen from now on; return the environment of a server."""
    folder.mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(events))
    return {"TURNS": str(folder)}


def test_an_engine_then_a_server_is_killed(
    assets: Path, rows: Path, undisturbed: Samples, tmp_path: Path
) -> None:
    """Server 0 loses its engine in turn 2 of round 0, reports it, and is back in round 1. In turn 2
    of round 1 server 1 is killed. Each time the conversations go on at the other server."""
    eventful = server_argv(assets, *EVENTFUL, plugins=["tests/rig/turns.py"])

    def dies(kind: str, step: int) -> list[dict[str, Any]]:
        return [
            {"sample": f"train-{step}.0-{group}-{index}", "turn": 1, "kind": kind, "after": 2}
            for group in range(3)
            for index in range(4)
        ]

    one = plan(tmp_path / "one", *dies("engine", 0))
    two = plan(tmp_path / "two", *dies("server", 1))
    waits = faults({"trainer": "wait", "step": 0, "rank": 0, "folder": str(tmp_path)})
    with (
        rollout_server(*eventful, log=tmp_path / "one.log", env=one) as port,
        rollout_server(*eventful, log=tmp_path / "two.log", env=two) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        argv = (*FATE, *client_argv(port, other), "--rollout_timeout", "120")
        training = pool.submit(
            partial(train_with_faults, env=waits, steps=2), assets, rows, tmp_path / "run", *argv
        )
        try:
            wait_until((tmp_path / "one/engine").exists, training)
            killed = time.time()
            states = []

            def is_back() -> bool:
                states.append((time.time() - killed, *health(port)))
                return states[-1][1] == 200 and states[-1][2]["waiting_for_weights"] == 1

            wait_until(is_back, training)
            wait_until((tmp_path / "waiting").exists, training)
        finally:
            (tmp_path / "go").touch()
        finished = training.result()
    assert finished.returncode == 0, finished.cause
    samples = recorded(tmp_path / "run")
    for step in range(2):
        assert_same_turns(samples, undisturbed, step)
    told_lost = [seconds for seconds, status, _ in states if status == 503]
    assert told_lost
    assert told_lost[0] < 5
    log = (tmp_path / "one.log").read_text(encoding="utf-8")
    assert "this replica ends with it" in log
    assert "Restarting replica 0 (1 of 3)" in log
    assert (tmp_path / "two/server").exists()
    assert f"server 0 (http://127.0.0.1:{port}) answers again" in finished.output


def test_slow_and_failing_tools_and_a_trainer_that_leaves(
    assets: Path, rows: Path, undisturbed: Samples, tmp_path: Path
) -> None:
    """Three trainings use one server; its tools take longer than its --rollout_timeout."""
    folder = tmp_path / "turns"
    slow = {"sample": "train-0.0-1-2", "turn": 1, "kind": "slow", "seconds": 45}
    fails = {"sample": "train-1.0-2-3", "turn": 1, "kind": "raises"}
    env = plan(folder, slow, fails)
    bounds = ("--rollout_timeout", "20", "--tool_timeout", "90")
    server = server_argv(assets, *EVENTFUL, *bounds, plugins=["tests/rig/turns.py"])
    waits = faults({"trainer": "wait", "step": 0, "rank": 0, "folder": str(tmp_path)})
    with (
        rollout_server(*server, log=tmp_path / "server.log", env=env) as port,
        ThreadPoolExecutor(1) as pool,
    ):
        argv = (*FATE, *client_argv(port), "--rollout_timeout", "120")
        start = partial(train_with_faults, assets, rows)
        # Round 0 has a slow tool; then the engine is killed; a tool of round 1 raises.
        training = pool.submit(start, tmp_path / "a", *argv, env=waits, steps=2)
        try:
            wait_until((tmp_path / "waiting").exists, training)
            assert health(port) == (
                200,
                {"status": "ok", "replicas": 1, "waiting_for_weights": 0, "weights": "sound"},
            )
            for pid in map(int, (folder / "cores").read_text().split()):
                psutil.Process(pid).kill()
            wait_until(lambda: health(port)[0] == 503, training)
        finally:
            (tmp_path / "go").touch()
        finished = training.result()
        samples = recorded(tmp_path / "a")
        assert_same_turns(samples, undisturbed, 0)
        began = float((folder / "slow").read_text())
        met = [json.loads(line) for line in (folder / "met.jsonl").read_text().splitlines()]
        meanwhile = {name for at, name, turn in met if at < began + 45 and turn == 2}
        assert len(meanwhile) == BATCH - 1, "other samples waited"
        assert finished.returncode == 1
        assert (
            "train round 1.0, group 2, sample 3 in turn 1: --multi_turn_scheduler: Eventful.step "
            "raised LookupError: no such page" in finished.output
        ), finished.cause

        # A trainer is killed while a tool works; the next one gets the server.
        plan(folder, {**slow, "kind": "left alone", "seconds": 80})
        killed = faults({"trainer": "kill", "step": 0, "rank": 0})
        training = pool.submit(start, tmp_path / "b", *argv, env=killed, steps=1)
        wait_until((folder / "left alone").exists, training)
        end_training(tmp_path / "b")
        left = time.time()
        assert training.result().returncode != 0

        # A tool does not return: the run ends in time, and names it.
        plan(folder, {**slow, "kind": "endless", "seconds": 1000})
        finished = start(tmp_path / "c", *argv, steps=1)
        assert float((folder / "endless").read_text()) - left < 60
        assert finished.returncode == 1
        assert (
            "train round 0.0, group 1, sample 2 in turn 1: --multi_turn_scheduler: Eventful.step "
            "has not returned for 90 s (--tool_timeout)" in finished.output
        ), finished.cause


def end_training(folder: Path) -> None:
    """Kill the processes that write to a training's log."""
    log = str(folder / "log")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(file.path == log for file in process.open_files()):
                process.kill()
