"""With `--rollout_seed_mode engine` a run has ms-swift's own losses and gradient norms (R7),
although a group is encoded once, its prompt is read once, and needless passes are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rig.processes import swift
from tests.rig.rounds import BATCH, GROUP_SIZE, PLUGIN, logged_steps

TRAINING = (
    *("rlhf", "--rlhf_type", "grpo", "--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"),
    *("--check_model", "false", "--tuner_type", "full", "--torch_dtype", "float32"),
    *("--use_cpu", "true", "--bf16", "false", "--fp16", "false", "--use_vllm", "false"),
    *("--split_dataset_ratio", "0", "--dataset_num_proc", "1", "--dataloader_num_workers", "0"),
    *("--reward_funcs", "spelled"),
    *("--num_generations", str(GROUP_SIZE), "--max_completion_length", "12"),
    *("--max_length", "256", "--temperature", "1.0", "--max_steps", "3", "--logging_steps", "1"),
    *("--learning_rate", "0.05", "--optim", "sgd", "--warmup_steps", "0", "--add_version", "false"),
    *("--save_strategy", "no", "--report_to", "none", "--beta", "0"),
    *("--gradient_checkpointing", "false", "--lora_dropout", "0"),
)

REWARD = """
from swift.rewards import ORM, orms


class Spelled(ORM):
    def __call__(self, completions, **kwargs):
        return [sum(map(ord, text)) % 7 / 7 for text in completions]


orms["spelled"] = Spelled
"""
"""A plugin for both runs. Rewards differ within each group. The optimizer is SGD: Adam's first step
would turn gradients of rounding size into steps of the whole learning rate."""

WAYS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "beta": ("--beta", "0.04"),
    "kl in the reward": ("--beta", "0.04", "--kl_in_reward", "true"),
    "two updates": ("--num_iterations", "2", "--beta", "0.04"),
    "two steps of a round": ("--steps_per_generation", "2"),
    "gspo": ("--importance_sampling_level", "sequence"),
    "cispo": (
        *("--loss_type", "cispo", "--epsilon_high", "0.28", "--temperature", "2.0"),
        *("--gradient_accumulation_steps", "2", "--ddp_backend", "gloo"),
    ),
    "sapo": ("--loss_type", "sapo"),
    "gdpo": ("--scale_rewards", "gdpo"),
}

RANKS = {"cispo": 2}
"""ms-swift divides this loss by the tokens of all micro-batches and ranks of a step (4.6,
grpo_trainer.py, `WINDOW_NORMALIZED_LOSS_TYPES`). At temperature 2 the lengths are unequal."""


@pytest.mark.parametrize(
    "way",
    [
        *("two updates", "kl in the reward"),
        *(
            pytest.param(way, marks=pytest.mark.extra)
            for way in WAYS
            if way not in ("two updates", "kl in the reward")
        ),
    ],
)
def test_losses_are_ms_swifts(way: str, assets: Path, tmp_path: Path) -> None:
    logs, reward, ranks = {}, tmp_path / "reward.py", RANKS.get(way, 1)
    reward.write_text(REWARD, encoding="utf-8")
    own = ("--external_plugins", str(reward))
    ours = ("--external_plugins", PLUGIN, str(reward), "--rollout_seed_mode", "engine")
    for side, more in (("own", own), ("ours", ours)):
        finished = swift(
            *TRAINING,
            *("--model", str(assets / "tiny_vlm"), "--dataset", str(assets / "digits/train.jsonl")),
            *("--per_device_train_batch_size", str(BATCH // ranks)),
            *("--output_dir", str(tmp_path / side), *WAYS[way], *more),
            log=tmp_path / f"{side}.log",
            env={"NPROC_PER_NODE": str(ranks)} if ranks > 1 else None,
        )
        assert finished.returncode == 0, finished.cause
        logs[side] = logged_steps(tmp_path / side)
    assert len(logs["own"]) == 3
    assert logs["own"][0]["grad_norm"] > 1e-2
    if ranks > 1:
        for log in logs["own"]:
            assert log["completions/min_length"] < log["completions/max_length"]
    # ms-swift divides advantages by the standard deviation plus 1e-4. If a group's rewards differ
    # in the last bit alone (2^-24, of a KL term), its advantages are 6e-4.
    rounding = 2**-24 / 1e-4 if way == "kl in the reward" else 2e-6
    for found, expected in zip(logs["ours"], logs["own"], strict=True):
        for name in {"loss", "grad_norm", "reward", "reward_std", "kl"} & expected.keys():
            bound = rounding if name == "loss" else 2e-6
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=bound), name
