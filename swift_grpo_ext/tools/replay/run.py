"""A run's settings, the samples that can be drawn again, and the weights that drew them. Pure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swift_grpo_ext.checks.finding import did_you_mean
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.sampling.seeding import sample_seed

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
ADAPTER = "adapter_config.json"
SEEDED = "only samples that vLLM drew for GRPO have seeds of their own"
CAN_BE_REPLAYED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "rlhf_type": (("grpo",), SEEDED),
    "use_vllm": ((True,), SEEDED),
    "tuner_type": (("full", "lora"), "replay loads checkpoints of `full` and `lora`"),
    "quant_method": ((None,), "replay loads weights without quantization"),
}
"""What each setting may be, and why."""


class ReplayError(ValueError):
    """A group cannot be drawn again; says why, and what would help."""


class Run(NamedTuple):
    """What a training left behind."""

    folder: Path
    """Its `--output_dir`."""

    settings: Mapping[str, Any]
    """Those of `args.json`, with the caller's changes."""


def read_run(folder: str | os.PathLike[str], changes: Mapping[str, Any]) -> Run:
    """Read the settings of a run.

    Args:
        folder: `--output_dir` of the training.
        changes: values that replace those of `args.json`.

    Raises:
        ReplayError: `args.json` is missing or broken, lacks a setting of `changes`, or belongs to a
            run whose engine cannot be built again.
    """
    path = Path(folder) / "args.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ReplayError(
            f"{path}, where ms-swift writes a run's settings, cannot be read ({e}). Give the "
            "folder that the training had as --output_dir."
        ) from e
    for name in changes:
        if name not in settings:
            hint = did_you_mean(name, settings) or "it is an argument of `swift rlhf`."
            raise ReplayError(f"--set {name}: {path} has no such setting; {hint}")
    settings = {**settings, **changes}
    for name, (allowed, reason) in CAN_BE_REPLAYED.items():
        value = settings.get(name)
        if value not in allowed:
            raise ReplayError(f"--{name} {value}: the run cannot be replayed: {reason}.")
    return Run(folder=Path(folder), settings=settings)


def first_turns(rows: Sequence[SampleRow], settings: Mapping[str, Any]) -> list[SampleRow]:
    """The rows of a group that can be drawn again: each sample's first turn.

    Raises:
        ReplayError: samples have no seeds, or others than `--seed` gives; different weights drew
            them; or a server led the conversation.
    """
    unseeded = [row for row in rows if row.seed is None]
    if unseeded:
        raise ReplayError(
            f"{unseeded[0].sample_id} has no seed: the engine drew it with one that "
            "nobody wrote down (--rollout_seed_mode engine, or --use_vllm false). Train with "
            "--rollout_seed_mode sample."
        )
    if settings.get("multi_turn_scheduler") and settings.get("vllm_mode") == "server":
        raise ReplayError(
            f"--multi_turn_scheduler {settings['multi_turn_scheduler']} with --vllm_mode server: "
            "the server led the conversation, and the log holds all its turns as one. They depend "
            "on answers of the scheduler or its tools, which replay cannot repeat."
        )
    first = [row for row in rows if row.sample_id.turn == 0]
    versions = sorted({row.weight_version for row in first})
    if len(versions) != 1:
        raise ReplayError(
            f"{rows[0].sample_id}: weights of the steps {versions} drew the samples of "
            "this group; expected those of one step."
        )
    seed = settings["seed"]
    for row in first:
        expected = sample_seed(seed, row.sample_id)
        if expected != row.seed:
            raise ReplayError(
                f"{row.sample_id} was drawn with seed {row.seed}, and --seed {seed} of "
                f"args.json gives it {expected}: another --seed drew this part of the run (one "
                "that was resumed?). Give that one with --set seed=N."
            )
    return first


def weights_of(run: Run, version: int) -> list[str]:
    """The weights after `version` optimizer steps: a model (directory or hub id), and the
    directories of adapters to be merged into it.

    Raises:
        ReplayError: the checkpoint is missing; names it, and the settings that keep it.
    """
    settings = run.settings
    base = str(settings["model"])
    resumed = settings.get("resume_from_checkpoint")
    # --resume_only_model counts steps from 0, from the weights of --resume_from_checkpoint.
    if version == 0 and not (resumed and settings.get("resume_only_model")):
        return [base, *map(str, settings.get("adapters") or ())]
    checkpoint = _checkpoint(run, version, Path(resumed).expanduser() if resumed else None)
    return [str(checkpoint)] if settings["tuner_type"] == "full" else [base, str(checkpoint)]


def _checkpoint(run: Run, version: int, resumed: Path | None) -> Path:
    own = run.folder / f"checkpoint-{version}"
    candidates = [own]
    if resumed is not None and (version == 0 or resumed.name == own.name):
        candidates = [resumed] if version == 0 else [own, resumed]
    for folder in filter(Path.is_dir, candidates):
        is_lora = run.settings["tuner_type"] == "lora"
        is_whole = any(any(folder.glob(pattern)) for pattern in WEIGHTS)
        if not is_whole or (is_lora and not (folder / ADAPTER).is_file()):
            raise ReplayError(
                f"{folder} holds no {'adapter' if is_lora else 'model'} in Hugging Face "
                "format (weights in shards of DeepSpeed or FSDP?): convert it in place."
            )
        return folder
    steps = [re.fullmatch(r"checkpoint-(\d+)", path.name) for path in run.folder.iterdir()]
    found = ", ".join(f"checkpoint-{s}" for s in sorted(int(match[1]) for match in steps if match))
    saving = " ".join(
        f"--{name} {run.settings.get(name)}"
        for name in ("save_strategy", "save_steps", "save_total_limit")
    )
    raise ReplayError(
        f"{candidates[0]} is not there ({run.folder} has {found or 'no checkpoint'}): its weights "
        f"drew the group. The run was saved with {saving}: in the next one set --save_strategy "
        f"steps, --save_steps 1 or a divisor of {version}, and a greater --save_total_limit or "
        "none; or restore the checkpoint from a copy."
    )
