"""Conversations have the same samples whether the training or a server leads them, also while
engines and tools fail (M1, M3, F2, F3). `test_failures.py` has servers and trainers that fail.

`test_tool_call.py` has turns that end with calls, `tests/extra/test_pairs.py` each leader with each
engine.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.processes import health, rollout_server
from tests.rig.rounds import (
    BATCH,
    FATE,
    SCENARIOS,
    Samples,
    client_argv,
    faults,
    let_go,
    logged_steps,
    recorded,
    run_training,
    server_argv,
    train_with_faults,
    wait_until,
)

BY_GROUP = ("--multi_turn_scheduler", "by_group", "--max_turns", "5")
WAIT, TOOL_WAIT = 20, 15
"""Seconds of a server's --rollout_timeout and --tool_timeout."""


def turns_of(samples: Samples, step: int) -> dict[str, Any]:
    """Return the tokens of each sample of a round, by turn, and its images."""
    return {
        name: (sample["turns"], sample["images"])
        for name, sample in samples.items()
        if SampleId.parse(name).step == step
    }


def colocated(assets: Path, rows: Path, folder: Path) -> Samples:
    """Return two rounds of two colocated ranks. Round 2 stops the run: the training would not see
    an image that the engine saw."""
    argv = (*BY_GROUP, "--max_length", "256", "--truncation_strategy", "delete")
    finished = run_training(assets, rows, folder, *argv, ranks=2)
    assert finished.returncode != 0
    error = r"train round 2\.0, group 0, sample 2 in turn 2: .*<\|vision_start\|>.*"
    assert re.search(error + r"`rollout_infos\['images'\]`", finished.output), finished.cause
    assert 'conversations of a round have ended as "length"' in finished.output
    gaps = [step["rollout_gap/max"] for step in logged_steps(folder / "run")]
    assert [0 < gap < 1e-4 for gap in gaps] == [True, True]
    samples = recorded(folder)
    assert {len(sample["turns"]) for sample in samples.values()} >= {1, 2, 3}
    return samples


def test_a_server_leads_them_while_others_fail(assets: Path, rows: Path, tmp_path: Path) -> None:
    """In turn 2 of round 0 a server loses its engine; the other one goes on, and step 0 waits until
    the first one is back. In round 2 a tool does not return: the run ends with its name."""
    lost, waits = tmp_path / "lost", tmp_path / "waits"
    server = server_argv(
        assets,
        *("--vllm_use_async_engine", "true", *BY_GROUP),
        *("--rollout_timeout", str(WAIT), "--tool_timeout", str(TOOL_WAIT)),
        plugins=[SCENARIOS],
    )
    env = faults({"step": 0, "rank": 0, "kind": "wait", "waits in": str(waits)})
    with ExitStack() as servers, ThreadPoolExecutor(1) as pool:
        logs = [tmp_path / "one.log", tmp_path / "two.log"]
        start = partial(rollout_server, *server, env={"LOST": str(lost)})
        ports = [servers.enter_context(start(log=log)) for log in logs]
        data = (assets, rows, tmp_path / "a")
        argv = (*FATE, "--rollout_timeout", "120", *client_argv(*ports))
        training = pool.submit(partial(train_with_faults, *data, *argv, env=env))
        lost_at: dict[int, float] = {}

        def is_back() -> bool:
            for port in ports:
                status, answer = health(port)
                if status == 503:
                    lost_at.setdefault(port, time.time())
                elif port in lost_at and answer.get("waiting_for_weights") == 1:
                    return True
            return False

        try:
            wait_until(lost.exists, training)
            wait_until(is_back, training)
            wait_until(waits.exists, training)
        finally:
            let_go(waits)
        finished = training.result()
    assert finished.returncode == 1
    assert (
        "train round 2.0, group 1, sample 2 in turn 1: --multi_turn_scheduler: ByGroup.step "
        f"has not returned for {TOOL_WAIT} s (--tool_timeout)" in finished.output
    ), finished.cause
    samples, expected = recorded(tmp_path / "a"), colocated(assets, rows, tmp_path / "colocated")
    for step in range(2):
        assert len(turns_of(samples, step)) == BATCH
        assert turns_of(samples, step) == turns_of(expected, step)
    [port] = lost_at
    assert lost_at[port] - float(lost.read_text()) < WAIT, "told by its end, not by a timeout"
    number = ports.index(port)
    server_log = logs[number].read_text(encoding="utf-8")
    assert "this replica ends with it" in server_log
    assert "Restarting replica 0 (1 of 3)" in server_log
    assert f"server {number} (http://127.0.0.1:{port}) answers again" in finished.output
