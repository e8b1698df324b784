"""An engine with other weights than the trainer's is named at the update, or the run ends before
the trainer learns from its samples (M4, C2)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import requests
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_vlm.families import FAMILIES

from tests.rig import policy
from tests.rig.megatron_client import MegatronClient
from tests.rig.processes import free_port, rollout_server
from tests.rig.releases import IS_BEFORE_0_28
from tests.rig.rounds import (
    LEARNING,
    LORA,
    client_argv,
    logged_steps,
    run_training,
    server_argv,
)
from tests.rig.watched_engine import assert_each_fault_is_named

PLUGIN = "tests/rig/wrong_weights.py"
APART = ("--vllm_enable_lora", "true")
IN_LANGUAGE = (*LORA, "--freeze_vit", "true")
SOUND = 3
"""Rounds before an engine's fault."""


def test_each_fault_is_named_at_once(assets: Path, tmp_path: Path) -> None:
    num_faults = 15 if IS_BEFORE_0_28 else 18  # without three of adapters
    assert_each_fault_is_named(FAMILIES["qwen2_5_vl"], assets / "tiny_vlm", tmp_path, num_faults)


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as e:  # as a trainer would end
        return str(e)
    return ""


def test_a_client_without_the_plugin_is_told(assets: Path, tmp_path: Path) -> None:
    """It sends a sound update, one with a random layer, a sound one, and one with a layer of
    another size, as from a trainer of another model (ms-swift issue 9401)."""
    log, spoiled = tmp_path / "server.log", "layers.1.self_attn.o_proj"
    weights = load_file(assets / "tiny_vlm/model.safetensors")
    question = {"messages": [{"role": "user", "content": "Which digit?"}]}
    told = []
    with rollout_server(*server_argv(assets), log=log) as port:
        client = MegatronClient(port, free_port())
        for seed, kind in enumerate(("sound", "random", "sound", "misshapen")):
            torch.manual_seed(seed)
            sent = {name: t + 1e-4 * torch.randn_like(t) for name, t in weights.items()}
            layer = sent[f"model.{spoiled}.weight"]
            others = {"random": torch.randn_like(layer) * layer.std(), "misshapen": layer[:-8]}
            sent[f"model.{spoiled}.weight"] = others.get(kind, layer)
            update = error_of(partial(client.send, sent, None, LoraConfig()))
            health = requests.get(f"http://127.0.0.1:{port}/health/", timeout=60)
            assert health.status_code == 200
            told.append(
                (update, error_of(lambda: client.draw([question])), health.json()["weights"])
            )
        client.close()
    assert told[0] == told[2] == ("", "", "sound")
    for text in told[1]:
        assert f"{spoiled} moved by 1" in text
    for text in told[3]:
        assert "could not load its weights" in text
    assert f"{spoiled} moved by 1" in log.read_text(encoding="utf-8")


# --- adapters beside the weights ---


def test_a_server_generates_with_the_adapter_or_is_named(
    assets: Path, learning_rows: Path, tmp_path: Path
) -> None:
    """Both replicas use the adapter of each step's checkpoint. The second one ignores its adapter
    from the last checkpoint on: the gap names it."""
    run = tmp_path / "served"
    two = ("--vllm_data_parallel_size", "2", "--vllm_max_lora_rank", "8")
    argv = server_argv(assets, *APART, *two, plugins=(PLUGIN,))
    env = {"WRONG_WEIGHTS": str(run / f"run/checkpoint-{SOUND}")}
    with rollout_server(*argv, log=tmp_path / "server.log", env=env) as port:
        client = (*LEARNING, *IN_LANGUAGE, *client_argv(port))
        finished = run_training(assets, learning_rows, run, *client, ranks=2, steps=SOUND + 1)
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
    argv = ("--tuner_type", "lora_llm", *LEARNING, *APART)
    env = {"WRONG_WEIGHTS": str(tmp_path / f"run/checkpoint-{SOUND}")}
    finished = run_training(
        *(assets, learning_rows, tmp_path, *argv),
        ranks=2,
        steps=SOUND + 1,
        plugins=(PLUGIN,),
        env=env,
    )
    assert finished.returncode != 0
    assert re.search(
        r"WeightUpdateError: The colocated engine of rank \d: the weight", finished.output
    )
    assert "(stale)" in finished.output
    gaps = [float(step["rollout_gap/max"]) for step in logged_steps(tmp_path / "run")]
    assert len(gaps) == SOUND
    assert max(gaps) < policy.SAME, gaps
