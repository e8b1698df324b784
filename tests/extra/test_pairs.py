"""Conversations have the same samples, whoever leads them and whichever engines generate (S2).

`scripts/support.py` makes a table of docs/support.md from the results.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.families import record_result
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

KINDS = {
    "scheduler": ("--multi_turn_scheduler", "by_group", "--max_turns", "5"),
    "environment": (
        *("--use_gym_env", "true", "--gym_env", "examiner"),
        *("--multi_turn_scheduler", "gym_scheduler", "--max_turns", "2"),
    ),
}
"""Arguments of the training or the server that leads the conversations."""

REWARDS = {"scheduler": (), "environment": ("--reward_weights", "1.0", "1.0")}
"""The environment's own reward comes before the tests' reward."""

ENGINES = {
    "sync": (),
    "async": (*("--vllm_use_async_engine", "true", "--vllm_max_num_seqs", "32"), *SHORT_STEPS),
}
"""Further arguments of a server. The async engine's steps are too short for whole prompts."""


def turns_of(samples: Samples) -> dict[str, Any]:
    """Return each sample's tokens, by turn, and its images."""
    return {name: (s["turns"], s["images"]) for name, s in samples.items()}


@pytest.fixture
def colocated(
    kind: str, assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Samples:
    """The samples of two colocated ranks. In each turn, training sees the prompt that the engine
    saw. An environment makes a group's rows differ, which is no fault."""

    def make(folder: Path) -> Samples:
        return train(assets, rows, folder, *KINDS[kind], *REWARDS[kind], ranks=2, steps=STEPS)

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


@pytest.mark.parametrize(
    ("leader", "engine", "replicas", "ranks"),
    [
        ("training", "sync", "2", 2),
        ("training", "async", "1 and 1", 1),
        ("server", "async", "2", 2),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_who_leads_and_who_draws(
    kind: str,
    leader: str,
    engine: str,
    replicas: str,
    ranks: int,
    assets: Path,
    rows: Path,
    tmp_path: Path,
    colocated: Samples,
) -> None:
    """Each sample names its replica."""
    leads = leader == "training"
    training_flags, server_flags = (KINDS[kind], ()) if leads else ((), KINDS[kind])
    with ExitStack() as stack:
        ports = []
        for number, count in enumerate(replicas.split(" and ")):
            argv = (*ENGINES[engine], "--vllm_data_parallel_size", str(count), *server_flags)
            server = server_argv(assets, *argv, plugins=[SCENARIOS])
            log = tmp_path / f"server{number}.log"
            ports.append(stack.enter_context(rollout_server(*server, log=log)))
        argv = (*client_argv(*ports), *training_flags, *REWARDS[kind])
        samples = train(assets, rows, tmp_path / "s", *argv, ranks=ranks, steps=STEPS)
    drawers = read_samples(tmp_path / "s/run", columns=["replica"])["replica"]
    assert len(set(drawers.to_pylist())) == 2
    expected, found = turns_of(colocated), turns_of(samples)
    num_equal = sum(found.get(name) == turns for name, turns in expected.items())
    counts = {"replicas": replicas, "ranks": ranks, "equal": num_equal}
    record_result(f"{kind}, {leader}", engine, **counts, samples=len(expected))
    assert num_equal == len(expected) == len(found) == STEPS * BATCH
