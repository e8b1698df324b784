"""A run's settings, and the weights that drew a round. Pure."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.sampling.groups import describe
from swift_grpo_ext.sampling.seeding import sample_seed

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
ADAPTER = "adapter_config.json"


class ReplayError(ValueError):
    """A group cannot be drawn again; says why, and what would help."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training left behind."""

    folder: Path
    """Its `--output_dir`."""

    settings: Mapping[str, Any]
    """Of `args.json`, with what the caller set otherwise."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the engine loads."""

    model: str
    """Directory or hub id."""

    adapters: tuple[str, ...] = ()
    """Directories of adapters, which are merged into the model."""

    def __str__(self) -> str:
        return " + ".join((self.model, *self.adapters))


def read_run(folder: str | os.PathLike[str], changes: Mapping[str, Any]) -> Run:
    """The settings of a run.

    Args:
        folder: `--output_dir` of the training.
        changes: settings of `args.json` to have other values.

    Raises:
        ReplayError: there is no `args.json`, or it has no such setting.
    """
    path = Path(folder) / "args.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ReplayError(
            f"{path}, in which ms-swift writes a run's settings, cannot be read ({e}). Give the "
            "folder that the training had as --output_dir."
        ) from e
    for name in changes:
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1)
            hint = f"did you mean {near[0]}?" if near else "it is an argument of `swift rlhf`."
            raise ReplayError(f"--set {name}: {path} has no such setting; {hint}")
    return Run(folder=Path(folder), settings={**settings, **changes})


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise `ReplayError` for a run whose engine cannot be made again."""
    if settings.get("rlhf_type") != "grpo" or not settings.get("use_vllm"):
        raise ReplayError(
            f"--rlhf_type {settings.get('rlhf_type')} --use_vllm {settings.get('use_vllm')}: only "
            "what vLLM drew for GRPO has a seed of its own, with which it can be drawn again."
        )
    if settings.get("tuner_type") not in ("full", "lora"):
        raise ReplayError(
            f"--tuner_type {settings.get('tuner_type')}: checkpoints of `full` and `lora` can be "
            "replayed."
        )
    if settings.get("quant_method"):
        raise ReplayError(
            f"--quant_method {settings['quant_method']}: replay does not quantize as the training "
            "did; it can replay runs without quantization."
        )


def first_turns(rows: Sequence[SampleRow], settings: Mapping[str, Any]) -> list[SampleRow]:
    """The rows of a group that can be drawn again: each sample's first turn.

    Raises:
        ReplayError: the samples have no seeds or others than `--seed` gives, they were drawn with
            different weights, or a server held the conversation.
    """
    unseeded = [row for row in rows if row.seed is None]
    if unseeded:
        raise ReplayError(
            f"{describe(unseeded[0].sample_id)} has no seed: the engine drew it with one that "
            "nobody wrote down (--rollout_seed_mode engine, or --use_vllm false). Train with "
            "--rollout_seed_mode sample."
        )
    if settings.get("multi_turn_scheduler") and settings.get("vllm_mode") == "server":
        raise ReplayError(
            f"--multi_turn_scheduler {settings['multi_turn_scheduler']} with --vllm_mode server: "
            "the server held the conversation, and the log has all its turns as one; they depend "
            "on what the scheduler or its tools answered, which cannot be asked again."
        )
    first = [row for row in rows if row.sample_id.turn == 0]
    versions = sorted({row.weight_version for row in first})
    if len(versions) != 1:
        raise ReplayError(
            f"{describe(rows[0].sample_id)}: the group's samples were drawn with the weights of "
            f"steps {versions}; expected those of one step."
        )
    seed = settings["seed"]
    for row in first:
        if sample_seed(seed, row.sample_id) != row.seed:
            raise ReplayError(
                f"{describe(row.sample_id)} was drawn with seed {row.seed}, and --seed {seed} of "
                f"args.json gives it {sample_seed(seed, row.sample_id)}: another --seed drew this "
                "part of the run (one that was resumed?). Give that one with --set seed=N."
            )
    return first


def later_turns_note(rows: Sequence[SampleRow]) -> str | None:
    """Why turns behind the first are left out; None where there are none."""
    num_later = sum(row.sample_id.turn > 0 for row in rows)
    if not num_later:
        return None
    return (
        f"{num_later} later turns of these conversations are not drawn again: their prompts hold "
        "what the scheduler or its tools answered, which the log's first turns cannot give."
    )


def weights_of(run: Run, version: int) -> Weights:
    """The weights after `version` optimizer steps.

    Raises:
        ReplayError: the checkpoint is not there; names it, and the settings that would have kept
            it.
    """
    settings = run.settings
    base = str(settings["model"])
    given = tuple(map(str, settings.get("adapters") or ()))
    if version == 0 and not (settings.get("resume_from_checkpoint") and _resumes_model(settings)):
        return Weights(model=base, adapters=given)
    checkpoint = _checkpoint(run, version)
    if settings["tuner_type"] == "full":
        return Weights(model=str(checkpoint))
    return Weights(model=base, adapters=(str(checkpoint),))


def _resumes_model(settings: Mapping[str, Any]) -> bool:
    """Whether steps are counted from 0 on, from the weights of `--resume_from_checkpoint`."""
    return bool(settings.get("resume_only_model"))


def _checkpoint(run: Run, version: int) -> Path:
    name = f"checkpoint-{version}"
    candidates = [run.folder / name]
    resumed = settings_path(run.settings.get("resume_from_checkpoint"))
    if resumed is not None:
        if version == 0:
            candidates = [resumed]
        elif resumed.name == name:
            candidates.append(resumed)
    for folder in candidates:
        if folder.is_dir():
            return _with_weights(folder, run.settings["tuner_type"])
    raise ReplayError(_lack_of(candidates[0], run, version))


def settings_path(value: Any) -> Path | None:
    return Path(value).expanduser() if isinstance(value, str) and value else None


def _with_weights(folder: Path, tuner_type: str) -> Path:
    whole = any(any(folder.glob(pattern)) for pattern in WEIGHTS)
    if not whole or (tuner_type == "lora" and not (folder / ADAPTER).is_file()):
        raise ReplayError(
            f"{folder} holds no {'adapter' if tuner_type == 'lora' else 'model'} in Hugging Face "
            "format (weights in shards of DeepSpeed or FSDP?): convert it in place."
        )
    return folder


def _lack_of(folder: Path, run: Run, version: int) -> str:
    settings = run.settings
    steps = sorted(
        int(match[1])
        for path in run.folder.glob("checkpoint-*")
        if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    )
    there = ", ".join(f"checkpoint-{step}" for step in steps) or "no checkpoint"
    return (
        f"{folder} is not there ({run.folder} has {there}): its weights drew the group. "
        f"{_remedy(settings, version)} in the next training; or restore it from a copy. Groups "
        "that the untrained model or a checkpoint that is there drew can be replayed."
    )


def _remedy(settings: Mapping[str, Any], version: int) -> str:
    strategy, every = settings.get("save_strategy"), settings.get("save_steps") or 0
    limit = settings.get("save_total_limit")
    if strategy != "steps":
        return f"--save_strategy {strategy}: set --save_strategy steps and --save_steps 1"
    if every < 1 or version % every:
        return f"--save_steps {every:g} does not keep step {version}: set 1, or a divisor of it,"
    if limit:
        return f"--save_total_limit {limit}: set a greater one, or leave it out,"
    return f"--save_steps {every:g} had saved it: leave it where it is"
