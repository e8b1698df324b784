"""`scripts/launch_2x6.sh` starts and ends all processes of real servers and a real training.

`tests/extra/test_launch.py` has six ranks, and Ctrl-C. Most other tests fork their processes from
the zygote.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.rig.memory import COLOCATED_RANK, REPLICA, TRAINING_RANK, reserved
from tests.rig.processes import SECONDS_TO_END, free_port, started
from tests.rig.rounds import Samples, assert_logged, assert_same, recorded, training_command


def test_two_deploy_and_two_train(
    assets: Path, rows: Path, reference: Samples, tmp_path: Path
) -> None:
    """Two replicas generate for two ranks what a colocated rank generates."""
    training, env = training_command(assets, rows, tmp_path, ranks=2, steps=2)
    ports = [free_port(), free_port()]
    command = [
        *("bash", "scripts/launch_2x6.sh", "--cpu", "--train-gpus", "2,3"),
        *("--port", str(ports[0]), "--group-port", str(ports[1])),
        *("--logs", str(tmp_path / "logs")),
        *("--", *training[2:]),  # without `rlhf` and its preset
    ]
    env["VENV"] = os.environ.get("VENV", str(Path(sys.executable).parents[1]))
    env["ASSETS"] = str(assets)
    more = 2 * (REPLICA + TRAINING_RANK - COLOCATED_RANK)  # `started` counts colocated ranks
    with reserved(more), started(command, tmp_path / "log", env) as running:
        finished = running.wait(15 * 60)
        assert finished.returncode == 0, finished.output[-3000:]
        assert running.survivors(SECONDS_TO_END) == []
    for port in ports:
        with pytest.raises(ConnectionRefusedError), socket.socket() as client:
            client.connect(("127.0.0.1", port))
    assert "is healthy after" in finished.output
    assert re.search(r"^\[server0\] .*POST /infer/", finished.output, re.MULTILINE)
    assert re.search(r"^\[train\] .*'global_step/max_steps': '2/2'", finished.output, re.MULTILINE)
    samples = recorded(tmp_path)
    assert_logged(tmp_path / "run", samples, ranks=2)
    assert_same(samples, reference, range(2))
    assert len({sample["infos"]["replica"] for sample in samples.values()}) == 2
    assert (tmp_path / "logs/server0.log").stat().st_size > 1000
    assert (tmp_path / "logs/ended").read_text() == "0 (node 0)\n"
