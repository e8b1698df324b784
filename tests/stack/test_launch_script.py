"""`scripts/launch.sh` ends all that it started, and shows no key (F7), with a stand-in for `swift`.

The stand-in also starts a stray process in another session, as torchrun and vLLM do.
`tests/extra/test_launch.py` launches the real `swift`.
"""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.rig.processes import Running, free_port, started

PRESET = "examples/presets/server_2x6_lora"
STAND_IN = f"""#!{sys.executable} -S
import os, sys
if sys.argv[1] == "rollout":  # before slow imports: one launch waits for two seconds only
    port = int(sys.argv[sys.argv.index("--port") + 1])
    number = port - int(os.environ["FIRST_PORT"])
    mode = os.environ.get(f"SERVER_{{number}}", "ok")
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


@contextmanager
def launched(
    folder: Path, *argv: str, port: int | None = None, name: str = "log", **env: str
) -> Iterator[Running]:
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for program, text in (("swift", STAND_IN), ("swift-grpo-ext", CHECK)):
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)
    first, _second = port or free_port(), free_port()
    own_argv = ("--port", str(first), "--logs", str(folder / "logs"))
    command = ["bash", "scripts/launch.sh", *own_argv, *argv]
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    # No memory is reserved: no process loads a model.
    own = {"PATH": path, "MASTER_PORT": "", "NPROC_PER_NODE": "0", "FIRST_PORT": str(first), **env}
    with started(command, folder / name, own) as run:
        yield run


def end(run: Running) -> int:
    """Return the exit status; assert that no process is left."""
    status = run.wait(120).returncode
    assert run.survivors(0) == []
    return status


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
        assert end(run) == status
    assert text in run.output
    assert (f"[train] training {PRESET}.train.yaml" in run.output) == has_trained


def test_nothing_is_started_that_is_refused(tmp_path: Path) -> None:
    """`check` refuses a launch, or its port is in use."""
    checked = tmp_path / "checked"
    env = {"CHECKED": str(checked), "REFUSAL": "error: reward_funcs acuracy: is unknown"}
    argv = ("--train-gpus", "2-4", "--model", "m", "--dataset", "rows.jsonl", PRESET)
    with launched(tmp_path, *argv, "--", "--seed", "1", **env) as run:
        assert end(run) == 1
    assert "acuracy: is unknown" in run.output
    command = "check --quiet --gpus 0,1,2,3,4 --ranks 3 --model m"
    assert checked.read_text() == f"{command} {PRESET} -- --dataset rows.jsonl --seed 1\n"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with launched(tmp_path, PRESET, port=port, name="again") as again:
            assert end(again) == 1
    assert f"port {port} is in use on this machine" in again.output
    assert "[server0]" not in run.output + again.output


def test_the_servers_api_key_reaches_the_training_by_its_netrc(tmp_path: Path) -> None:
    """No log, command line or file has it. torchrun gets a port that nobody holds: its default is
    the same for all, and the second training on a machine died."""
    own, temporary, found = tmp_path / "netrc", tmp_path / "tmp", tmp_path / "found"
    own.write_text("machine hub login me password mine\nmachine 127.0.0.1 login me password old")
    temporary.mkdir()
    env = {"VLLM_API_KEY": KEY, "KEY_OF_SERVERS": KEY, "FOUND": str(found)}
    env |= {"NETRC": str(own), "TMPDIR": str(temporary)}
    with ExitStack() as held:
        with suppress(OSError):  # another training may hold it
            held.enter_context(socket.create_server(("127.0.0.1", 29500)))
        with launched(tmp_path, "--servers", "2", PRESET, **env) as run:
            assert end(run) == 0
    assert re.search(r"MASTER_PORT=295(?!00)\d\d ", run.output)
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
def test_a_signal_ends_all(phase: str, number: signal.Signals, status: int, tmp_path: Path) -> None:
    mode = "deaf" if phase.startswith("a server") else "ok"
    with launched(tmp_path, PRESET, SERVER_0=mode, **LONG) as run:
        run.wait_for(phase, 120)
        os.killpg(run.pid, number)
        assert end(run) == status


def test_nodes_end_together(tmp_path: Path) -> None:
    nodes = ("--hosts", "127.0.0.1,127.0.0.1", "--rollout-nodes", "1", "--train-gpus", "0-5")
    port = free_port()
    serving = launched(tmp_path, *nodes, "--node-rank", "0", PRESET, port=port, name="0", **FAILS)
    training = launched(tmp_path, *nodes, "--node-rank", "1", PRESET, port=port, name="1", **FAILS)
    with serving as server, training as trainer:
        assert end(trainer) == 3
        assert end(server) == 3
    assert "ended by another node: status 3 (node 1)" in server.output
    assert "[train0] training" in trainer.output
