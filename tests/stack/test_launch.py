"""`scripts/launch_2x6.sh` and its general form: up, through, and down again without a trace."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.stack.memory import COLOCATED_RANK, REPLICA, TRAINING_RANK, reserved
from tests.stack.processes import Running, free_port, started

pytestmark = pytest.mark.stack

SECONDS_TO_END = 60


def launch(script: str, assets: Path, logs: Path, *argv: str) -> tuple[list[str], dict[str, str]]:
    """The command and environment of a launch on CPU, with ports of its own."""
    ports = ("--port", str(free_port()), "--group-port", str(free_port()))
    command = ["bash", f"scripts/{script}", "--cpu", *ports, "--logs", str(logs), *argv]
    venv = os.environ.get("VENV", str(Path(sys.executable).parents[1]))
    return command, {"VENV": venv, "ASSETS": str(assets)}


@contextmanager
def launched(
    script: str, assets: Path, folder: Path, *argv: str, replicas: int = 2, ranks: int = 6
) -> Iterator[Running]:
    command, env = launch(script, assets, folder / "logs", *argv)
    counted = COLOCATED_RANK  # by `started`, which takes the script for one rank
    more = replicas * REPLICA + ranks * TRAINING_RANK - counted
    with reserved(max(more, 0)), started(command, folder / "log", env) as running:
        yield running
    assert open_ports(command) == []


def open_ports(command: list[str]) -> list[int]:
    """Of the ports that a launch was given, those on which something still listens."""
    ports = [int(command[command.index(name) + 1]) for name in ("--port", "--group-port")]
    return [port for port in ports if is_open(port)]


def is_open(port: int) -> bool:
    with socket.socket() as s:
        s.settimeout(1)
        return s.connect_ex(("127.0.0.1", port)) == 0


def assert_gone(running: Running) -> None:
    left: list[psutil.Process] = running.survivors(SECONDS_TO_END)
    assert left == [], [process.cmdline() for process in left]


def test_two_deploy_and_six_train(assets: Path, tmp_path: Path) -> None:
    output = ("--", "--output_dir", str(tmp_path / "run"), "--add_version", "false")
    with launched("launch_2x6.sh", assets, tmp_path, *output) as running:
        finished = running.wait(15 * 60)
        assert finished.returncode == 0, finished.output[-3000:]
        assert_gone(running)
    assert "is healthy after" in finished.output
    assert re.search(r"^\[server0\] .*POST /infer/", finished.output, re.MULTILINE)
    assert re.search(r"^\[train\] .*'global_step/max_steps': '3/3'", finished.output, re.MULTILINE)
    assert (tmp_path / "run/logging.jsonl").is_file()
    assert (tmp_path / "logs/server0.log").stat().st_size > 1000
    assert (tmp_path / "logs/ended").read_text() == "0 (node 0)\n"
