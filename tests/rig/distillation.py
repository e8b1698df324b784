"""Distillation of the tiny model from a larger teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from tests.rig.processes import PLUGIN, Finished, swift
from tests.rig.rounds import digits, write_lines

BATCH = 12
ON_VLLM = (
    *("--use_vllm", "true", "--vllm_max_model_len", "512", "--vllm_enforce_eager", "true"),
    *("--vllm_engine_kwargs", '{"kv_cache_memory_bytes": 134217728}'),
)
COLOCATED = (*ON_VLLM, "--vllm_mode", "colocate")


def write_teacher(assets: Path, folder: Path) -> Path:
    """Save a model with random weights, one layer more than the tiny one and wider MLPs."""
    source = assets / "tiny_vlm"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = AutoConfig.from_pretrained(source)
    text = config.get_text_config()
    text.num_hidden_layers += 1
    text.layer_types = [*text.layer_types, text.layer_types[-1]]
    text.intermediate_size += 64
    torch.manual_seed(7)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def write_rows(assets: Path, path: Path) -> Path:
    """Write rows with one, no and two images, some of them equal, and answers of unequal length."""
    rows = digits(assets, range(BATCH))
    for number, row in enumerate(rows):
        if number % 4 == 1:
            row["messages"][0]["content"] = f"Count to {number}."
            row["images"] = []
        elif number % 4 == 2:
            row["messages"][0]["content"] = "<image><image>Which is larger?"
            row["images"] += rows[number - 2]["images"]
        elif number % 4 == 3:
            row["messages"][0]["content"] += " Explain it to a child, at length." * number
        answer = " ".join(map(str, range(1 + number % 7)))
        row["messages"].append({"role": "assistant", "content": f"It is {answer}."})
    return write_lines(path, rows)


def distill(
    assets: Path,
    rows: Path,
    folder: Path,
    *argv: str,
    ranks: int = 1,
    steps: int = 3,
    plugins: tuple[str, ...] = (PLUGIN,),
    env: dict[str, str] | None = None,
) -> Finished:
    """Run a training to its end, good or bad; its run is `folder / "run"`, its log `log`."""
    folder.mkdir(parents=True)
    command = [
        *("rlhf", "--rlhf_type", "gkd", "--model", str(assets / "tiny_vlm")),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--check_model", "false"),
        *(("--external_plugins", *plugins) if plugins else ()),
        *("--dataset", str(rows), "--split_dataset_ratio", "0", "--dataset_num_proc", "1"),
        *("--tuner_type", "full", "--torch_dtype", "float32", "--max_length", "512"),
        *("--output_dir", str(folder / "run"), "--add_version", "false", "--report_to", "none"),
        *("--max_steps", str(steps), "--save_strategy", "no", "--eval_strategy", "no"),
        *("--per_device_train_batch_size", str(BATCH // ranks)),
        *("--gradient_accumulation_steps", "1", "--logging_steps", "1"),
        *("--dataloader_num_workers", "0", "--ddp_find_unused_parameters", "true"),
        *("--max_completion_length", "12", "--temperature", "1.0", "--lmbda", "1"),
        *("--lr_scheduler_type", "constant", "--warmup_ratio", "0", "--learning_rate", "0"),
        *argv,
    ]
    own = {"NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}
    return swift(*command, log=folder / "log", env={**own, **(env or {})})


def recorded_tokens(folder: Path) -> dict[str, tuple[int | None, list[int]]]:
    """Return the recorded seed and tokens of each sample, by the sample's name."""
    rows = to_rows(read_samples(folder / "run"))
    return {row.sample_id.request_id: (row.seed, list(row.token_ids)) for row in rows}


def losses(folder: Path) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step."""
    lines = (folder / "run/logging.jsonl").read_text(encoding="utf-8").splitlines()
    return [(log["loss"], log["grad_norm"]) for log in map(json.loads, lines) if "loss" in log]
