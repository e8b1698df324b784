"""The fault harness' cells on the real stack: one server of two replicas, and trainings that meet a
fault or two in each step (SPEC F1 to F6). `fault_table.ON_REAL_STACK` is the list.

Replica 1 takes its first weights, and no others: the trainings at learning rate 0 do not notice,
and the canary does in the one that learns.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import requests

from tests.server.fault_table import ON_REAL_STACK, RealFault
from tests.stack import armed
from tests.stack.policy import SAME
from tests.stack.processes import rollout_server
from tests.stack.rounds import (
    Samples,
    assert_logged,
    client_argv,
    faults,
    recorded,
    run_training,
    server_argv,
    token_ids,
)

pytestmark = [pytest.mark.stack, pytest.mark.extra]

PLUGINS = ("tests/stack/faults.py", "tests/stack/armed.py")
OF_TRAINING = ("examples/digits/rewards.py", "tests/stack/recorder.py", "tests/stack/armed.py")
STEPS = max(fault.step for fault in ON_REAL_STACK) + 1
TIMEOUT = 45
NUM_LOST = sum(fault.loses_replica for fault in ON_REAL_STACK)


class Server:
    """A server, and the folder in which its faults are armed."""

    def __init__(self, port: int, proxy: int, at: Path, log: Path) -> None:
        self.port, self.proxy, self.at, self.log = port, proxy, at, log
        self.url = f"http://127.0.0.1:{port}"

    def schedule(self, planned: list[RealFault]) -> None:
        for path in self.at.glob("step*"):
            path.unlink()
        listed = [{**asdict(f), "method": f.method} for f in planned]
        (self.at / "schedule.json").write_text(json.dumps(listed), encoding="utf-8")


@pytest.fixture(scope="module")
def server(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    at, log = folder / "armed", folder / "log"
    at.mkdir()
    bounds = ("--rollout_timeout", str(TIMEOUT))
    argv = server_argv(assets, "--vllm_data_parallel_size", "2", *bounds, plugins=PLUGINS)
    env = {
        "ARMED": str(at),
        "MAX_RESTARTS": str(NUM_LOST),
        **faults({"weights": "ignore", "replica": 1}),
    }
    with (
        rollout_server(*argv, log=log, env=env) as port,
        armed.breaking_proxy(port, at) as proxy,
    ):
        (at / "url").write_text(f"http://127.0.0.1:{port}")
        yield Server(port, proxy, at, log)


@pytest.fixture(scope="module")
def undisturbed(
    assets: Path, rows: Path, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Samples:
    server.schedule([])
    return training(assets, rows, tmp_path_factory.mktemp("undisturbed") / "run", server)


def training(assets: Path, rows: Path, folder: Path, server: Server) -> Samples:
    argv = [*client_argv(server.proxy), "--rollout_timeout", str(TIMEOUT)]
    argv += ["--rollout_mismatch", "warn", "--reward_funcs", "position", "arm"]
    argv += ["--reward_weights", "1.0", "0.0"]
    argv += ["--val_dataset", str(rows), "--eval_strategy", "steps", "--eval_steps", "4"]
    argv += ["--per_device_eval_batch_size", "12", "--num_generations_eval", "2"]
    env = {"ARMED": str(server.at)}
    finished = run_training(assets, rows, folder, *argv, steps=STEPS, plugins=OF_TRAINING, env=env)
    assert finished.returncode == 0, finished.cause
    samples = recorded(folder)
    assert_logged(folder / "run", samples, ranks=1)
    return samples


@contextmanager
def half_sent_body(port: int) -> Iterator[None]:
    """Of a client that never sends the rest."""
    with closing(socket.create_connection(("127.0.0.1", port))) as client:
        head = "POST /infer/ HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        yield


def test_faults_in_every_phase(
    assets: Path, rows: Path, server: Server, undisturbed: Samples, tmp_path: Path
) -> None:
    """All are met, and every token is that of the undisturbed run, in evaluations too. Beside it
    a second training is refused by name, and a body that is sent by half holds up nobody."""
    server.schedule(ON_REAL_STACK)
    with ThreadPoolExecutor(1) as pool, half_sent_body(server.port):
        running = pool.submit(partial(training, assets, rows, tmp_path / "run", server))
        wait_for(server.at / "step2", running.done)
        second = run_training(assets, rows, tmp_path / "second", *client_argv(server.port), steps=1)
        samples = running.result()
    assert not [path.name for path in server.at.iterdir() if "@" in path.name], "never met"
    assert token_ids(samples) == token_ids(undisturbed)
    assert {name.partition("-")[0] for name in samples} == {"train", "eval"}
    log = server.log.read_text(encoding="utf-8")
    assert log.count("A replica is lost") == NUM_LOST
    assert f"is started anew ({NUM_LOST} of {NUM_LOST})" in log
    assert second.returncode != 0
    named = rf"this server belongs to another training: {re.escape(str(tmp_path / 'run/run'))} "
    assert re.search(named, second.output), second.cause


def test_a_bad_request_is_refused_and_harms_nobody(server: Server) -> None:
    body = {"infer_requests": [{"messages": None}], "request_config": {"max_tokens": 4}}
    refused = requests.post(f"{server.url}/infer/", json=body, timeout=TIMEOUT)
    assert refused.status_code == 422
    for words in ('"infer_requests",0,"messages"', "should be a valid list", '"input":null'):
        assert words in refused.text
    armed.wait_for_replicas(server.url)


def test_a_served_engine_that_does_not_use_its_weights_is_noticed(
    assets: Path, rows: Path, server: Server, tmp_path: Path
) -> None:
    """Its checksums and names are right; the canary sings after the first step that has changed
    them, and names the replica."""
    argv = [*client_argv(server.port), "--learning_rate", "1e-3"]
    finished = run_training(assets, rows, tmp_path / "run", *argv)
    assert finished.returncode != 0
    words = "does not sample with the trainer's weights: at step 1"
    assert f"WeightUpdateError: server 0 (http://127.0.0.1:{server.port}) replica 1 {words}" in (
        finished.output
    ), finished.cause
    log = (tmp_path / "run/run/logging.jsonl").read_text(encoding="utf-8")
    assert json.loads(log.splitlines()[0])["rollout_gap/canary"] < SAME


def wait_for(path: Path, has_ended: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert not has_ended()
        assert time.monotonic() < deadline
        time.sleep(0.2)
