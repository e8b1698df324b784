"""Trainers and servers that end in the middle of a run, and come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.stack.processes import rollout_server
from tests.stack.rounds import (
    Samples,
    assert_same,
    client_argv,
    faults,
    recorded,
    run_training,
    server_argv,
)

pytestmark = pytest.mark.stack

PLUGINS = ("examples/digits/rewards.py", "tests/stack/recorder.py", "tests/stack/faults.py")
FATE = ("--reward_funcs", "position", "fate", "--reward_weights", "1.0", "0.0")


def wait_until(is_so: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_trainer_and_server_come_back(
    assets: Path, rows: Path, reference: Samples, tmp_path: Path
) -> None:
    """Rank 1 is killed in step 1: all ranks end. The run is resumed against the same server, on the
    same ports; while it trains step 1, the server is killed and started anew."""
    server = server_argv(assets)
    saving = ("--save_strategy", "steps", "--save_steps", "1", *FATE)
    with ExitStack() as first_start:
        port = first_start.enter_context(rollout_server(*server, log=tmp_path / "server.log"))
        argv = (*saving, *client_argv(port))
        killed = faults({"trainer": "kill", "step": 1, "rank": 1})
        finished = run_training(
            assets, rows, tmp_path / "a", *argv, ranks=2, plugins=PLUGINS, env=killed
        )
        assert finished.returncode != 0
        assert "Signal 9 (SIGKILL)" in finished.output
        assert_same(recorded(tmp_path / "a"), reference, range(2))

        argv = (*argv, "--resume_from_checkpoint", str(tmp_path / "a/run/checkpoint-1"))
        waits = faults({"trainer": "wait", "step": 1, "rank": 0, "folder": str(tmp_path)})
        with ThreadPoolExecutor(1) as pool:
            resumed = pool.submit(
                run_training, assets, rows, tmp_path / "b", *argv, plugins=PLUGINS, env=waits
            )
            wait_until(lambda: (tmp_path / "waiting").exists() or resumed.done())
            assert not resumed.done(), resumed.result().cause
            first_start.close()
            with rollout_server(*server, log=tmp_path / "anew.log", port=port):
                (tmp_path / "go").touch()
                finished = resumed.result()
    assert finished.returncode == 0, finished.cause
    assert f"server 0 (http://127.0.0.1:{port}) was started anew" in finished.output
    assert_same(recorded(tmp_path / "b"), reference, range(1, 3))
