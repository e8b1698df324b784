"""Conversations have the same samples, whoever leads them and whichever engines generate.

`scripts/support.py` makes a table of docs/support.md from the results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from swift.rlhf_trainers.vllm_client import VLLMInferClient

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server.client import RolloutServers
from tests.rig.fixtures import once
from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    SHORT_STEPS,
    Samples,
    client_argv,
    logged_steps,
    recorded,
    server_argv,
    train,
)

STEPS = 3
RESULTS = os.environ.get("CONVERSATIONS")
"""The file for the results."""

SCHEDULER = ("--multi_turn_scheduler", "by_index", "--max_turns", "3")
GYM = (
    *("--use_gym_env", "true", "--gym_env", "examiner"),
    *("--multi_turn_scheduler", "gym_scheduler", "--max_turns", "2"),
)
REWARD = ("--reward_weights", "1.0", "1.0")
"""Weights of the environment's own reward and of the tests' reward."""

LEADERS = {
    "scheduler, in the training": (SCHEDULER, ()),
    "scheduler, on the server": ((), SCHEDULER),
    "environment, in the training": ((*GYM, *REWARD), ()),
    "environment, on the server": (REWARD, GYM),
}
"""Who leads the conversations: further arguments of the training and of a server."""

ENGINES = {
    "sync": (),
    "async": (*("--vllm_use_async_engine", "true", "--vllm_max_num_seqs", "32"), *SHORT_STEPS),
}
"""Further arguments of a server. The async engine's steps are too short for whole prompts."""

DEPLOYMENTS = {"colocated": (), "one replica": (1,), "two replicas": (2,), "two servers": (1, 1)}
"""The replicas of each server."""

RANKS = {"colocated": 2, "one replica": 2, "two replicas": 1, "two servers": 2}
CORE = {
    ("scheduler, in the training", "sync", "colocated"),
    ("scheduler, in the training", "sync", "two replicas"),
    ("scheduler, on the server", "async", "two replicas"),
}
PAIRS = [
    pytest.param(leader, engine, name, marks=[] if is_core else pytest.mark.extra)
    for leader in LEADERS
    for engine in ENGINES
    for name in DEPLOYMENTS
    for is_core in [(leader, engine, name) in CORE]
    if (engine, name) != ("async", "colocated")
    if "server" not in leader or (engine == "async" and name != "colocated")
]


def turns_of(samples: Samples) -> dict[str, tuple[list[list[int]], list[str]]]:
    """Return each sample's tokens, by turn, and its images."""
    return {name: (s["turns"], s["images"]) for name, s in samples.items()}


@contextmanager
def deployed(assets: Path, folder: Path, engine: str, name: str, *argv: str) -> Iterator[list[int]]:
    """Run the servers of a deployment; yield their ports."""
    with ExitStack() as stack:
        ports = []
        for number, replicas in enumerate(DEPLOYMENTS[name]):
            parallel = ("--vllm_data_parallel_size", str(replicas))
            command = server_argv(
                assets, *ENGINES[engine], *parallel, *argv, plugins=["tests/rig/scenarios.py"]
            )
            log = folder / f"server{number}.log"
            ports.append(stack.enter_context(rollout_server(*command, log=log)))
        yield ports


@pytest.fixture
def colocated(
    leader: str, assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Samples:
    """The samples of one colocated rank, with a scheduler or an environment. In each turn, training
    sees the prompt that the engine saw."""
    kind = leader.split(",")[0]

    def make(folder: Path) -> Samples:
        argv = LEADERS[f"{kind}, in the training"][0]
        return train(assets, rows, folder, *argv, steps=STEPS)

    folder = once(tmp_path_factory, f"colocated-{kind}", make)
    assert [0 < step["rollout_gap/max"] < 1e-4 for step in logged_steps(folder / "run")] == (
        [True] * STEPS
    )
    samples = recorded(folder)
    log = (folder / "log").read_text(encoding="utf-8")
    numbers = {"scheduler": (1, 2, 2, 3), "environment": (2, 2, 2, 2)}[kind]
    for name, sample in samples.items():
        index = SampleId.parse(name).index
        assert len(sample["turns"]) == numbers[index]
        if kind == "environment":  # it makes a group's rows differ, which is no fault
            assert f"Question {index}:" in sample["messages"][1]["content"]
            assert "hold rows that differ" not in log
    return samples


def record_result(
    leader: str, engine: str, deployment: str, ranks: int, equal: int, total: int
) -> None:
    if RESULTS is None:
        return
    path = Path(RESULTS)
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    results.append([leader, engine, deployment, ranks, equal, total])
    path.write_text(json.dumps(sorted(results), indent=1) + "\n", encoding="utf-8")


@pytest.mark.parametrize(("leader", "engine", "deployment"), PAIRS)
def test_who_leads_and_who_draws(
    leader: str,
    engine: str,
    deployment: str,
    assets: Path,
    rows: Path,
    tmp_path: Path,
    colocated: Samples,
) -> None:
    """All replicas of a server have the weights, and each sample names its replica."""
    training_flags, server_flags = LEADERS[leader]
    reference, ranks = turns_of(colocated), RANKS[deployment]
    with deployed(assets, tmp_path, engine, deployment, *server_flags) as ports:
        argv = (*(client_argv(*ports) if ports else ()), *training_flags)
        samples = train(assets, rows, tmp_path / "s", *argv, ranks=ranks, steps=STEPS)
        if deployment == "two replicas":
            client = VLLMInferClient(base_urls=[f"http://127.0.0.1:{ports[0]}"])
            (_, first), (_, second) = RolloutServers(client, timeout=600.0).weight_reports()
            assert first.loaded == second.loaded != {}
            drawers = read_samples(tmp_path / "s/run", columns=["replica"])["replica"]
            names = {name.split(") ")[1] for name in drawers.to_pylist()}
            assert names == {"replica 0", "replica 1"}
    found = turns_of(samples)
    equal = [name for name, turns in reference.items() if found.get(name) == turns]
    record_result(leader, engine, deployment, ranks, len(equal), len(reference))
    assert len(equal) == len(reference) == len(found) == 36
