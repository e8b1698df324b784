"""Conversations have the same samples, whoever leads them and whichever engines generate (S2).

`scripts/support.py` makes a table of docs/support.md from the results.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.fixtures import once
from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    BATCH,
    SCENARIOS,
    SHORT_STEPS,
    Samples,
    client_argv,
    logged_steps,
    recorded,
    server_argv,
    train,
)

STEPS = 2
RESULTS = os.environ.get("CONVERSATIONS")
"""The file for the results."""

SCHEDULER = ("--multi_turn_scheduler", "by_group", "--max_turns", "5")
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

DEPLOYMENTS = {
    "colocated": ((), 2),
    "one replica": ((1,), 2),
    "two replicas": ((2,), 1),
    "two servers": ((1, 1), 2),
}
"""The replicas of each server, and the ranks of the training."""

PAIRS = [
    (leader, engine, name)
    for leader in LEADERS
    for engine in ENGINES
    for name in DEPLOYMENTS
    if (engine, name) != ("async", "colocated")
    if "server" not in leader or (engine == "async" and name != "colocated")
]


def turns_of(samples: Samples) -> dict[str, Any]:
    """Return each sample's tokens, by turn, and its images."""
    return {name: (s["turns"], s["images"]) for name, s in samples.items()}


@pytest.fixture
def colocated(
    leader: str, assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Samples:
    """The samples of one colocated rank, with a scheduler or an environment. In each turn, training
    sees the prompt that the engine saw. An environment makes a group's rows differ, which is no
    fault."""
    kind = leader.split(",")[0]

    def make(folder: Path) -> Samples:
        argv = LEADERS[f"{kind}, in the training"][0]
        return train(assets, rows, folder, *argv, steps=STEPS)

    folder = once(tmp_path_factory, f"colocated-{kind}", make)
    gaps = [step["rollout_gap/max"] for step in logged_steps(folder / "run")]
    assert [0 < gap < 1e-4 for gap in gaps] == [True] * STEPS
    samples = recorded(folder)
    if kind == "environment":
        for name, sample in samples.items():
            assert len(sample["turns"]) == 2
            question = f"Question {SampleId.parse(name).index}:"
            assert question in sample["messages"][1]["content"]
        assert "hold rows that differ" not in (folder / "log").read_text(encoding="utf-8")
    return samples


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
    """Each sample names its replica."""
    training_flags, server_flags = LEADERS[leader]
    expected = turns_of(colocated)
    replicas, ranks = DEPLOYMENTS[deployment]
    with ExitStack() as stack:
        ports = []
        for number, count in enumerate(replicas):
            argv = (*ENGINES[engine], "--vllm_data_parallel_size", str(count), *server_flags)
            server = server_argv(assets, *argv, plugins=[SCENARIOS])
            log = tmp_path / f"server{number}.log"
            ports.append(stack.enter_context(rollout_server(*server, log=log)))
        argv = (*(client_argv(*ports) if ports else ()), *training_flags)
        samples = train(assets, rows, tmp_path / "s", *argv, ranks=ranks, steps=STEPS)
        if deployment == "two replicas":
            drawers = read_samples(tmp_path / "s/run", columns=["replica"])["replica"]
            names = {name.split(") ")[1] for name in drawers.to_pylist()}
            assert names == {"replica 0", "replica 1"}
    found = turns_of(samples)
    num_equal = sum(found.get(name) == turns for name, turns in expected.items())
    if RESULTS is not None:
        path = Path(RESULTS)
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        results.append([leader, engine, deployment, ranks, num_equal, len(expected)])
        path.write_text(json.dumps(sorted(results), indent=1) + "\n", encoding="utf-8")
    assert num_equal == len(expected) == len(found) == STEPS * BATCH
