"""`scripts/launch.sh` ends in each way that it should, with a stand-in for `swift`.

The stand-in also starts a stray process in another session, as torchrun and vLLM do.
`tests/stack/test_launch.py` launches the real `swift`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKER = "LAUNCH_SCRIPT_TEST"
PRESET = "examples/presets/server_2x6_lora"
STAND_IN = f"""#!{sys.executable} -S
import os, sys
if sys.argv[1] == "rollout":  # before slow imports: one launch waits for two seconds only
    port = int(sys.argv[sys.argv.index("--port") + 1])
    mode = os.environ.get(f"SERVER_{{port % 10}}", "ok")
    print(f"a server that is {{mode}}", flush=True)
import http.server, json, netrc, signal, subprocess, time
TRAINING_HAS_BEGUN = os.path.join(os.path.dirname(__file__), "begun")
subprocess.Popen(["sleep", "1000"], start_new_session=True)
if sys.argv[1] == "rollout":
    assert os.environ.get("VLLM_API_KEY") == os.environ.get("KEY_OF_SERVERS")
    if mode == "dead":
        sys.exit(4)
    if mode == "deaf":
        time.sleep(1000)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    server = http.server.HTTPServer(("127.0.0.1", port), Handler)
    server.timeout = 1
    while mode != "mortal" or not os.path.exists(TRAINING_HAS_BEGUN):
        server.handle_request()
    print("last words", flush=True)
    sys.exit(5)
if "FOUND" in os.environ:
    path = os.environ.get("NETRC", "/dev/null")
    found = {{
        "hosts": netrc.netrc(path).hosts,
        "mode": oct(os.stat(path).st_mode)[-3:],
        "has_key": "VLLM_API_KEY" in os.environ,
        "temporary": os.listdir(os.environ["TMPDIR"]),
    }}
    with open(os.environ["FOUND"], "w") as f:
        json.dump(found, f)
