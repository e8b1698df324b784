"""Trainings of a mixture of experts on the experts that its rollouts chose."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path

import pytest

from tests.stack import rounds
from tests.stack.conftest import once
from tests.stack.processes import ROOT, rollout_server
from tests.stack.test_families import assert_agrees, first_round, samples_of, start

sys.path.insert(0, str(ROOT / "scripts"))
from tiny_vlm.families import FAMILIES, Family, make_family

pytestmark = pytest.mark.stack

REPLAY = ("--router_replay_mode", "R3")
RETURN = '{"kv_cache_memory_bytes": 134217728, "enable_return_routed_experts": true}'


@pytest.fixture(scope="module")
def family() -> Family:
    """Qwen3-VL-MoE with more experts, in bfloat16: both sides choose other ones here and there."""
    config = copy.deepcopy(dict(FAMILIES["qwen3_vl_moe"].config))
    config["text_config"] |= {
        "num_hidden_layers": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    }
    return dataclasses.replace(FAMILIES["qwen3_vl_moe"], config=config, dtype="bfloat16")


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "many-experts", lambda folder: make_family(family, folder, 0))


def test_replay(family: Family, model: Path, assets: Path, tmp_path: Path) -> None:
    """Colocated over two ranks, with gradient checkpointing, and against a server; the rollouts are
    those of the training that replays nothing."""
    runs = {}
    for name, argv in (
        ("plain", ()),
        ("replayed", (*REPLAY, "--gradient_checkpointing", "true")),
    ):
        finished = start(family, model, assets, tmp_path / name, *argv, ranks=2)
        runs[name] = first_round(samples_of(finished, tmp_path / name, ranks=2))
    argv_of_server = [*rounds.server_argv(assets), "--model", str(model), *family.swift_argv]
    argv_of_server += ["--vllm_engine_kwargs", RETURN]
    with rollout_server(*argv_of_server, log=tmp_path / "server.log") as port:
        client = rounds.client_argv(port)
        finished = start(family, model, assets, tmp_path / "served", *client, *REPLAY)
    runs["served"] = first_round(samples_of(finished, tmp_path / "served"))
    assert runs["plain"] == runs["replayed"] == runs["served"]
    gaps = {}
    for name in runs:
        assert_agrees(family, tmp_path / name)
        steps = rounds.logged_steps(tmp_path / name / "run")
        gaps[name] = [step["rollout_gap/max"] for step in steps]
        shares = [step["router_replay/equal"] for step in steps if name != "plain"]
        assert all(0.9 < share < 1 for share in shares)
    assert max(gaps["replayed"]) < min(gaps["plain"]) / 2
    assert max(gaps["served"]) < min(gaps["plain"]) / 2


def test_a_server_that_returns_no_experts(
    family: Family, model: Path, assets: Path, tmp_path: Path
) -> None:
    """The training says so."""
    argv = [*rounds.server_argv(assets), "--model", str(model), *family.swift_argv]
    with rollout_server(*argv, log=tmp_path / "server.log") as port:
        client = rounds.client_argv(port)
        finished = start(family, model, assets, tmp_path / "run", *client, *REPLAY)
    assert finished.returncode == 1
    assert "came without its experts" in finished.output
