"""A run's settings, the samples that can be generated again, their prompts and weights. Pure.

The prompt of a later turn is that of the turn before, its answer, and what the record says was
added. It counts where its hash is the record's: nothing was changed that the record does not have.
"""

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
from swift_grpo_ext.sampling.seeding import SampleId, sample_seed
from swift_grpo_ext.upstream.rows import KINDS

BESIDE_MODEL = 0.4
"""The share of a GPU's memory for an engine that stands beside the trainer's model."""


class ReplayError(ValueError):
    """A group cannot be generated again; the message says why, and what would help."""


class Run(NamedTuple):
    """The files that a training left behind."""

    folder: Path
    """Its `--output_dir`."""

    settings: Mapping[str, Any]
    """The settings of `args.json`, with the caller's changes."""


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
    if settings.get("vllm_mode") == "server":  # its engine had what the servers were given
        settings["vllm_gpu_memory_utilization"] = BESIDE_MODEL
    settings |= changes
    for name, allowed in (("tuner_type", ("full", "lora")), ("quant_method", (None,))):
        if settings.get(name) not in allowed:
            raise ReplayError(
                f"--{name} {settings.get(name)}: the run cannot be replayed, which loads whole "
                "models and LoRA adapters without quantization."
            )
    return Run(folder=Path(folder), settings=settings)


class Drawn(NamedTuple):
    """What decides a sample's tokens beside its prompt."""

    sample_id: SampleId
    seed: int | None
    weight_version: int


def check_samples(samples: Sequence[Drawn], settings: Mapping[str, Any]) -> None:
    """Refuse a group that cannot be generated again.

    Raises:
        ReplayError: samples have no seeds, or others than `--seed` gives; or different weights
            generated them.
    """
    unseeded = [sample for sample in samples if sample.seed is None]
    if unseeded:
        raise ReplayError(
            f"{unseeded[0].sample_id} has no seed: the engine chose one that nobody wrote down "
            "(--rollout_seed_mode engine, or --use_vllm false). Train with "
            "--rollout_seed_mode sample."
        )
    versions = sorted({sample.weight_version for sample in samples})
    if len(versions) != 1:
        raise ReplayError(
            f"{samples[0].sample_id}: weights of the steps {versions} generated the samples of "
            "this group; expected those of one step."
        )
    for sample in samples:
        expected = sample_seed(settings["seed"], sample.sample_id)
        if expected != sample.seed:
            raise ReplayError(
                f"{sample.sample_id} has the seed {sample.seed}, and --seed {settings['seed']} of "
                f"args.json gives it {expected}: this part of the run had another --seed (was it "
                "resumed?). Give that one with --set seed=N."
            )


class LeftOutError(ValueError):
    """One turn cannot be generated again; the message says why."""


def next_prompt(before: Mapping[str, Any], answer: SampleRow, row: SampleRow) -> dict[str, Any]:
    """Return the columns of a later turn's prompt.

    Args:
        before: those of the turn before.
        answer: that turn.
        row: the later turn.

    Raises:
        LeftOutError: the record lacks something of it.
    """
    added = json.loads(row.prompt)
    nameless = [name for name in row.media if name.startswith("blake2b:")]
    if nameless:
        raise LeftOutError(
            f"{len(nameless)} of the media that came with it have no path: the record has their "
            "digests, and small pictures"
        )
    messages = [dict(message) for message in before["messages"]]
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    messages[-1]["content"] = list(answer.token_ids)
    prompt = {**before, "messages": [*messages, *added]}
    left = list(row.media)
    for kind in KINDS:
        count = sum(str(message.get("content")).count(f"<{kind}>") for message in added)
        prompt[f"{kind}s"] = [*(before.get(f"{kind}s") or ()), *left[:count]]
        left = left[count:]
    if prompt_hash(prompt) != row.fingerprint:
        raise LeftOutError(
            "the engine's prompt was another than the turn before, its answer, and what the record "
            "says was added: a scheduler changed what stood there, or a server led the conversation"
        )
    return prompt


def find_prompt(
    row: SampleRow, data: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the first row of a data set whose prompt has the sample's fingerprint.

    Raises:
        ReplayError: no row has it.
    """
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
    directories of adapters to be merged into it.

    Raises:
        ReplayError: model or checkpoint is missing, or holds no weights in Hugging Face format.
    """
    settings = run.settings
    base, is_lora = str(settings["model"]), settings["tuner_type"] == "lora"
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ReplayError(f"--model {base} is not there: give its place with --set model=DIR.")
    resumed = settings.get("resume_from_checkpoint")
    checkpoint = run.folder / f"checkpoint-{version}"
    if version == 0:
        # --resume_only_model counts steps from 0, from the weights of --resume_from_checkpoint.
        if not resumed or not settings.get("resume_only_model"):
            return [base, *map(str, settings.get("adapters") or ())]
        checkpoint = Path(resumed).expanduser()
    elif resumed and not checkpoint.is_dir() and Path(resumed).name == checkpoint.name:
        checkpoint = Path(resumed).expanduser()
    if not checkpoint.is_dir():
        present = sorted(path.name for path in run.folder.glob("checkpoint-*"))
        saving = " ".join(
            f"--{name} {settings.get(name)}"
            for name in ("save_strategy", "save_steps", "save_total_limit")
        )
        raise ReplayError(
            f"{checkpoint} is not there ({run.folder} has {', '.join(present) or 'no checkpoint'}):"
            f" its weights generated the group. The run was saved with {saving}: in the next one "
            f"set --save_strategy steps, --save_steps 1 or a divisor of {version}, and a greater "
            "--save_total_limit or none; or restore the checkpoint from a copy."
        )
    is_whole = any(checkpoint.glob("*.safetensors")) or any(checkpoint.glob("pytorch_model*.bin"))
    if not is_whole or (is_lora and not (checkpoint / "adapter_config.json").is_file()):
        raise ReplayError(
            f"{checkpoint} holds no {'adapter' if is_lora else 'model'} in Hugging Face format "
            "(weights in shards of DeepSpeed or FSDP?): convert it in place."
        )
    return [base, str(checkpoint)] if is_lora else [str(checkpoint)]
