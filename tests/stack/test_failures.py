"""Replicas, servers and trainers fail in the middle of a run, and come back with the same tokens
(F1 to F4, F6, S4, V1). What hangs is named, after 3 seconds."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_rewards
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.processes import Finished, free_port, health, rollout_server
from tests.rig.rounds import (
    BATCH,
    FATE,
    FAULTY,
    SECONDS_TO_END,
    Samples,
    assert_logged,
    assert_same,
    client_argv,
    faults,
    let_go,
    recorded,
    server_argv,
    train_with_faults,
    wait_until,
)
from tests.rig.server import forked

SAVING = (*FATE, "--save_strategy", "steps", "--save_steps", "1")
WAIT = ("--rollout_timeout", "30")


@pytest.mark.parametrize("fault", [*forked.faults(in_stack=True)], ids=str)
def test_faults_of_echoing_replicas(fault: forked.Fault) -> None:
    """Each fault is in a few phases of a training, and each phase has one fault or two.
    `tests/extra/test_fault_matrix.py` has all other pairs."""
    forked.check(fault)


Failed = tuple[Path, Finished, int]
"""The folder of a run that failed, its end, and the port of its server, which lives on."""


@pytest.fixture(scope="module")
def failed(assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failed]:
    """Replica 1 is killed in round 0; step 0 waits until it is back. In step 1 rank 1 is stopped
    for 10 seconds, Ctrl-C ends the server, and another one is started at its port. In step 3 rank
    1's reward raises."""
    folder, port = tmp_path_factory.mktemp("failed"), free_port()
    waits = [folder / "waits0", folder / "waits1"]
    env = faults(
        {"step": 0, "rank": 0, "kind": "wait", "waits in": str(waits[0])},
        {"step": 1, "rank": 0, "kind": "wait", "waits in": str(waits[1])},
        {"step": 1, "rank": 1, "kind": "pause"},
        {"step": 3, "rank": 1, "kind": "raise"},
    )
    server = server_argv(assets, *WAIT, plugins=[FAULTY])
    first = rollout_server(
        *(*server, "--vllm_data_parallel_size", "2"),
        log=folder / "first.log",
        env=faults({"step": 0, "replica": 1, "kind": "kill"}),
        port=port,
        by_ctrl_c=True,
    )
    noted = {"step": 4, "kind": "kill", "noted": str(folder / "lost_at")}
    anew = rollout_server(
        *server,
        log=folder / "anew.log",
        env={**faults(noted), "MAX_RESTARTS": "0"},
        port=port,
    )
    with ThreadPoolExecutor(1) as pool:
        try:
            with first:
                train_on_two = partial(train_with_faults, ranks=2, steps=4, env=env)
                argv = (*SAVING, *client_argv(port))
                training = pool.submit(train_on_two, assets, rows, folder / "run", *argv)
                wait_until(waits[0].exists, training)
                wait_until(lambda: health(port)[1].get("waiting_for_weights", 0) > 0, training)
                let_go(waits[0])
                wait_until(waits[1].exists, training)
            with anew:
                let_go(waits[1])
                yield folder, training.result(), port
        finally:
            for wait in waits:
                let_go(wait)


def test_a_lost_replica_and_a_lost_server_come_back(failed: Failed, reference: Samples) -> None:
    """The record has the last round of both ranks, without scores."""
    folder, finished, port = failed
    samples = recorded(folder / "run")
    assert_same(samples, reference, range(4))
    drawn_by: dict[int, set[str]] = {}
    for name, sample in samples.items():
        replica = sample["infos"]["replica"].rpartition("replica ")[2]
        drawn_by.setdefault(SampleId.parse(name).step, set()).add(replica)
    assert drawn_by == {0: {"0"}, 1: {"0", "1"}, 2: {"0"}, 3: {"0"}}
    log = (folder / "first.log").read_text(encoding="utf-8")
    assert "A replica is lost (a replica has ended (EOFError))" in log
    assert "Restarting replica 1 (1 of 3)" in log
    output = finished.output
    assert "has reconnected; weights go to its 2 replicas" in output
    assert f"server 0 (http://127.0.0.1:{port}) was restarted" in output
    assert "No part of the step has ended for 0.05 minutes." in output
    assert re.search(r"rank 0: 0 min in `rewards`, at .* > happen \(faults.py:\d+\)", output)
    assert re.search(r"rank 1: 0 min in `rewards`, at .* > all_gather \(", output)
    assert "rank 1: no answer; stopped, or on a machine that is lost" in output
    assert finished.returncode != 0
    assert "the judge is gone" in output, finished.cause

    assert_logged(folder / "run/run", samples, 2)
    scored = read_rewards(folder / "run/run", columns=["step"])["step"].to_pylist()
    assert scored == [step for step in range(3) for _ in range(BATCH)]


def test_a_resumed_run_loses_its_servers_one_by_one(
    assets: Path, rows: Path, failed: Failed, reference: Samples, tmp_path: Path
) -> None:
    """It resumes in the middle of an epoch with the same server and a second one, which hangs in
    round 3. The first one is killed in round 4. With none left, the run ends within its bound."""
    env = {**faults({"step": 3, "kind": "hang"}), "MAX_RESTARTS": "0"}
    server = server_argv(assets, *WAIT, plugins=[FAULTY])
    folder, _, first = failed
    checkpoint = folder / "run/run/checkpoint-3"
    with rollout_server(*server, log=tmp_path / "two.log", env=env) as port:
        argv = (*SAVING, "--rollout_timeout", "60", *client_argv(first, port))
        argv = (*argv, "--resume_from_checkpoint", str(checkpoint))
        finished = train_with_faults(
            *(assets, rows, tmp_path / "a", *argv), ranks=2, steps=5, env=faults()
        )
        ended = time.time()
    assert finished.returncode != 0
    output = finished.output
    assert "RolloutError" in output, finished.cause
    assert f"server 0 (http://127.0.0.1:{first}) answered 503: " in output
    assert "a replica has ended (EOFError)" in output
    request = rf"server 1 \(http://127.0.0.1:{port}\): \d+ requests, the first train round 3.0, "
    assert re.search(rf"rank 0: 0 min in `generate`, .*; waits for {request}", output)
    server_log = (tmp_path / "two.log").read_text(encoding="utf-8")
    assert "waits for replica 0.0: `infer` (0 min)" in server_log
    assert "Seen by swift-grpo-ext: 1 rounds of training" in output
    assert_same(recorded(tmp_path / "a"), reference, range(3, 4))
    assert ended - float((folder / "lost_at").read_text()) < SECONDS_TO_END
