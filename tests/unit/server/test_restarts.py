"""A lost replica of `swift rollout` is started again, and generates once it holds weights (F4)."""

from __future__ import annotations

import errno
import os
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
from swift.pipelines.infer import rollout

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.server import replicas, routes
from swift_grpo_ext.server.replicas import Restarts
from tests.rig.server.served import Deployed, Replica, groups_of


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings and errors of the server's log."""
    lines: list[str] = []
    monkeypatch.setattr(replicas.logger, "error", lines.append)
    monkeypatch.setattr(replicas.logger, "warning", lines.append)
    return lines


def deploy(num_restarts: int) -> tuple[Deployed, Replica]:
    """Return a server that has lost its replica 0, and its replica 1."""
    ended, healthy = Replica(number=0), Replica(number=1)
    deployed = Deployed(ended, healthy)
    deployed.restarts, deployed.master_port = Restarts(deployed, num_restarts), 5
    ended.kill()
    return deployed, healthy


def test_a_replica_that_was_lost_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """It joins when a connected training asks, since a connecting one already has the number of
    replicas. It generates once it has weights. Three restarts are the budget."""
    deployed, healthy = deploy(num_restarts=3)
    client, started = deployed.client, list[Any]()

    def process(target: Any, args: Any) -> Any:
        assert target is rollout.llm_worker
        assert args[:3] == (deployed.args, 0, 5)
        replica = Replica(number=2, child=Connection(os.dup(args[3].connection.fileno())))
        started.append(replica)
        replica.start = lambda: None
        return replica

    monkeypatch.setattr(rollout, "Process", process)
    connected = {wire.INSTANCE_HEADER: routes.INSTANCE}

    def told(**headers: str) -> tuple[int, int]:
        ours = client.post("/get_engine_type/", headers=headers).json()[wire.KEY]
        return ours["replicas"], ours["starting"]

    def health() -> tuple[int, int]:
        answer = client.get("/health/").json()
        return answer["replicas"], answer["waiting_for_weights"]

    def drew() -> list[int]:
        assert groups_of(deployed.draw(4)) == [0, 1, 2, 3]
        counts = [len(replica.groups) for replica in (healthy, *started)]
        for replica in (healthy, *started):
            replica.groups.clear()
        return counts

    assert drew() == [4, 0]
    assert said[-1] == "Restarting replica 0 (1 of 3)."
    assert told(**connected) == (1, 1)  # it is still loading
    started[0].says({"status": "error", "why": "no memory"})
    assert health() == (1, 1)
    assert told(**connected) == (1, 1)  # and started once more
    assert said[-2] == "Replica 0 did not start: {'status': 'error', 'why': 'no memory'}"
    started[1].kill()
    assert health() == (1, 0)
    assert told(**connected) == (1, 1)
    assert said[-2] == "Replica 0 did not start: {'status': 'ended'}"
    started[2].says({"status": "ready"})
    assert told() == (1, 1)
    assert told(**connected) == (2, 0)
    assert [connection.name for connection in deployed.connections] == ["1.0", "0.3"]
    assert drew() == [4, 0, 0, 0]
    loaded = client.post("/process_weights_after_loading/")
    assert loaded.json() == {"message": "The weights are loaded."}
    assert drew() == [2, 0, 0, 2]
    started[2].kill()
    assert drew() == [4, 0, 0, 0]
    assert told(**connected) == (1, 0)
    assert "Giving up on replica 0 after 3 restarts." in said[-1]


def test_a_machine_that_cannot_start_a_replica_goes_on_serving(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """If memory has run out, this request and the next ones are still answered."""
    deployed, _ = deploy(num_restarts=2)

    def start() -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(rollout, "Process", lambda **_: SimpleNamespace(start=start))
    for num_awaited in (1, 0, 0):
        assert groups_of(deployed.draw()) == [0]
        assert deployed.restarts.num_awaited == num_awaited
    failed = "Replica 0 could not be started ([Errno 12] Cannot allocate memory): try "
    assert said[1:3] == [f"{failed}1 of 2.", f"{failed}2 of 2."]
    assert said[3].startswith("Giving up on replica 0 after 2 restarts.")
