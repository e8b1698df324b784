"""Trainings with faults of a real engine. What it sees has a fault in one round after the other;
these trainings warn in place of stopping."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    client_argv,
    digits,
    logged_steps,
    read_lines,
    run_training,
    server_argv,
    write_lines,
    write_video,
)

PLUGIN = "tests/rig/engine_faults.py"
NUM_PROMPTS, GROUP_SIZE = 64, 2
LONG = "Look at each of them closely, one after the other, and take your time. " * 3
"""This text lets a prompt fill a block of vLLM's CPU cache, which has 128 tokens."""

SEEN = {"image", "images", "video"}
FAULTS = {
    # The first updates are the largest.
    "stale encoder cache": SEEN,
    "stale prefix cache": {"images", "video"},
    "M-RoPE rows dropped": SEEN,
    "other video frames": {"video"},
    "blind tower": SEEN,
    "weaker tower": SEEN,
    "another checkpoint's tower": SEEN,
    "images of rows swapped": {"image", "images"},
    "one of several images blank": {"images"},
    "colour channels swapped": {"image", "images"},
    "other pixel limits": {"image", "images"},
    "halved and enlarged": {"image", "images"},
    "positions off behind an image": SEEN,
}
"""The kinds of rows of which one at least has to be named."""

FINE = {"enlarged and reduced": {"image", "images"}}
"""Faults below the rounding of 16 bits."""

STOP = "</digit>"


def faults_of_rounds(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the environment of a training with these faults, "" for none."""
    return {"ENGINE_FAULTS": str(folder), "FAULTS_OF_ROUNDS": json.dumps(names)}


def unequal_rows(assets: Path, folder: Path) -> list[dict[str, Any]]:
    """Return rows of all kinds with prompts of unequal lengths, and one that the template refuses
    because its images are missing."""
    made = rows(assets, folder)[:8]
    for number, row in enumerate(made):
        row["messages"][0]["content"] += " Look twice." * number
    made[4]["images"] = [str(assets / "digits/none.png")]
    return made


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
        elif number % 4 == 3:
            row["messages"][0]["content"] = f"<video>Which digits?{' Look.' * (number // 4)}"
            row["images"], shown = [], frames[number % 5 :] + frames[: number % 5]
            row["videos"] = [str(write_video(shown, folder / f"{number}.mp4"))]
    return made


def assert_each_fault_is_named_in_its_round(
    assets: Path, folder: Path, dtype: str, *, served: bool
) -> None:
    """Train with a fault in most rounds. The first and the last one are sound, and those after a
    stale cache."""
    faults = FAULTS | (FINE if dtype == "float32" else {})
    of_rounds = ["", *(name for f in faults for name in ((f, "") if "stale" in f else (f,))), ""]
    path = write_lines(folder / "rows.jsonl", rows(assets, folder))
    argv = [
        *("--torch_dtype", dtype, "--rollout_mismatch", "warn", "--temperature", "1.5"),
        *("--num_generations", str(GROUP_SIZE), "--per_device_train_batch_size", "16"),
        *("--gradient_accumulation_steps", str(NUM_PROMPTS * GROUP_SIZE // 16)),
        *("--learning_rate", "2e-3", "--lr_scheduler_type", "polynomial"),
        *("--lr_scheduler_kwargs", '{"power": 8}', "--freeze_vit", "false"),
    ]
    with ExitStack() as servers:
        if served:
            command = [a.replace("float32", dtype) for a in server_argv(assets, plugins=[PLUGIN])]
            # The plugin has to be in the process of vLLM's core.
            own = {"ENGINE_FAULTS": str(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            server = rollout_server(*command, log=folder / "server.log", env=own)
            argv += client_argv(servers.enter_context(server))
        run_training(
            *(assets, path, folder / "training", *argv),
            steps=len(of_rounds),
            plugins=[PLUGIN],
            env=faults_of_rounds(folder, of_rounds),
        ).check()
    assert len(logged_steps(folder / "training/run")) == len(of_rounds)
    for fault, found in zip(of_rounds, read_lines(folder / "rounds"), strict=True):
        kinds = {source.rpartition(" ")[2] for source in found["named"]}
        expected = faults.get(fault, set())
        assert kinds <= expected, found
        assert (found["fault"], bool(kinds)) == (fault, bool(expected)), found
