"""Starts and ends of whole runs: `scripts/launch_2x6.sh`, and Ctrl-C.

These tests start the real commands with torchrun; most others fork theirs from the zygote.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.rig.memory import COLOCATED_RANK, REPLICA, TRAINING_RANK, reserved
from tests.rig.processes import SECONDS_TO_END, SWIFT, free_port, started
from tests.rig.rounds import (
    Samples,
    assert_logged,
    assert_same,
    client_argv,
    recorded,
    server_argv,
    training_command,
)


def test_two_deploy_and_six_train(
    assets: Path, rows: Path, reference: Samples, tmp_path: Path
) -> None:
    """The script starts and ends all processes. Two replicas generate for six training ranks what a
    colocated rank generates."""
    training, env = training_command(assets, rows, tmp_path, ranks=6, steps=3)
    ports = [free_port(), free_port()]
    command = [
        *("bash", "scripts/launch_2x6.sh", "--cpu", "--logs", str(tmp_path / "logs")),
        *("--port", str(ports[0]), "--group-port", str(ports[1])),
        *("--", *training[2:]),  # without `rlhf` and its preset
    ]
    env["VENV"] = os.environ.get("VENV", str(Path(sys.executable).parents[1]))
    env["ASSETS"] = str(assets)
    counted = COLOCATED_RANK  # `started` reserves this for the script
    more = 2 * REPLICA + 6 * TRAINING_RANK - counted
    with reserved(more), started(command, tmp_path / "log", env) as running:
        finished = running.wait(15 * 60)
        assert finished.returncode == 0, finished.output[-3000:]
        assert running.survivors(SECONDS_TO_END) == []
    for port in ports:
        with pytest.raises(ConnectionRefusedError), socket.socket() as client:
            client.connect(("127.0.0.1", port))
    assert "is healthy after" in finished.output
    assert re.search(r"^\[server0\] .*POST /infer/", finished.output, re.MULTILINE)
    assert re.search(r"^\[train\] .*'global_step/max_steps': '3/3'", finished.output, re.MULTILINE)
    samples = recorded(tmp_path)
    assert_logged(tmp_path / "run", samples, ranks=6)
    assert_same(samples, reference)
    assert len({sample["infos"]["replica"] for sample in samples.values()}) == 2
    assert (tmp_path / "logs/server0.log").stat().st_size > 1000
    assert (tmp_path / "logs/ended").read_text() == "0 (node 0)\n"


@pytest.mark.extra
def test_ctrl_c_ends_everything(assets: Path, rows: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the ranks of a training, then a server with its two replicas."""
    port = free_port()
    server = [str(SWIFT), "rollout", *server_argv(assets, "--vllm_data_parallel_size", "2")]
    server += ["--host", "127.0.0.1", "--port", str(port)]
    argv, env = training_command(assets, rows, tmp_path, *client_argv(port), ranks=2, steps=1000)
    training = [str(SWIFT), *argv]
    with started(server, tmp_path / "server.log", real=True) as serving:
        serving.wait_for("Uvicorn running on", seconds=900)
        with started(training, tmp_path / "log", env, real=True) as running:
            running.wait_for("'global_step/max_steps': '1/1000'", seconds=900)
            running.interrupt()
            assert running.survivors(SECONDS_TO_END) == []
            assert running.process.wait(5) != 0
        serving.interrupt()
        assert serving.survivors(SECONDS_TO_END) == []
