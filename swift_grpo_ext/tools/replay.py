"""Run `swift-grpo-ext replay`: generate a recorded group again, and compare token by token.

The run's `args.json` gives the trainer, a checkpoint its weights, and selftest's `Rig` generates.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from swift_grpo_ext.checks.finding import Finding, collected, did_you_mean
from swift_grpo_ext.checks.rows import prompt_of
from swift_grpo_ext.flags import ExtFlags
from swift_grpo_ext.record.query import read_group
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import sample_seed
from swift_grpo_ext.tools.diff import compare_sample, find_decoder
from swift_grpo_ext.tools.harness import standard_output, with_trainer
from swift_grpo_ext.tools.runs import find_run

if TYPE_CHECKING:
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

# These settings of sampling are kept; those of model, template, data and engine have classes or a
# prefix.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_words"),
    *("max_completion_length", "num_generations", "structured_outputs_regex"),
    *("sleep_level", "lora_rank"),
)
# One process is enough: the tokens of a sample depend on its seed, prompt, weights and settings,
# and not on the number of ranks or engines (docs/promises.md, S2).
CHANGED: Mapping[str, Any] = {
    **{"rlhf_type": "grpo", "reward_funcs": ["format"], "beta": 0.0},
    **{"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1},
    **{"sample_log": "none", "report_to": ["none"], "save_strategy": "no", "eval_strategy": "no"},
    **{"add_version": False, "load_args": False, "custom_register_path": [], "ddp_backend": None},
    **{"gradient_accumulation_steps": 1, "steps_per_generation": 1, "sequence_parallel_size": 1},
}

BESIDE_MODEL = 0.4  # share of a GPU's memory for an engine beside the trainer's model

DIFFERENT = (
    "Tokens differ. If the log-probabilities before them agree (to about 1e-5 nats in float32, "
    "1e-2 in bfloat16), a kernel that depends on the batch has decided a near tie. Otherwise "
    "weights, prompt, media or settings are not the run's: args.json holds no environment "
    "variables (set MAX_PIXELS and the like as they were), and no settings of a server (give them "
    "with --set)."
)


def run(options: argparse.Namespace) -> int:
    """Replay a group; return 0 if all tokens are equal, 1 if some differ.

    Raises:
        OSError, ValueError: the group cannot be generated; the message has the reason.
    """
    with standard_output() as out:
        replay = _replay(options)
        if options.json:
            print(json.dumps(replay, default=asdict, ensure_ascii=False, indent=2), file=out)
        else:
            show(replay, out)
    return 0 if replay["equal"] else 1


def _replay(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values that `--json` prints."""
    folder, (step, number) = find_run(options.run_dir), options.round
    settings = read_settings(folder, dict(options.set))
    recorded = read_group(
        folder, phase=options.phase, step=step, number=number, group=options.group
    )
    check_seeds(recorded, settings)
    version = recorded[0].weight_version
    checkpoint = find_checkpoint(folder, settings, version)
    firsts = [row for row in recorded if not row.sample_id.turn]
    again, errors = generate_again(settings, checkpoint, firsts, options.phase)
    samples = []
    for row, generated in zip(firsts, again, strict=True):
        both = ({"token_ids": r.token_ids, "logprobs": r.logprobs} for r in (row, generated))
        difference, gap = compare_sample(row.sample_id, *both)
        sample = {"name": row.sample_id.request_id, "num_tokens": len(row.token_ids)}
        # The gap is near 0 if weights and prompt are the same.
        samples.append({**sample, "logprob_gap": gap, "difference": difference})
    is_equal = all(sample["difference"] is None for sample in samples)
    later = "Later turns of conversations are not generated again."
    notes = ([] if is_equal else [DIFFERENT]) + ([later] if len(firsts) < len(recorded) else [])
    return {
        "run_dir": str(folder),
        "weights": str(checkpoint or settings["model"]),
        "weight_version": version,
        "equal": is_equal,
        "samples": samples,
        "notes": notes + errors,
    }


def show(replay: Mapping[str, Any], out: TextIO) -> None:
    """Print a line for each sample."""
    print(f"Generated again with {replay['weights']}:", file=out)
    decoder = find_decoder(Path(replay["run_dir"]))
    for sample in replay["samples"]:
        gap, difference, result = sample["logprob_gap"], sample["difference"], "equal"
        agreement = "" if gap is None else f", log-probabilities within {gap:.1e} nats"
        if difference is not None:
            sentence = difference.describe(("in the record", "now"), (decoder, decoder))
            result = f"first difference, {sentence}"
        print(f"  {sample['name']}: {sample['num_tokens']} tokens{agreement}; {result}", file=out)
    num_equal = sum(sample["difference"] is None for sample in replay["samples"])
    print(f"{num_equal} of {len(replay['samples'])} samples have equal tokens.", file=out)
    for note in replay["notes"]:
        print(f"Note: {note}", file=out)


# --- the run ---


