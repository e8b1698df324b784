"""An engine with other weights than the trainer's is named at the update, or the run ends before
the trainer learns from its samples (M4, C2); what it sees wrongly is named in its round (M5).
`test_seeds.py` has a client without the plugin."""

import re
from pathlib import Path

from tiny_vlm.families import FAMILIES

from tests.rig import policy
from tests.rig.processes import rollout_server
from tests.rig.releases import IS_BEFORE_0_28
from tests.rig.rounds import LEARNING, LORA, client_argv, logged_steps, run_training, server_argv
from tests.rig.seeing import (
    PLUGIN,
    assert_each_fault_is_named_in_its_round,
    faults_of_rounds,
)
from tests.rig.watched_engine import assert_each_fault_is_named

APART = ("--vllm_enable_lora", "true")
SOUND = 3
"""Rounds before an engine's fault."""


def test_each_fault_is_named_at_once(assets: Path, tmp_path: Path) -> None:
    num_faults = 8 if IS_BEFORE_0_28 else 11  # without three of adapters
    assert_each_fault_is_named(FAMILIES["qwen2_5_vl"], assets / "tiny_vlm", tmp_path, num_faults)


def test_each_fault_of_sight_is_named_in_its_round(assets: Path, tmp_path: Path) -> None:
    assert_each_fault_is_named_in_its_round(assets, tmp_path, "bfloat16", served=False)


def test_a_server_generates_with_the_adapter_or_is_named(
    assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    """Both replicas use the adapter of each step's checkpoint. The second one ignores its adapter
    in the last round: the gap names it."""
    run = tmp_path / "served"
    two = ("--vllm_data_parallel_size", "2", "--vllm_max_lora_rank", "8")
    server = server_argv(assets, *APART, *two, plugins=(PLUGIN,))
    env = faults_of_rounds(tmp_path, [*[""] * SOUND, "adapter ignored by replica 1"])
    own = {"ENGINE_FAULTS": str(tmp_path)}
    with rollout_server(*server, log=tmp_path / "server.log", env=own) as port:
        finished = run_training(
            *(assets, learning_rows, run, *LEARNING, *LORA, "--freeze_vit", "true"),
            *client_argv(port),
            ranks=2,
            steps=SOUND + 1,
            plugins=(PLUGIN,),
            env=env,
        )
    assert finished.returncode != 0
    assert f"DisagreementError: Step {SOUND}: log-probabilities of the rollout" in finished.output
    assert f"server 0 (http://127.0.0.1:{port}) replica 1 rows of image: " in finished.output
    assert "Other engines agree: this one has other weights" in finished.output
    assert len(logged_steps(run / "run")) == SOUND
    policy.assert_sampled_with_trained_weights(run, assets / "tiny_vlm", SOUND)


def test_a_colocated_engine_holds_what_is_trained_or_the_run_ends(
    assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    """`lora_llm` trains the tower beside an adapter. Later updates sent the adapter alone, and
    engines kept the first tower: a gap of 0.58 nats. Then an engine keeps its last tower."""
    finished = run_training(
        *(assets, learning_rows, tmp_path, "--tuner_type", "lora_llm", *LEARNING, *APART),
        ranks=2,
        steps=SOUND + 1,
        plugins=(PLUGIN,),
        env=faults_of_rounds(tmp_path, [*[""] * SOUND, "stale weights"]),
    )
    assert finished.returncode != 0
    assert re.search(
        r"WeightUpdateError: The colocated engine of rank \d: the weight", finished.output
    )
    assert "(stale)" in finished.output
    gaps = [float(step["rollout_gap/max"]) for step in logged_steps(tmp_path / "run")]
    assert len(gaps) == SOUND
    assert max(gaps) < policy.SAME, gaps
