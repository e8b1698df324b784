"""Faults of an engine's sight are named in the round in which they happen, before the update (M5).

One training has a fault in every other round, in a real engine, and warns in place of stopping.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_vlm.families import FAMILIES, make_family

from tests.rig.processes import SWIFT, rollout_server, started
from tests.rig.rounds import (
    client_argv,
    digits,
    logged_steps,
    read_lines,
    run_training,
    server_argv,
    training_command,
    write_lines,
    write_video,
)

PLUGIN = "tests/rig/sight.py"
NUM_PROMPTS, GROUP_SIZE = 64, 2
LONG = "Look at each of them closely, one after the other, and take your time. " * 3
"""This text lets a prompt fill a block of vLLM's CPU cache, which has 128 tokens."""

SEEN = {"image", "images", "video"}
FAULTS = {
    "M-RoPE rows dropped": SEEN,
    # The first updates are the largest.
    "stale encoder cache": SEEN,
    "stale prefix cache": {"images", "video"},
    "other video frames": {"video"},
    "blind tower": SEEN,
    "blind tower x 0.25": SEEN,
    "another checkpoint's tower": SEEN,
    "images of rows swapped": {"image", "images"},
    "one of several images blank": {"images"},
    "colour channels swapped": {"image", "images"},
    "upside down": {"image", "images"},
    "other pixel limits": {"image", "images"},
    "halved and enlarged": {"image", "images"},
    "positions off behind an image": SEEN,
}
"""The kinds of rows of which one at least has to be named."""

FINE = {"bilinear resize": {"image", "images"}, "nearest resize": {"image", "images"}}
"""Faults below the rounding of 16 bits."""

HEALTHY_UPDATES = int(os.environ.get("HEALTHY_UPDATES", "12"))
"""`HEALTHY_UPDATES=500 pytest -m "" tests/stack/test_sight.py -k healthy` repeats the figures of
docs/internals.md, in some ten minutes for each family and type."""


def rows(assets: Path, folder: Path) -> list[dict[str, Any]]:
    """Return rows of one image, of two, of a video, and of text. Images have 48 tokens each."""
    texture_of = np.random.default_rng(0)
    made = digits(assets, range(NUM_PROMPTS))
    for number, row in enumerate(made):
        image = Image.open(row["images"][0]).convert("RGB").resize((224, 168))
        texture = texture_of.integers(0, 256, (168, 224, 3), np.uint8) // (1, 1 + number % 3, 2)
        row["images"] = [str(folder / f"{number}.png")]
        Image.blend(image, Image.fromarray(texture.astype(np.uint8)), 0.4).save(row["images"][0])
        row["messages"][0]["content"] += " Look twice." * (number % 3)
    frames = [str(folder / f"{number}-frame.png") for number in range(6)]
    for number, path in enumerate(frames):
        colour = Image.new("RGB", (112, 84), (40 * number, 255 - 50 * number, 128 * (number % 2)))
        digit = Image.open(digits(assets, [number])[0]["images"][0]).convert("RGB")
        Image.blend(digit.resize(colour.size), colour, 0.5).save(path)
    for number, row in enumerate(made):
        if number % 4 == 1:
            row["messages"][0]["content"], row["images"] = f"What is {number} + 4? In words.", []
        elif number % 4 == 2:
            row["messages"][0]["content"] = f"<image><image>Which digits? {LONG}"
            row["images"] = [*row["images"], *made[number - 2]["images"]]
        elif number % 8 == 7:
            row["messages"][0]["content"] = f"<video>Which digits?{' Look.' * (number // 4)}"
            row["images"], shown = [], frames[number % 5 :] + frames[: number % 5]
            row["videos"] = [str(write_video(shown, folder / f"{number}.mp4"))]
    return made


def train(
    assets: Path, folder: Path, dtype: str, faults: list[str], *argv: str, served: bool = False
) -> list[dict[str, Any]]:
    """Train with these faults of the rounds; return what each round named."""
    path = write_lines(folder / "rows.jsonl", rows(assets, folder))
    own = [
        *("--torch_dtype", dtype, "--rollout_mismatch", "warn", "--temperature", "1.5"),
        *("--num_generations", str(GROUP_SIZE), "--per_device_train_batch_size", "16"),
        *("--gradient_accumulation_steps", str(NUM_PROMPTS * GROUP_SIZE // 16)),
        *("--learning_rate", "2e-3", "--lr_scheduler_type", "polynomial"),
        *("--lr_scheduler_kwargs", '{"power": 8}', "--freeze_vit", "false", *argv),
    ]
    env = {"SIGHT": str(folder)}
    with ExitStack() as servers:
        if served:
            command = [a.replace("float32", dtype) for a in server_argv(assets, plugins=[PLUGIN])]
            # The plugin has to be in the process of vLLM's core.
            own_env = {**env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            server = rollout_server(*command, log=folder / "server.log", env=own_env)
            own += client_argv(servers.enter_context(server))
        finished = run_training(
            *(assets, path, folder / "training", *own),
            steps=len(faults),
            plugins=[PLUGIN],
            env={**env, "SIGHT_ROUNDS": json.dumps(faults)},
        )
    assert finished.returncode == 0, finished.cause
    assert len(logged_steps(folder / "training/run")) == len(faults)
    return read_lines(folder / "rounds")


@pytest.mark.parametrize(
    ("dtype", "served"),
    [
        ("bfloat16", False),
        pytest.param("bfloat16", True, marks=pytest.mark.extra),
        pytest.param("float32", False, marks=pytest.mark.extra),
        pytest.param("float32", True, marks=pytest.mark.extra),
    ],
)
def test_each_fault_is_named_in_its_round(
    dtype: str, served: bool, assets: Path, tmp_path: Path
) -> None:
    faults = FAULTS | (FINE if dtype == "float32" else {})
    rounds = ["", *(name for fault in faults for name in (fault, ""))]
    unnamed = []
    for fault, found in zip(
        rounds, train(assets, tmp_path, dtype, rounds, served=served), strict=True
    ):
        assert found["fault"] == fault
        kinds = {source.rpartition(" ")[2] for source in found["named"]}
        expected = faults.get(fault, set())
        assert kinds <= expected, found
        if expected and not kinds:
            unnamed.append(fault)
    assert unnamed == []


def mixed_rows(assets: Path, folder: Path, without: tuple[str, str]) -> list[dict[str, Any]]:
    """Return rows of text, of an image of any size, and of two images, in prompts of any length."""
    made = digits(assets, range(60))
    for number, row in enumerate(made):
        question = row["messages"][0]
        image = Image.open(row["images"][0]).convert("RGB")
        size = (84 + 28 * (number % 4), 56 + 28 * (number % 5 // 2))
        row["images"] = [str(folder / f"{number}.png")]
        image.resize(size).save(row["images"][0])
        question["content"] += " Look twice, and say it in words." * (number % 4)
        if number % 3 == 0:
            question["content"], row["images"] = f"What is {number} + 4? In words.", []
        elif number % 3 == 1:
            question["content"] = f"<image><image>Which digits?{' Look twice.' * (number % 4)}"
            row["images"] = [*row["images"], digits(assets, [number])[0]["images"][0]]
        question["content"] = question["content"].replace(*without)
    return made


@pytest.mark.extra
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
    path = write_lines(tmp_path / "rows.jsonl", mixed_rows(assets, tmp_path, family.without))
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
