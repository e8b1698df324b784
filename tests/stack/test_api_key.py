"""A server with an API key on one address; trainings with the key and without."""

from __future__ import annotations

import base64
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from swift_grpo_ext.record.query import read_samples
from tests.rig.processes import rollout_server
from tests.rig.rounds import BATCH, client_argv, run_training, server_argv

KEY = "the-key-of-this-test"
SECONDS_TO_END = 600
"""Bound on a training from its start: a client that tries again for ever would not end."""


@pytest.fixture(scope="module")
def server_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def port(assets: Path, server_folder: Path) -> Iterator[int]:
    env = {"VLLM_API_KEY": KEY, "NETRC": "/dev/null"}
    log = server_folder / "log"
    with rollout_server(*server_argv(assets), log=log, env=env) as port:
        yield port


def test_the_server_asks_for_its_key_and_listens_where_it_is_told(
    port: int, server_folder: Path
) -> None:
    url = f"http://127.0.0.1:{port}/get_engine_type/"
    refused = requests.post(url)
    assert refused.status_code == 401
    assert "401 Unauthorized: the API key is missing" in refused.json()["detail"]
    answer = requests.post(url, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.json()["engine_type"] == "LLMEngine"
    with pytest.raises(ConnectionRefusedError), socket.socket() as elsewhere:
        elsewhere.connect(("127.0.0.2", port))  # this machine too
    log = (server_folder / "log").read_text(encoding="utf-8")
    assert "api_key='***'" in log
    assert "without an API key" not in log


@pytest.mark.parametrize("has_key", [True, False])
def test_a_training_needs_the_key_in_its_netrc(
    has_key: bool, assets: Path, rows: Path, port: int, server_folder: Path, tmp_path: Path
) -> None:
    netrc, run, began = tmp_path / "netrc", tmp_path / "run", time.monotonic()
    netrc.write_text(f"machine 127.0.0.1 login swift password {KEY}\n" if has_key else "")
    env = {"NETRC": str(netrc)}
    finished = run_training(assets, rows, run, *client_argv(port), ranks=2, steps=2, env=env)
    assert time.monotonic() - began < SECONDS_TO_END
    assert (finished.returncode == 0) is has_key, finished.cause
    if has_key:
        assert len(read_samples(run / "run")) == 2 * BATCH
        # No file holds the key, neither in plain text nor in base64.
        files = [path for path in (*run.rglob("*"), *server_folder.rglob("*")) if path.is_file()]
        assert {run / "run/args.json", run / "log", server_folder / "log"} <= set(files)
        for path in files:
            content = path.read_bytes()
            for secret in (KEY.encode(), base64.b64encode(f"swift:{KEY}".encode())):
                assert secret not in content, path
    else:
        assert "401 Unauthorized: the API key is missing" in finished.output
        assert "`machine HOST login swift password KEY` in ~/.netrc" in finished.output
