"""Trainings of a mixture of experts with the experts that its rollouts chose."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
from tiny_vlm.families import FAMILIES, Family, make_family

from tests.extra.test_families import assert_agrees, first_round, record_result, samples_of, start
from tests.rig import rounds
from tests.rig.fixtures import once
from tests.rig.processes import rollout_server

REPLAY = ("--router_replay_mode", "R3")
RETURN = '{"kv_cache_memory_bytes": 134217728, "enable_return_routed_experts": true}'


@pytest.fixture(
    scope="module", params=["qwen3_vl_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.extra)]
)
def family(request: pytest.FixtureRequest) -> Family:
    """A family with more experts, in bfloat16: both sides choose different ones at times."""
    config = copy.deepcopy(dict(FAMILIES[request.param].config))
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4}
    if kinds := text.get("layer_types"):
        text["layer_types"] = kinds * (4 // len(kinds))
    return dataclasses.replace(FAMILIES[request.param], config=config, dtype="bfloat16")


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        make_family(family, folder, seed=0)

    return once(tmp_path_factory, f"many-experts-{family.name}", make)


def test_replay(family: Family, model: Path, assets: Path, tmp_path: Path) -> None:
    """Two colocated ranks with gradient checkpointing, and a training with a server, have the
    rollouts of a training without replay, and smaller gaps."""
    runs = {}
    for name, argv in (
        ("plain", ()),
        ("replayed", (*REPLAY, "--gradient_checkpointing", "true")),
    ):
        finished = start(family, model, assets, tmp_path / name, *argv, ranks=2)
        runs[name] = first_round(samples_of(finished, tmp_path / name, ranks=2))
    served = [*rounds.server_argv(assets), "--model", str(model), *family.swift_argv]
    served += ["--vllm_engine_kwargs", RETURN]
    with rollout_server(*served, log=tmp_path / "server.log") as port:
        client = rounds.client_argv(port)
        finished = start(family, model, assets, tmp_path / "served", *client, *REPLAY)
    runs["served"] = first_round(samples_of(finished, tmp_path / "served"))
    assert runs["plain"] == runs["replayed"] == runs["served"]
    found = {}
    for name in runs:
        steps = rounds.logged_steps(tmp_path / name / "run")
        found[name] = {
            kind: max(step[f"rollout_gap/{kind}"] for step in steps) for kind in ("mean", "max")
        }
        if name != "plain":
            found[name]["equal"] = min(step["router_replay/equal"] for step in steps)
            assert_agrees(family, tmp_path / name)
            assert 0.9 < found[name]["equal"] < 1
            assert found[name]["mean"] < found["plain"]["mean"]
            assert found[name]["max"] < found["plain"]["max"] / 2
    record_result(family, "replay", **found)
