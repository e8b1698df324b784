"""`scripts/launch_2x6.sh` starts and ends all processes of real servers and a real training, and so
does Ctrl-C. Most other tests fork their processes from the zygote."""

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from tests.rig.memory import COLOCATED_RANK, REPLICA, TRAINING_RANK, reserved
from tests.rig.processes import SECONDS_TO_END, SWIFT, free_port, started
from tests.rig.rounds import client_argv, server_argv, training_command


def test_two_deploy_and_six_train_on_conversations(assets: Path, tmp_path: Path) -> None:
    """The servers lead the conversations; turns end with calls, and training learns from them."""
    ports = [str(free_port()), str(free_port())]
    command = [
        *("bash", "scripts/launch_2x6.sh", "--cpu", "examples/tool_call/served"),
        *("--port", ports[0], "--group-port", ports[1], "--logs", str(tmp_path / "logs")),
        *("--", "--max_steps", "2", "--output_dir", str(tmp_path / "run")),
        *("--add_version", "false"),
    ]
    venv = os.environ.get("VENV", str(Path(sys.executable).parents[1]))
    env = {"VENV": venv, "ASSETS": str(assets)}
    more = 2 * REPLICA + 6 * TRAINING_RANK - COLOCATED_RANK  # `started` counts the script as one
    with reserved(more), started(command, tmp_path / "log", env) as running:
        finished = running.wait(15 * 60)
        assert finished.returncode == 0, finished.output[-3000:]
        assert running.survivors(SECONDS_TO_END) == []
    for port in ports:
        with pytest.raises(ConnectionRefusedError), socket.socket() as client:
            client.connect(("127.0.0.1", int(port)))
    assert "is healthy after" in finished.output
    assert re.search(r"^\[server0\] .*POST /infer/", finished.output, re.MULTILINE)
    assert re.search(r"^\[train\] .*'global_step/max_steps': '2/2'", finished.output, re.MULTILINE)
    assert (tmp_path / "logs/server0.log").stat().st_size > 1000
    assert (tmp_path / "logs/ended").read_text() == "0 (node 0)\n"
    rows = to_rows(read_samples(tmp_path / "run"))
    turns = {(row.sample_id.step, row.sample_id.turn) for row in rows}
    assert turns == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len({row.sample_id for row in rows if row.sample_id.turn == 0}) == 2 * 6 * 8
    assert len({row.replica for row in rows}) == 2
    stopped = [row for row in rows if row.stop_reason == "</answer>"]
    assert len(stopped) > 0.5 * len(rows)
    assert all(row.text.endswith("</answer>") for row in stopped)
    assert "NaN" not in (tmp_path / "run/logging.jsonl").read_text(encoding="utf-8")


def test_ctrl_c_ends_everything(assets: Path, rows: Path, tmp_path: Path) -> None:
    """Ctrl-C ends the ranks of a training, then a server with its two replicas."""
    real, port = ("env", str(SWIFT)), free_port()  # `env` is not forked from the zygote
    server = [*real, "rollout", *server_argv(assets, "--vllm_data_parallel_size", "2")]
    server += ["--host", "127.0.0.1", "--port", str(port)]
    argv, env = training_command(assets, rows, tmp_path, *client_argv(port), ranks=2, steps=1000)
    with started(server, tmp_path / "server.log") as serving:
        serving.wait_for("Uvicorn running on", seconds=900)
        with started([*real, *argv], tmp_path / "log", env) as running:
            running.wait_for("'global_step/max_steps': '1/1000'", seconds=900)
            running.interrupt()
            assert running.wait(5).returncode != 0
        serving.interrupt()
