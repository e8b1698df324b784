"""Trainings of two ranks with sharded weights, on CPU; `scripts/setup.sh` installs DeepSpeed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.rig.fixtures import once
from tests.rig.policy import SAME
from tests.rig.rounds import (
    LORA,
    PRESET,
    digits,
    logged_steps,
    recorded,
    run_training,
    token_ids,
    without_vllm,
    write_lines,
)

PLUGIN = "tests/rig/sharded_on_cpu.py"
STEPS = 3
RANKS = 2
CLOSE = {"rel": 5e-5, "abs": 2e-5}
"""Tolerances: sums have another order, and training steps amplify the difference."""

LEFT = ("--lora_dropout", "0", "--padding_side", "left")
TUNINGS: dict[str, tuple[str, ...]] = {
    "full": ("--padding_side", "right"),
    # The tower is frozen, as by default in ms-swift, so each image of a call is encoded once.
    "lora": (*LORA, "--gradient_checkpointing", "true", "--freeze_vit", "true", *LEFT),
}
DEEPSPEED = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
ON_CPU = {"ACCELERATE_TORCH_DEVICE": "cpu", "ACCELERATE_USE_CPU": "false"}
GENERATES_SHARDED = ("--ds3_gather_for_generation", "false")
"""For ZeRO-3 without vLLM. Otherwise TRL 0.29 registers DeepSpeed's hooks again after each rollout,
with other numbers, and DeepSpeed 0.18 looks up the old ones ("pop from an empty deque")."""

STRICT = ("--logits_shim", "strict")
COLOCATED = ("--vllm_mode", "colocate", "--temperature", "1.0")
"""At a higher temperature no completion would end before its length limit."""


def sharding(name: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment of a training with these shards."""
    if name == "plain":
        return [], {}
    if name == "fsdp2":
        return ["--fsdp", "fsdp2", "--use_cpu", "false"], ON_CPU
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: bash scripts/setup.sh")
    # 0: small weights are sharded too, as large ones are.
    zero = {"stage": int(name[-1]), "stage3_param_persistence_threshold": 0, "overlap_comm": False}
    config = folder / "deepspeed.json"
    config.write_text(json.dumps({**DEEPSPEED, "zero_optimization": zero}), encoding="utf-8")
    env = {**ON_CPU, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    return ["--deepspeed", str(config), "--use_cpu", "false"], env


def unequal_rows(assets: Path, folder: Path) -> Path:
    """Write rows; every other prompt is longer by half."""
    rows = digits(assets, range(2 * STEPS))
    for row in rows[::2]:
        row["messages"][0]["content"] += " Look closely, and take your time." * 4
    return write_lines(folder / "rows.jsonl", rows)


@dataclass
class Trained:
    """The tokens of each sample, by name, and the log of each step."""

    tokens: dict[str, list[int]]
    steps: list[dict[str, Any]]


def read(folder: Path) -> Trained:
    return Trained(token_ids(recorded(folder)), logged_steps(folder / "run"))


def training(assets: Path, folder: Path, *argv: str, shards: str = "plain") -> Trained:
    folder.mkdir(parents=True, exist_ok=True)
    sharded, env = sharding(shards, folder)
    finished = run_training(
        *(assets, unequal_rows(assets, folder), folder),
        # Not AdamW, whose first step is the sign of each gradient.
        *("--optim", "sgd", "--learning_rate", "0.5", "--beta", "0.5"),
        *("--per_device_train_batch_size", "4", "--lr_scheduler_type", "constant"),
        *(*sharded, *argv),
        ranks=RANKS,
        steps=STEPS,
        plugins=[PLUGIN],
        env=env,
        preset=PRESET if "--vllm_mode" in argv else without_vllm(folder),
    )
    assert finished.returncode == 0, finished.cause
    return read(folder)


def plain_training(assets: Path, factory: pytest.TempPathFactory, name: str, *argv: str) -> Trained:
    """Return a training without shards and without the logits shim, and with unequal ranks."""

    def make(folder: Path) -> None:
        training(assets, folder, *argv, "--logits_shim", "off")

    plain = read(once(factory, f"plain-{name}", make))
    for step in plain.steps:
        assert step["completions/min_length"] < step["completions/max_length"]
    assert all(abs(step["loss"]) > 1e-3 for step in plain.steps[1:]), "0 by construction"
    return plain


def assert_same(found: Trained, expected: Trained) -> None:
    """Assert that all tokens are equal, and numbers within float error."""
    assert found.tokens == expected.tokens
    for name in ("loss", "grad_norm", "kl"):
        numbers = [[step[name] for step in one.steps] for one in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], **CLOSE)
    for step in found.steps:
        assert step.get("rollout_gap/max", 0) < SAME