def read_settings(folder: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run's `args.json`; `changes` replace some of them. Raise
    ValueError if the file cannot be read, or lacks a setting of `changes`."""
    path = folder / "args.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}, a run's settings, cannot be read: {e}.") from e
    for name in changes:
        if name not in settings:
            hint = did_you_mean(name, settings)
            raise ValueError(f"--set {name}: {path} has no such setting. {hint}".rstrip())
    if settings.get("vllm_mode") == "server":  # args.json lacks the servers' share
        settings["vllm_gpu_memory_utilization"] = BESIDE_MODEL
    return {**settings, **changes}


def check_seeds(samples: Sequence[SampleRow], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if samples have no seeds, or other seeds than `--seed` gives."""
    for sample in samples:
        if sample.seed is None:
            raise ValueError(
                f"{sample.sample_id} has no seed: the engine chose one that was not recorded "
                "(--rollout_seed_mode engine, or --use_vllm false). Train with "
                "--rollout_seed_mode sample."
            )
        expected = sample_seed(settings["seed"], sample.sample_id)
        if expected != sample.seed:
            raise ValueError(
                f"{sample.sample_id} has the seed {sample.seed}, and --seed {settings['seed']} of "
                f"args.json gives it {expected}: this part of the run had another --seed (was it "
                "resumed?). Give that one with --set seed=N.",
            )


def find_prompt(row: SampleRow, data: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first row of a data set with the fingerprint of the sample's prompt; raise
    ValueError if there is none."""
    logged = json.loads(row.prompt)
    # ms-swift puts --system, or the template's own system message, in front of a row's messages.
    is_system = logged[0]["role"] == "system"
    for candidate in data:
        prompt = prompt_of(candidate)
        for num_system in range(1 + is_system):
            messages = [*logged[:num_system], *prompt["messages"]]
            if prompt_hash({**prompt, "messages": messages}) == row.fingerprint:
                return {**prompt, "messages": messages}
    raise ValueError(
        f"No row of the data set has the fingerprint {row.fingerprint} of the sample's prompt: "
        f"{row.prompt[:200]}. Give the data set that the training had, with --set "
        "'dataset=[\"FILE\"]'."
    )


def find_checkpoint(folder: Path, settings: Mapping[str, Any], version: int) -> Path | None:
    """Return the checkpoint with the weights after `version` optimizer steps; None if these are
    `--model`'s. Raise ValueError if they are missing."""
    base, resumed = str(settings["model"]), settings.get("resume_from_checkpoint")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise ValueError(f"--model {base} is not there: give its place with --set model=DIR.")
    if version == 0 and not (resumed and settings.get("resume_only_model")):
        return None
    checkpoint = folder / f"checkpoint-{version}"
    # --resume_only_model counts steps from 0, from the weights of --resume_from_checkpoint.
    if resumed and (version == 0 or Path(resumed).name == checkpoint.name):
        checkpoint = checkpoint if checkpoint.is_dir() else Path(resumed).expanduser()
    if not checkpoint.is_dir():
        present = sorted(path.name for path in folder.glob("checkpoint-*"))
        raise ValueError(
            f"{checkpoint} is not there ({folder} has {', '.join(present) or 'no checkpoint'}):"
            " its weights generated the group. Restore it from a copy; the next run keeps it with "
            f"--save_strategy steps, --save_steps 1 or a divisor of {version}, and a greater "
            "--save_total_limit or none."
        )
    return checkpoint


# --- the trainer ---


def generate_again(
    settings: Mapping[str, Any], checkpoint: Path | None, rows: Sequence[SampleRow], phase: str
) -> tuple[list[SampleRow], list[str]]:
    """Generate the samples of recorded rows with the trainer of a run's settings, at the weights of
    `checkpoint`; return the rows with their new tokens, and the errors that the checks of a start
    find."""
    import swift_grpo_ext

    swift_grpo_ext.register()
    from swift.arguments import BaseArguments

    from swift_grpo_ext.command_line import RLHFExtArguments
    from swift_grpo_ext.tools.selftest.rig import Rig
    from swift_grpo_ext.training.group import logprobs_of, trained_ids

    names = {f.name for cls in (BaseArguments, ExtFlags) for f in fields(cls)}
    names.update(SAMPLING, (name for name in settings if name.startswith("vllm_")))
    names &= {f.name for f in fields(RLHFExtArguments)} & settings.keys()
    values = {name: settings[name] for name in names if not name.startswith("vllm_server")}
    is_full = settings["tuner_type"] == "full"
    # Adapters are loaded with the model, and whole weights into the trainer (`use`).
    if checkpoint and not is_full:
        values["adapters"] = [str(checkpoint)]
    again, found = list[SampleRow](), list[Finding]()

    def use(trainer: RolloutGRPOTrainer) -> None:
        if checkpoint and is_full:
            trainer._load_from_checkpoint(str(checkpoint))
        data = trainer.train_dataset if phase == "train" else trainer.eval_dataset
        distinct = {row.fingerprint: row for row in rows}
        prompts = {name: find_prompt(row, data or ()) for name, row in distinct.items()}
        rig = Rig(trainer)
        config = rig.config(int(trainer.max_completion_length))
        ids = [row.sample_id for row in rows]
        samples = rig.generate([prompts[row.fingerprint] for row in rows], ids, config)
        for row, sample in zip(rows, samples, strict=True):
            ids_now, logprobs_now = trained_ids(sample), logprobs_of(sample)
            again.append(replace(row, token_ids=ids_now, logprobs=logprobs_now))

    with tempfile.TemporaryDirectory() as output, collected(found.append):
        values |= {"output_dir": output, **CHANGED}
        values["per_device_train_batch_size"] = settings["num_generations"]
        with_trainer(RLHFExtArguments(**values), use)
    return again, [finding.sentence for finding in found if finding.level == "error"]
