"""Faults of an engine's sight are named in the round in which they happen, with a server and in
float32 (M5). A healthy policy raises no alarm (R4)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_vlm.families import FAMILIES, make_family

from tests.rig.processes import SWIFT, started
from tests.rig.rounds import read_lines, training_command, write_lines
from tests.rig.seeing import GROUP_SIZE, PLUGIN, assert_each_fault_is_named_in_its_round, rows

HEALTHY_UPDATES = int(os.environ.get("HEALTHY_UPDATES", "12"))
"""`HEALTHY_UPDATES=500 pytest tests/extra/test_sight.py -k healthy` repeats the figures of
docs/internals.md, in some ten minutes for each family and type."""


def test_each_fault_is_named_in_its_round(assets: Path, tmp_path: Path) -> None:
    assert_each_fault_is_named_in_its_round(assets, tmp_path, "float32", served=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", ["qwen2_5_vl", "internvl", "gemma3", "qwen3_vl_moe", "qwen3_5", "qwen3_vl"]
)
def test_a_healthy_policy_raises_no_alarm(
    name: str, dtype: str, assets: Path, tmp_path: Path
) -> None:
    """Each round is compared, not the first two alone. The mixture of experts has no R3."""
    if (name, dtype) == ("qwen3_5", "float32"):
        pytest.skip("vLLM's gated delta net has bfloat16 alone on CPUs")
    family = FAMILIES[name]
    make_family(family, tmp_path / "model", seed=0)
    made = [row for row in rows(assets, tmp_path) if not row.get("videos")]
    for row in made:
        row["messages"][0]["content"] = row["messages"][0]["content"].replace(*family.without)
    path = write_lines(tmp_path / "rows.jsonl", made)
    own = [
        *("--model", str(tmp_path / "model"), *family.swift_argv, "--torch_dtype", dtype),
        *("--rollout_mismatch", "warn", "--router_replay_mode", "disabled", "--sample_log", "none"),
        *("--num_generations", str(GROUP_SIZE), "--temperature", "1.0", "--learning_rate", "1e-4"),
        *("--beta", "0.02", "--freeze_vit", "false", "--freeze_aligner", "false"),
        *("--max_completion_length", "8", "--ddp_find_unused_parameters", "true"),
    ]
    folder, steps = tmp_path / "training", HEALTHY_UPDATES
    command, env = training_command(
        assets, path, folder, *own, ranks=1, steps=steps, plugins=[PLUGIN]
    )
    env |= {"SIGHT": str(tmp_path), "SIGHT_ROUNDS": '[""]'}
    with started([str(SWIFT), *command], tmp_path / "log", env) as running:
        finished = running.wait(900 + 10 * steps)
    assert finished.returncode == 0, finished.cause
    rounds = read_lines(tmp_path / "rounds")
    assert len(rounds) == steps
    assert [number for number, found in enumerate(rounds) if found["named"]] == []
