"""Distillation of the tiny model from a larger teacher."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from tests.rig.bare import train_bare
from tests.rig.fixtures import once
from tests.rig.processes import PLUGIN, Finished, rollout_server
from tests.rig.rounds import BATCH, digits, server_argv, write_lines

STEPS = 3
OWN = (
    *("--lmbda", "1", "--ddp_find_unused_parameters", "true"),
    *("--lr_scheduler_type", "constant", "--learning_rate", "0"),
)
LEARNS = ("--learning_rate", "0.05", "--optim", "sgd", "--max_grad_norm", "1000")
ON_VLLM = (
    *("--use_vllm", "true", "--vllm_max_model_len", "512", "--vllm_enforce_eager", "true"),
    *("--vllm_engine_kwargs", '{"kv_cache_memory_bytes": 134217728}'),
)
COLOCATED = (*ON_VLLM, "--vllm_mode", "colocate")


def prepared(assets: Path, factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `teacher` and `rows.jsonl`.

    The teacher has random weights, one layer more than the tiny model and wider MLPs. Rows have
    one, no and two images, some of them equal, and answers of unequal length.
    """

    def make(folder: Path) -> None:
        source = assets / "tiny_vlm"
        ignore = shutil.ignore_patterns("*.safetensors*")
        shutil.copytree(source, folder / "teacher", ignore=ignore)
        config = AutoConfig.from_pretrained(source)
        text = config.get_text_config()
        text.num_hidden_layers += 1
        text.layer_types = [*text.layer_types, text.layer_types[-1]]
        text.intermediate_size += 64
        torch.manual_seed(7)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder / "teacher")

        rows = digits(assets, range(BATCH))
        for number, row in enumerate(rows):
            if number % 4 == 1:
                row["messages"][0]["content"], row["images"] = f"Count to {number}.", []
            elif number % 4 == 2:
                row["messages"][0]["content"] = "<image><image>Which is larger?"
                row["images"] += rows[number - 2]["images"]
            elif number % 4 == 3:
                row["messages"][0]["content"] += " Explain it to a child, at length." * number
            answer = " ".join(map(str, range(1 + number % 7)))
            row["messages"].append({"role": "assistant", "content": f"It is {answer}."})
        write_lines(folder / "rows.jsonl", rows)

    return once(factory, "distillation", make)


def teacher(places: Path) -> tuple[str, ...]:
    return ("--teacher_model", str(places / "teacher"), "--teacher_model_type", "qwen2_5_vl")


def distill(assets: Path, rows: Path, folder: Path, *argv: str, **settings: Any) -> Finished:
    """Run a training on samples of the student, by default at learning rate 0. The settings are
    those of `train_bare`."""
    settings = {"plugins": (PLUGIN,), **settings}
    return train_bare("gkd", assets, rows, folder, *OWN, *argv, **settings)


def recorded_tokens(folder: Path) -> dict[str, tuple[int | None, list[int]]]:
    """Return the recorded seed and tokens of each sample, by the sample's name."""
    rows = to_rows(read_samples(folder / "run"))
    return {row.sample_id.request_id: (row.seed, list(row.token_ids)) for row in rows}


@contextmanager
def teacher_server(assets: Path, log: Path) -> Iterator[int]:
    """Run a plain `swift deploy` of the tiny model; yield its port."""
    argv = [*server_argv(assets), "--infer_backend", "vllm"]
    del argv[2:4]  # without plugins
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "SWIFT_MEDIA_ALLOWED_DIRS": str(assets),
    }
    with rollout_server(*argv, log=log, env=env, command="deploy") as port:
        yield port
