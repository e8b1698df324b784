"""A run's settings, the samples that can be generated again, their prompts and weights. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swift_grpo_ext.checks.finding import did_you_mean
from swift_grpo_ext.checks.rows import prompt_of
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import sample_seed

BESIDE_MODEL = 0.4  # the share of a GPU's memory for an engine beside the trainer's model


class ReplayError(ValueError):
    """A group cannot be generated again; the message says why, and the remedy."""


class Run(NamedTuple):
    """The files that a training left behind."""

    folder: Path  # its `--output_dir`
    settings: Mapping[str, Any]  # of `args.json`, with the caller's changes


def read_run(folder: str | os.PathLike[str], changes: Mapping[str, Any]) -> Run:
    """Read the settings of a run; `changes` replace some of them.

    Raises:
        ReplayError: `args.json` is missing or broken, lacks a setting of `changes`, or belongs to a
            run with an engine that cannot be built again.
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
            hint = did_you_mean(name, settings)
            raise ReplayError(f"--set {name}: {path} has no such setting. {hint}".rstrip())
    if settings.get("vllm_mode") == "server":  # its engine had what the servers were given
        settings["vllm_gpu_memory_utilization"] = BESIDE_MODEL
    settings |= changes
    for name, allowed in (("tuner_type", ("full", "lora")), ("quant_method", (None,))):
        if settings.get(name) not in allowed:
            raise ReplayError(
                f"--{name} {settings.get(name)}: the run cannot be replayed; expected full or "
                "LoRA training without quantization."
            )
    return Run(folder=Path(folder), settings=settings)


def check_samples(samples: Sequence[SampleRow], settings: Mapping[str, Any]) -> None:
    """Raise `ReplayError` where samples have no seeds, or others than `--seed` gives."""
    for sample in samples:
        if sample.seed is None:
            raise ReplayError(
                f"{sample.sample_id} has no seed: the engine chose one that was not recorded "
                "(--rollout_seed_mode engine, or --use_vllm false). Train with "
                "--rollout_seed_mode sample."
            )
        expected = sample_seed(settings["seed"], sample.sample_id)
        if expected != sample.seed:
            raise ReplayError(
                f"{sample.sample_id} has the seed {sample.seed}, and --seed {settings['seed']} of "
                f"args.json gives it {expected}: this part of the run had another --seed (was it "
                "resumed?). Give that one with --set seed=N.",
            )


def find_prompt(
    row: SampleRow, data: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the first row of a data set whose prompt has the sample's fingerprint; raises
    `ReplayError` where there is none."""
    logged = json.loads(row.prompt)
    # ms-swift puts --system, or the template's own system message, in front of a row's messages.
    is_system = logged[0]["role"] == "system"
    for candidate in data:
        prompt = prompt_of(candidate)
        for num_system in range(1 + is_system):
            messages = [*logged[:num_system], *prompt["messages"]]
            if prompt_hash({**prompt, "messages": messages}) == row.fingerprint:
                return {**prompt, "messages": messages}
    names = [*(settings.get("dataset") or ()), *(settings.get("val_dataset") or ())]
    raise ReplayError(
        f"No row of {' '.join(map(str, names)) or 'any data set'} has the fingerprint "
        f"{row.fingerprint} of the sample's prompt: {row.prompt[:200]}. Give the data set that the "
        "training had, with --set 'dataset=[\"FILE\"]'."
    )


def weights_of(run: Run, version: int) -> list[str]:
    """Return the weights after `version` optimizer steps: a model (directory or hub id), and the
    directories of adapters; raises `ReplayError` where they are missing, or not in Hugging Face
    format."""
    settings = run.settings
    base, is_lora = str(settings["model"]), settings["tuner_type"] == "lora"
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ReplayError(f"--model {base} is not there: give its place with --set model=DIR.")
    resumed = settings.get("resume_from_checkpoint")
    if version == 0 and not (resumed and settings.get("resume_only_model")):
        return [base, *map(str, settings.get("adapters") or ())]
    checkpoint = run.folder / f"checkpoint-{version}"
    # --resume_only_model counts steps from 0, from the weights of --resume_from_checkpoint.
    if resumed and (version == 0 or Path(resumed).name == checkpoint.name):
        checkpoint = checkpoint if checkpoint.is_dir() else Path(resumed).expanduser()
    if not checkpoint.is_dir():
        present = sorted(path.name for path in run.folder.glob("checkpoint-*"))
        raise ReplayError(
            f"{checkpoint} is not there ({run.folder} has {', '.join(present) or 'no checkpoint'}):"
            " its weights generated the group. Restore it from a copy; the next run keeps it with "
            f"--save_strategy steps, --save_steps 1 or a divisor of {version}, and a greater "
            "--save_total_limit or none."
        )
    is_whole = any(checkpoint.glob("*.safetensors")) or any(checkpoint.glob("pytorch_model*.bin"))
    if not is_whole or (is_lora and not (checkpoint / "adapter_config.json").is_file()):
        raise ReplayError(
            f"{checkpoint} holds no {'adapter' if is_lora else 'model'} in Hugging Face format "
            "(weights in shards of DeepSpeed or FSDP?): convert it in place."
        )
    return [base, str(checkpoint)] if is_lora else [str(checkpoint)]
