"""Replicas, servers and trainers that fail in the middle of a run."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from swift_grpo_ext.record.query import read_rewards, read_samples
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.processes import health, rollout_server
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
    recorded,
    run_training,
    server_argv,
    train_with_faults,
    wait_until,
)

ONCE = {"MAX_RESTARTS": "0"}


def replicas_of(samples: Samples, step: int) -> set[str]:
    step_samples = (s for name, s in samples.items() if SampleId.parse(name).step == step)
    return {s["infos"]["replica"].rpartition("replica ")[2] for s in step_samples}


def test_a_run_goes_on_and_a_lost_replica_comes_back(
    assets: Path, rows: Path, reference: Samples, tmp_path: Path
) -> None:
    """Replica 1 raises in round 0, is killed in round 1, and generates with new weights in round 2.
    The training waits in step 1 until the replica has restarted. Ctrl-C ends the whole server."""
    server = server_argv(assets, *("--vllm_data_parallel_size", "2"), plugins=[FAULTY])
    kinds = faults(
        {"step": 0, "replica": 1, "kind": "raise"}, {"step": 1, "replica": 1, "kind": "kill"}
    )
    waits = faults({"trainer": "wait", "step": 1, "rank": 0, "folder": str(tmp_path)})
    with (
        rollout_server(*server, log=tmp_path / "server.log", env=kinds, by_ctrl_c=True) as port,
        ThreadPoolExecutor(1) as pool,
    ):
        argv = (*FATE, *client_argv(port))
        train_on_two = partial(train_with_faults, ranks=2, env=waits)
        training = pool.submit(train_on_two, assets, rows, tmp_path / "run", *argv)
        try:
            wait_until(lambda: health(port)[1].get("waiting_for_weights", 0) > 0, training)
        finally:
            (tmp_path / "go").touch()
        finished = training.result()
    assert finished.returncode == 0, finished.cause
    samples = recorded(tmp_path / "run")
    assert_logged(tmp_path / "run/run", samples, ranks=2)
    assert_same(samples, reference)
    assert [replicas_of(samples, step) for step in range(3)] == [{"0"}, {"0"}, {"0", "1"}]
    assert "has reconnected; weights go to its 2 replicas" in finished.output
    server_log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert "OSError: the disk is gone" in server_log
    assert "A replica is lost (a replica has ended (EOFError))" in server_log
    assert "Restarting replica 1 (1 of 3)" in server_log


def test_servers_are_lost_one_by_one(
    assets: Path, rows: Path, reference: Samples, tmp_path: Path
) -> None:
    """The second server hangs in round 1, the first is killed in round 2. With none left, the run
    ends within its bound."""
    hangs = faults({"step": 1, "kind": "hang"})
    lost_at = tmp_path / "lost_at"
    is_killed = faults({"step": 2, "kind": "kill", "noted": str(lost_at)})
    server = server_argv(assets, "--rollout_timeout", "30", plugins=[FAULTY])
    with (
        rollout_server(*server, log=tmp_path / "one.log", env={**is_killed, **ONCE}) as one,
        rollout_server(*server, log=tmp_path / "two.log", env={**hangs, **ONCE}) as two,
    ):
        argv = ("--rollout_timeout", "60", *client_argv(one, two))
        finished = run_training(assets, rows, tmp_path / "run", *argv, ranks=2)
        ended = time.time()
    assert finished.returncode != 0
    assert "RolloutError" in finished.output, finished.cause
    assert f"server 0 (http://127.0.0.1:{one}) answered 503: " in finished.output
    assert "a replica has ended (EOFError)" in finished.output
    assert "Seen by swift-grpo-ext: 2 rounds of training, 0 of evaluation" in finished.output
    assert f"server 1 (http://127.0.0.1:{two})" in finished.output
    assert_same(recorded(tmp_path / "run"), reference, steps=range(2))
    assert ended - float(lost_at.read_text()) < SECONDS_TO_END


def test_samples_that_nobody_could_score_are_recorded(
    assets: Path, rows: Path, tmp_path: Path
) -> None:
    """A reward function raises on rank 1 in step 1: the record has that round of both ranks."""
    env = faults({"trainer": "raise", "step": 1, "rank": 1})
    argv = ("--vllm_mode", "colocate", *FATE)
    finished = train_with_faults(assets, rows, tmp_path, *argv, ranks=2, env=env)
    assert "the judge is gone" in finished.output
    assert_logged(tmp_path / "run", recorded(tmp_path), 2)
    steps = read_samples(tmp_path / "run", columns=["step"])["step"].to_pylist()
    assert steps == [0] * BATCH + [1] * BATCH
    scored = read_rewards(tmp_path / "run", columns=["step"])["step"].to_pylist()
    assert scored == [0] * BATCH


def test_a_run_that_hangs_says_who_waits_for_whom(assets: Path, rows: Path, tmp_path: Path) -> None:
    """Rank 1's reward sleeps in round 0, the replica is stopped in round 1, rank 1 is stopped in
    round 2, for 20 seconds each. Reports come after 6 seconds."""
    minutes = {"STALL_MINUTES": "0.1"}
    server = server_argv(assets, plugins=[FAULTY])
    env = minutes | faults({"step": 1, "kind": "pause"})
    with rollout_server(*server, log=tmp_path / "server.log", env=env) as port:
        kinds = faults(
            {"trainer": "sleep", "step": 0, "rank": 1}, {"trainer": "pause", "step": 2, "rank": 1}
        )
        argv = (*FATE, *client_argv(port))
        finished = train_with_faults(
            assets, rows, tmp_path, *argv, ranks=2, env={**minutes, **kinds}
        )
    assert finished.returncode == 0, finished.cause
    output = finished.output
    assert "No part of the step has ended for 0.1 minutes." in output
    assert re.search(r"rank 0: 0 min in `rewards`, at .* > all_gather \(", output)
    assert re.search(r"rank 1: 0 min in `rewards`, at .* > __call__ \(faults.py:\d+\)", output)
    request = rf"server 0 \(http://127.0.0.1:{port}\): \d+ requests, the first train round 1.0, "
    assert re.search(rf"rank 0: 0 min in `generate`, .*; waits for {request}", output)
    assert "rank 1: no answer; stopped, or on a machine that is lost" in output
    server_log = (tmp_path / "server.log").read_text(encoding="utf-8")
    assert "waits for replica 0.0: `infer` (0 min)" in server_log


def test_trainer_and_server_come_back(
    assets: Path, rows: Path, reference: Samples, tmp_path: Path
) -> None:
    """Rank 1 is killed in step 1, and all ranks end. The run is resumed with the same server and
    ports; in step 1 the server is killed and restarted."""
    server = server_argv(assets)
    saving = ("--save_strategy", "steps", "--save_steps", "1", *FATE)
    with ExitStack() as first_start, ThreadPoolExecutor(1) as pool:
        port = first_start.enter_context(rollout_server(*server, log=tmp_path / "server.log"))
        argv = (*saving, *client_argv(port))
        killed = faults({"trainer": "kill", "step": 1, "rank": 1})
        finished = train_with_faults(assets, rows, tmp_path / "a", *argv, ranks=2, env=killed)
        assert finished.returncode != 0
        assert "rank 1 has ended: -9" in finished.output
        assert_same(recorded(tmp_path / "a"), reference, range(2))

        argv = (*argv, "--resume_from_checkpoint", str(tmp_path / "a/run/checkpoint-1"))
        waits = faults({"trainer": "wait", "step": 1, "rank": 0, "folder": str(tmp_path)})
        train_again = partial(train_with_faults, env=waits)
        resumed = pool.submit(train_again, assets, rows, tmp_path / "b", *argv)
        try:
            wait_until((tmp_path / "waiting").exists, resumed)
            first_start.close()
            with rollout_server(*server, log=tmp_path / "anew.log", port=port):
                (tmp_path / "go").touch()
                finished = resumed.result()
        finally:
            (tmp_path / "go").touch()
    assert finished.returncode == 0, finished.cause
    assert f"server 0 (http://127.0.0.1:{port}) was restarted" in finished.output
    assert_same(recorded(tmp_path / "b"), reference, range(1, 3))
