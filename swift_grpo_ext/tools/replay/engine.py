"""Generate the samples of a recorded group again, by the trainer of the run's settings and weights.

It is one process, with any settings of the run: a sample's tokens depend on its seed, prompt,
weights and settings alone (docs/promises.md, S2).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.checks.finding import Finding, collected
from swift_grpo_ext.flags import ExtFlags
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.tools.harness import with_trainer
from swift_grpo_ext.tools.replay.run import Run

if TYPE_CHECKING:
    from swift_grpo_ext.rollout.wire import Completion
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_words"),
    *("max_completion_length", "num_generations", "structured_outputs_regex"),
    *("sleep_level", "lora_rank"),
)
"""Settings that tokens depend on, beside those of model, template, data and engine."""

CHANGED: Mapping[str, Any] = {
    **{"rlhf_type": "grpo", "reward_funcs": ["format"], "beta": 0.0},
    **{"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1},
    **{"sample_log": "none", "report_to": ["none"], "save_strategy": "no", "eval_strategy": "no"},
    **{"add_version": False, "load_args": False, "custom_register_path": [], "ddp_backend": None},
    **{"gradient_accumulation_steps": 1, "steps_per_generation": 1, "sequence_parallel_size": 1},
}


def with_trainer_of(
    run: Run, weights: Sequence[str], use: Callable[[RolloutGRPOTrainer], None]
) -> list[Finding]:
    """Build the trainer of a run at `weights` (a model, and adapters of it), and call `use` with
    it; return what the checks of a start find."""
    import swift_grpo_ext

    swift_grpo_ext.register()
    from swift.arguments import BaseArguments

    from swift_grpo_ext.command_line import RLHFExtArguments

    settings, found = run.settings, list[Finding]()
    base, (model, *adapters) = str(settings["model"]), weights
    names = {f.name for cls in (BaseArguments, ExtFlags) for f in fields(cls)}
    names.update(SAMPLING, (name for name in settings if name.startswith("vllm_")))
    names &= {f.name for f in fields(RLHFExtArguments)} & settings.keys()
    values = {name: settings[name] for name in names if not name.startswith("vllm_server")}
    # The training's own model knows the ends of turns; a checkpoint's generation_config.json is
    # ms-swift's.
    folder = settings.get("model_dir") or base
    if model != base and Path(folder).is_dir():
        given = settings.get("vllm_engine_kwargs") or {}
        values["vllm_engine_kwargs"] = {"generation_config": folder, **given}
    with tempfile.TemporaryDirectory() as output, collected(found.append):
        values |= {"model": model, "adapters": adapters, "output_dir": output}
        values["per_device_train_batch_size"] = settings["num_generations"]
        with_trainer(RLHFExtArguments(**{**values, **CHANGED}), use)
    return found


def generate_again(
    trainer: RolloutGRPOTrainer, asked: Sequence[tuple[SampleRow, Mapping[str, Any]]]
) -> list[Completion]:
    """Generate samples of a group again: recorded rows with their prompts."""
    from swift_grpo_ext.rollout.answers import answer_of
    from swift_grpo_ext.tools.selftest.rig import Rig

    rig = Rig(trainer)
    rows, ids = [dict(prompt) for _, prompt in asked], [row.sample_id for row, _ in asked]
    _, outputs = rig.generate(rows, ids, rig.config(int(trainer.max_completion_length)))
    return [answer_of(output).completions[0] for output in outputs]