print("training", *sys.argv[2:], flush=True)
open(TRAINING_HAS_BEGUN, "w").close()
time.sleep(float(os.environ.get("SECONDS_OF_TRAINING", "0")))
sys.exit(int(os.environ.get("STATUS_OF_TRAINING", "0")))
"""

CHECK = """#!/bin/sh
[ -z "$CHECKED" ] || echo "$@" >"$CHECKED"
[ -z "$REFUSAL" ] || { echo "$REFUSAL"; exit 1; }
"""
"""Stands for `swift-grpo-ext check`, which would refuse the preset for want of GPUs and packages.
"""


@dataclass
class Launch:
    process: subprocess.Popen[bytes]
    log: Path
    marker: str

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, text: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.1)

    def end(self) -> int:
        """Return the exit status; assert that no process is left."""
        status = self.process.wait(120)
        left = family(self.marker)
        assert left == [], [process.cmdline() for process in left]
        return status


def family(marker: str) -> list[psutil.Process]:
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.environ().get(MARKER) == marker:
                members.append(process)
    return members


def free_ports() -> int:
    """Return the first of two free ports; its last digit is 0. They lie above those of
    `processes.free_port` and below those that the kernel hands out."""
    for port in range(32_000 + os.getpid() % 30 * 10, 32_760, 10):
        with suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port
    raise OSError("no free ports")


@contextmanager
def launched(
    folder: Path, *argv: str, port: int | None = None, name: str = "log", **env: str
) -> Iterator[Launch]:
    swift = folder / "bin" / "swift"
    swift.parent.mkdir(exist_ok=True)
    for program, text in ((swift, STAND_IN), (swift.with_name("swift-grpo-ext"), CHECK)):
        program.write_text(text)
        program.chmod(0o755)
    marker, log = uuid.uuid4().hex, folder / name
    logs = () if "--logs" in argv else ("--logs", str(folder / "logs"))
    command = ["bash", "scripts/launch.sh", "--port", str(port or free_ports()), *logs, *argv]
    path = f"{swift.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    with log.open("wb") as f:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PATH": path, MARKER: marker, **env},
            stdout=f,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield Launch(process, log, marker)
    finally:
        for member in family(marker):
            member.kill()
        process.wait()


TWO = ("--servers", "2", PRESET)
LONG, BRIEF = {"SECONDS_OF_TRAINING": "1000"}, {"SECONDS_OF_TRAINING": "10"}
MORTAL = {"SERVER_0": "mortal"}
KEY = "the/key+of~this.test=="
FAILS = {"STATUS_OF_TRAINING": "3", "SECONDS_OF_TRAINING": "1"}
ENDINGS: dict[str, tuple[tuple[str, ...], dict[str, str], int, bool, str]] = {
    "the training fails": ((*TWO, "--", "--seed", "1"), FAILS, 3, True, "--seed 1"),
    "never healthy": (("--wait", "2", PRESET), {"SERVER_0": "deaf"}, 1, False, "healthy after 2 s"),
    "dead too early": (TWO, {"SERVER_1": "dead"}, 1, False, "error: a server has ended"),
    "the last one dies": ((PRESET,), {**MORTAL, **LONG}, 1, True, "[server0] last"),
    "one of two dies": (TWO, {**MORTAL, **BRIEF}, 0, True, "1 server(s) of this"),
    "a signal is ignored": ((PRESET,), {"SERVER_0": "stubborn"}, 0, True, "status 0"),
    "a bad key": ((PRESET,), {"VLLM_API_KEY": "two words"}, 1, False, "error: VLLM_API_KEY"),
    "uneven": (("--rollout-gpus", "0,1,9", *TWO), {}, 1, False, "0 1 9 cannot be shared evenly"),
    "one GPU for both": (("--train-gpus", "1-3", PRESET), {}, 1, False, "GPU 1 is in both"),
}
"""Arguments, environment, exit status, whether the training starts, and a part of the output."""


@pytest.mark.parametrize("ending", ENDINGS)
def test_how_it_ends(ending: str, tmp_path: Path) -> None:
    argv, env, status, has_trained, text = ENDINGS[ending]
    with launched(tmp_path, *argv, **env) as run:
        assert run.end() == status
    assert text in run.output
    assert (f"[train] training {PRESET}.train.yaml" in run.output) == has_trained


def test_nothing_is_started_that_check_refuses(tmp_path: Path) -> None:
    checked = tmp_path / "checked"
    env = {"CHECKED": str(checked), "REFUSAL": "error: reward_funcs acuracy: is unknown"}
    argv = ("--train-gpus", "2-4", "--model", "m", "--dataset", "rows.jsonl", PRESET)
    with launched(tmp_path, *argv, "--", "--seed", "1", **env) as run:
        assert run.end() == 1
    assert "acuracy: is unknown" in run.output
    assert "[server0]" not in run.output
    command = "check --quiet --gpus 0,1,2,3,4 --ranks 3 --model m"
    assert checked.read_text() == f"{command} {PRESET} -- --dataset rows.jsonl --seed 1\n"


def test_the_servers_api_key_reaches_the_training_by_its_netrc(tmp_path: Path) -> None:
    """No log, command line or file has it."""
    own, temporary, found = tmp_path / "netrc", tmp_path / "tmp", tmp_path / "found"
    own.write_text("machine hub login me password mine\nmachine 127.0.0.1 login me password old")
    temporary.mkdir()
    env = {"VLLM_API_KEY": KEY, "KEY_OF_SERVERS": KEY, "FOUND": str(found)}
    env |= {"NETRC": str(own), "TMPDIR": str(temporary)}
    with launched(tmp_path, "--servers", "2", PRESET, **env) as run:
        assert run.end() == 0
    seen = json.loads(found.read_text())
    # The account between them is None before Python 3.11.
    logins = {host: (login, password) for host, (login, _, password) in seen["hosts"].items()}
    assert logins["127.0.0.1"] == ("swift", KEY)
    assert logins["hub"] == ("me", "mine")
    assert seen["mode"] == "600"
    assert not seen["has_key"]
    assert seen["temporary"] == []
    assert "mine" not in run.output
    found.unlink()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or KEY not in path.read_text(), path


@pytest.mark.parametrize(
    ("phase", "number", "status"),
    [("a server that is", signal.SIGINT, 130), ("training examples", signal.SIGTERM, 143)],
)
def test_told_to_end(phase: str, number: signal.Signals, status: int, tmp_path: Path) -> None:
    mode = "deaf" if phase.startswith("a server") else "ok"
    with launched(tmp_path, PRESET, SERVER_0=mode, **LONG) as run:
        run.wait_for(phase)
        os.killpg(run.process.pid, number)
        assert run.end() == status


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launched(tmp_path, PRESET, port=port) as run:
            assert run.end() == 1
    assert f"port {port} is in use on this machine" in run.output
    assert "[server0]" not in run.output


def test_torchrun_gets_a_port_that_nobody_holds(tmp_path: Path) -> None:
    """torchrun's default port is the same for all: the second training on a machine died."""
    with ExitStack() as held:
        with suppress(OSError):  # another training may hold it
            held.enter_context(socket.create_server(("127.0.0.1", 29500)))
        with launched(tmp_path, PRESET) as run:
            assert run.end() == 0
    assert re.search(r"MASTER_PORT=295(?!00)\d\d ", run.output)
    logs = ("--logs", str(tmp_path / "again"))
    with launched(tmp_path, *logs, PRESET, MASTER_PORT="29511") as run:
        assert run.end() == 0
    assert "MASTER_PORT=29511 " in run.output


def test_nodes_end_together(tmp_path: Path) -> None:
    nodes = ("--hosts", "127.0.0.1,127.0.0.1", "--rollout-nodes", "1", "--train-gpus", "0-5")
    port, env = free_ports(), {"STATUS_OF_TRAINING": "3", "SECONDS_OF_TRAINING": "1"}
    serving = launched(tmp_path, *nodes, "--node-rank", "0", PRESET, port=port, name="0", **env)
    training = launched(tmp_path, *nodes, "--node-rank", "1", PRESET, port=port, name="1", **env)
    with serving as server, training as trainer:
        assert trainer.end() == 3
        assert server.end() == 3
    assert "ended by another node: status 3 (node 1)" in server.output
    assert "[train0] training" in trainer.output
    with launched(tmp_path, PRESET, name="again") as run:
        assert run.end() == 1
    assert "holds the logs of a launch that has ended" in run.output
