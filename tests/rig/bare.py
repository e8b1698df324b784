"""Trainings with or without the plugin, and without a preset: their losses have to be equal."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rig.processes import PLUGIN, Finished, swift
from tests.rig.rounds import BATCH, GROUP_SIZE, SCENARIOS, logged_steps


def train_bare(
    kind: str,
    assets: Path,
    rows: Path,
    folder: Path,
    *argv: str,
    plugins: Sequence[str],
    ranks: int = 1,
    steps: int = 3,
    env: dict[str, str] | None = None,
) -> Finished:
    """Run a training of this `--rlhf_type`; its run is `folder / "run"`, its log `log`."""
    folder.mkdir(parents=True)
    command = [
        *("rlhf", "--rlhf_type", kind, "--model", str(assets / "tiny_vlm"), "--dataset", str(rows)),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--check_model", "false"),
        *("--external_plugins", *plugins),
        *("--split_dataset_ratio", "0", "--dataset_num_proc", "1", "--dataloader_num_workers", "0"),
        *("--tuner_type", "full", "--torch_dtype", "float32", "--max_length", "512"),
        *("--output_dir", str(folder / "run"), "--add_version", "false", "--report_to", "none"),
        *("--max_steps", str(steps), "--save_strategy", "no", "--logging_steps", "1"),
        *("--per_device_train_batch_size", str(BATCH // ranks)),
        *("--gradient_accumulation_steps", "1", "--warmup_steps", "0"),
        *("--max_completion_length", "12", "--temperature", "1.0"),
        *argv,
    ]
    own = {"NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}
    return swift(*command, log=folder / "log", env={**own, **(env or {})})


def train_both(
    kind: str, assets: Path, rows: Path, folder: Path, *argv: str, **kwargs: Any
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Train without and with this project's plugin; return pairs of what ms-swift logged."""
    logs = []
    for name, plugins, own in (
        ("own", [SCENARIOS], ()),
        ("ours", [PLUGIN, SCENARIOS], ("--rollout_seed_mode", "engine")),
    ):
        run = folder / name
        train_bare(kind, assets, rows, run, *argv, *own, plugins=plugins, **kwargs).check()
        logs.append(logged_steps(run / "run"))
    return list(zip(*logs, strict=True))


def assert_losses_are_ms_swifts(
    assets: Path, folder: Path, *argv: str, rounding: float = 2e-6, ranks: int = 1
) -> None:
    """Assert that GRPO's losses, gradient norms and rewards are equal.

    Args:
        rounding: bound on the difference of two losses.
    """
    own = (
        *("--use_vllm", "false", "--num_generations", str(GROUP_SIZE), "--reward_funcs", "spelled"),
        # Adam's first step would turn gradients of rounding size into steps of the whole rate.
        *("--learning_rate", "0.05", "--optim", "sgd", "--beta", "0"),
        *("--gradient_checkpointing", "false"),
        # Two ranks of ms-swift without the plugin fail on a CPU without these settings.
        *("--use_cpu", "true", "--bf16", "false", "--fp16", "false"),
    )
    rows = assets / "digits/train.jsonl"
    pairs = train_both("grpo", assets, rows, folder, *own, *argv, ranks=ranks)
    assert len(pairs) == 3
    assert pairs[0][0]["grad_norm"] > 1e-2
    for expected, found in pairs:
        if ranks > 1:
            assert expected["completions/min_length"] < expected["completions/max_length"]
        for name in {"loss", "grad_norm", "reward", "reward_std", "kl"} & expected.keys():
            bound = rounding if name == "loss" else 2e-6
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=bound), name
