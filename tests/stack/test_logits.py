"""The logits shim and chunked log-probabilities in real trainings (SPEC "Logits").

Losses of three steps: to the last bit where the model has the keyword and there is nothing to leave
out, within 1e-5 elsewhere. The policy learns, and is compared with a reference model, so that no
loss is 0 by construction. In one test vLLM draws, so that the old policy's log-probabilities are
computed too; the others do without it, and start in half the time. Padding-free is not among them:
ms-swift asks for flash attention with it, which CPU does not have (`tests/logits/test_logps.py` has
its layout).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.stack.processes import PLUGIN, free_port, swift
from tests.stack.rounds import PRESET, without_vllm, write_rows

pytestmark = pytest.mark.stack

STEPS = 3
LEARNING_RATE = "0.5"
LORA = ("--tuner_type", "lora", "--target_modules", "all-linear", "--lora_dropout", "0")
CHUNKS = ("--logps_chunk_size", "16")
OFF, STRICT = (("--logits_shim", mode) for mode in ("off", "strict"))
SHORT = ("--max_completion_length", "4")
"""Shorter than any answer: all completions are of one length."""


@pytest.fixture(scope="module")
def equal(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of one length."""
    folder = tmp_path_factory.mktemp("rows")
    return write_rows(assets / "digits/train.jsonl", folder / "equal.jsonl", range(STEPS * 2))


@pytest.fixture(scope="module")
def unequal(equal: Path) -> Path:
    """Every other prompt is longer by half."""
    rows = [json.loads(line) for line in equal.read_text(encoding="utf-8").splitlines()]
    for row in rows[::2]:
        row["messages"][0]["content"] += " Look closely, and take your time." * 4
    path = equal.with_name("unequal.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def losses(
    assets: Path, rows: Path, folder: Path, *argv: str, ranks: int = 1, use_vllm: bool = False
) -> list[Any]:
    """What `loss_recorder.py` wrote of each loss, in the order of steps and ranks."""
    folder.mkdir()
    finished = swift(
        *("rlhf", str(PRESET if use_vllm else without_vllm(folder))),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(rows)),
        *("--external_plugins", PLUGIN, "tests/stack/loss_recorder.py"),
        *("--output_dir", str(folder / "run"), "--add_version", "false"),
        *("--max_steps", str(STEPS), "--save_strategy", "no", "--num_generations", "4"),
        *("--per_device_train_batch_size", str(8 // ranks)),
        # Not AdamW, whose first step is the sign of each gradient: what is nothing but rounding
        # would be as large a step as any.
        *("--optim", "sgd", "--learning_rate", LEARNING_RATE),
        *("--warmup_steps", "0", "--beta", "0.5"),
        *("--reward_funcs", "position", "--reward_weights", "1.0"),
        *argv,
        log=folder / "log",
        env={
            "RECORD_DIR": str(folder),
            "MASTER_PORT": str(free_port()),
            **({"NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}),
        },
    )
    assert finished.returncode == 0, finished.cause
    files = [folder / f"losses{rank}.jsonl" for rank in range(ranks)]
    lines = [line for f in files for line in f.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == STEPS * ranks
    return [json.loads(line) for line in lines]


def assert_same_training(found: list[Any], expected: list[Any]) -> None:
    """Within 1e-5, with the same tokens; a loss of 0 is one at equal weights."""
    assert [f["tokens"] for f in found] == [e["tokens"] for e in expected]
    for f, e in zip(found, expected, strict=True):
        assert math.isclose(f["loss"], e["loss"], rel_tol=1e-5, abs_tol=1e-7)
    assert sum(abs(e["loss"]) > 1e-3 for e in expected) >= len(expected) // 2


def test_the_same_training_to_the_last_bit(assets: Path, equal: Path, tmp_path: Path) -> None:
    off = losses(assets, equal, tmp_path / "off", *OFF, *SHORT, use_vllm=True)
    strict = losses(assets, equal, tmp_path / "strict", *STRICT, *SHORT, use_vllm=True)
    assert [s["loss"] for s in strict] == [o["loss"] for o in off]
    assert all(o["kept"] == o["completion"] for o in off), "there was something to leave out"
    assert all(set(s["ways"]) == {"logits_to_keep"} for s in strict)


@pytest.mark.extra
def test_chunks_where_vllm_draws(assets: Path, equal: Path, tmp_path: Path) -> None:
    off = losses(assets, equal, tmp_path / "off", *OFF, *SHORT, use_vllm=True)
    argv = (*STRICT, *CHUNKS, *SHORT)
    chunked = losses(assets, equal, tmp_path / "chunked", *argv, use_vllm=True)
    assert_same_training(chunked, off)


WAYS = {
    "right": ("--padding_side", "right"),
    "left": ("--padding_side", "left"),
    "LoRA": (*LORA, "--gradient_checkpointing", "true"),
}


@pytest.mark.parametrize("way", WAYS)
def test_chunks_over_unequal_prompts(way: str, assets: Path, unequal: Path, tmp_path: Path) -> None:
    off = losses(assets, unequal, tmp_path / "off", *OFF, *WAYS[way])
    if way == "right":
        assert sum(o["kept"] for o in off) > 1.5 * sum(o["completion"] for o in off)
    chunked = losses(assets, unequal, tmp_path / "chunked", *STRICT, *CHUNKS, *WAYS[way])
    assert_same_training(chunked, off)


@pytest.mark.extra
@pytest.mark.parametrize("way", WAYS)
def test_unequal_prompts(way: str, assets: Path, unequal: Path, tmp_path: Path) -> None:
    off = losses(assets, unequal, tmp_path / "off", *OFF, *WAYS[way])
    strict = losses(assets, unequal, tmp_path / "strict", *STRICT, *WAYS[way])
    assert_same_training(strict, off)


@pytest.mark.extra
def test_two_ranks(assets: Path, unequal: Path, tmp_path: Path) -> None:
    off = losses(assets, unequal, tmp_path / "off", *OFF, ranks=2)
    chunked = losses(assets, unequal, tmp_path / "chunked", *STRICT, *CHUNKS, ranks=2)
    assert_same_training(chunked, off)
