"""Trainings of tiny models of other families, and of mixtures of experts."""

import copy
import dataclasses
import json
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from tiny_vlm.families import FAMILIES, Family, make_family

from swift_grpo_ext.training.gap import gap_limit
from tests.rig import rounds
from tests.rig.fixtures import once
from tests.rig.processes import Finished, rollout_server
from tests.rig.rounds import (
    GROUP_SIZE,
    client_argv,
    digits,
    logged_steps,
    recorded,
    run_training,
    server_argv,
    write_lines,
    write_video,
)

QUESTION = "Which digit is this?"
PROMPTS = {
    "images": (
        *(f"<image>{QUESTION}", f"{QUESTION}\n<image>"),
        f"Here:\n<image>\n{QUESTION} <image> Both?",
    ),
    "videos": (f"<video>{QUESTION}", f"{QUESTION}\n<video>", "<video>\nAnd here?\n<image>"),
    "audio": (f"<audio>{QUESTION}", f"{QUESTION}\n<audio>", "<audio>\nAnd here?\n<image>"),
    "words": ("One?", "Two?", "Three?"),
}
"""Three prompts by the media that they show."""

BATCH = 4 * GROUP_SIZE
STOP = "er"
"""Spelled by one in twenty tokens."""


def record_result(name: str, part: str, **found: Any) -> None:
    """Write a result for `scripts/support.py` into the JSON file that `RESULTS` names."""
    if "RESULTS" not in os.environ:
        return
    path = Path(os.environ["RESULTS"])
    # Each of pytest's workers has a family.
    with FileLock(f"{tempfile.gettempdir()}/swift-grpo-ext-results.lock"):
        results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        results.setdefault(name, {}).setdefault(part, {}).update(found)
        text = json.dumps(results, indent=1, sort_keys=True) + "\n"
        path.write_text(text, encoding="utf-8")


def row_of(prompt: str, assets: Path, folder: Path, number: int = 0) -> dict[str, Any]:
    """Return a row with its own images and tones. A video has four images, one a second."""
    images = [row["images"][0] for row in digits(assets, range(16))]
    row: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "solution": "1"}
    row["images"] = images[number : number + prompt.count("<image>")]
    row["videos"] = []
    if "<video>" in prompt:
        row["videos"] = [str(write_video(images[:4], folder / "4.mp4"))]
    if "<audio>" in prompt:
        import soundfile  # scripts/setup.sh does not install it

        # A second of a tone at 16 kHz.
        tone = 0.5 * np.sin(2 * np.pi * 220 * (number + 1) * np.arange(16_000) / 16_000)
        soundfile.write(folder / f"{number}.wav", tone, 16_000)
        row["audios"] = [str(folder / f"{number}.wav")]
    return row


def start(
    family: Family, model: Path, assets: Path, folder: Path, *argv: str, ranks: int = 1
) -> Finished:
    """Train the family on prompts with each of its media and without, to a good or a bad end."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in ("images", "videos", "audio") if getattr(family, kind)] or ["words"]
    # Four of a kind, so that three steps of four prompts show all kinds.
    prompts = [p for kind in kinds for p in (*PROMPTS[kind], "Which digits are there?")]
    rows = [
        row_of(prompt.replace(*family.without), assets, folder, number)
        for number, prompt in enumerate(prompts)
    ]
    return run_training(
        *(assets, write_lines(folder / "rows.jsonl", rows), folder),
        *("--model", str(model), *family.swift_argv, "--stop_words", STOP),
        *("--learning_rate", "2e-3", "--temperature", "1.0"),
        *("--per_device_train_batch_size", str(BATCH // ranks)),
        *("--ddp_find_unused_parameters", "true"),  # text alone does not use the vision tower
        *argv,
        ranks=ranks,
    )


def samples_of(finished: Finished, folder: Path, ranks: int = 1) -> rounds.Samples:
    """Assert that the training ended well; return its samples."""
    finished.check()
    samples = recorded(folder)
    rounds.assert_logged(folder / "run", samples, ranks)
    return samples


def first_round(samples: rounds.Samples) -> dict[str, list[int]]:
    tokens = {name: s["token_ids"] for name, s in samples.items() if s["step"] == 0}
    assert len(tokens) == BATCH
    return tokens


def assert_agrees(family: Family, folder: Path) -> float:
    """Assert that rollout and training agree; return the largest mean gap of a round, in nats."""
    steps = logged_steps(folder / "run")
    assert len(steps) == 3
    gap = max(step["rollout_gap/mean"] for step in steps)
    assert gap < gap_limit(family.bits)
    assert all(step["grad_norm"] > 0 for step in steps)
    return float(gap)


# --- mixtures of experts, with the experts that rollouts chose ---

REPLAY = ("--router_replay_mode", "R3", "--gradient_checkpointing", "true")
RETURN = '{"kv_cache_memory_bytes": 134217728, "enable_return_routed_experts": true}'


def many_experts(name: str) -> Family:
    """Return a family with more experts, in bfloat16: both sides choose different ones at times."""
    config = copy.deepcopy(dict(FAMILIES[name].config))
    text = config["text_config"]
    text |= {"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4}
    if kinds := text.get("layer_types"):
        text["layer_types"] = kinds * (4 // len(kinds))
    return dataclasses.replace(FAMILIES[name], config=config, dtype="bfloat16")


def gaps_of(folder: Path) -> dict[str, float]:
    """Return the largest value of each kind of gap over the steps of a training."""
    steps = logged_steps(folder / "run")
    return {name: max(step[f"rollout_gap/{name}"] for step in steps) for name in ("mean", "max")}


def assert_replayed(
    name: str, assets: Path, folder: Path, factory: pytest.TempPathFactory, *, served: bool
) -> None:
    """Assert that a training with replay has the rollouts of one without, and smaller gaps.

    Args:
        served: whether a server generates for one rank; else two ranks have engines.
    """
    family = many_experts(name)

    def make(model: Path) -> None:
        make_family(family, model, seed=0)

    def train_plainly(plain: Path) -> None:
        samples_of(start(family, model, assets, plain, ranks=2), plain, ranks=2)

    model = once(factory, f"many-experts-{name}", make)
    plain = once(factory, f"plain-experts-{name}", train_plainly)
    argv, ranks = [*REPLAY], 1 if served else 2
    with ExitStack() as servers:
        if served:
            command = [*server_argv(assets), "--model", str(model), *family.swift_argv]
            command += ["--vllm_engine_kwargs", RETURN]
            server = rollout_server(*command, log=folder / "server.log")
            argv += client_argv(servers.enter_context(server))
        finished = start(family, model, assets, folder / "replayed", *argv, ranks=ranks)
    samples = samples_of(finished, folder / "replayed", ranks=ranks)
    assert first_round(samples) == first_round(recorded(plain))
    assert_agrees(family, folder / "replayed")
    before, after = gaps_of(plain), gaps_of(folder / "replayed")
    assert after["mean"] < before["mean"]
    assert after["max"] < before["max"] / 2
    steps = logged_steps(folder / "replayed/run")
    equal = min(step["router_replay/equal"] for step in steps)
    assert 0.9 < equal < 1
    found = {"plain": before, "served" if served else "replayed": {**after, "equal": equal}}
    record_result(name, "replay", **found)
