"""The trainer's engine, built again without a trainer, and called as the training called it.

It runs on one machine in one process, whatever the run had: a sample's tokens depend on its seed,
prompt, weights and settings alone (SPEC S2).
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import swift.infer_engine
from swift.arguments import BaseArguments
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers import GRPOTrainer

from swift_grpo_ext.checks.finding import enforce
from swift_grpo_ext.checks.preflight import check_model
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.generate import RolloutSettings, generate, to_rollout_outputs
from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.tools.replay.run import ReplayError, Run
from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import verify
from swift_grpo_ext.upstream.cpu import apply_cpu_settings


def draw_again(
    run: Run,
    weights: Sequence[str],
    prompts: Mapping[str, Mapping[str, Any]],
    rows: Sequence[SampleRow],
) -> tuple[list[tuple[list[int], list[float] | None]], Any]:
    """Draw the samples of a group anew; returns token ids and log-probabilities of each, in the
    order of `rows`, and the tokenizer.

    Args:
        weights: as `weights_of` gives them.
        prompts: rows of ms-swift's, by their fingerprints.
        rows: the samples, as they were logged.
    """
    settings = run.settings
    with _one_model(run, weights) as model:
        engine, config = make_engine(settings, model, base=weights[0], num_samples=len(rows))

        def call_engine(requests: list[Any], metadatas: list[Any]) -> list[list[Any]]:
            answers = engine.infer(requests, config, use_tqdm=False)
            pairs = zip(answers, metadatas, strict=True)
            return [to_rollout_outputs(answer, metadata, "replay") for answer, metadata in pairs]

        def request(number: int) -> Any:
            prompt = dict(prompts[rows[number].fingerprint])
            return OnPolicySample.from_row(prompt).to_infer_request()

        of_run: Any = SimpleNamespace(**settings)
        outputs, _ = generate(
            [row.sample_id for row in rows],
            [row.fingerprint for row in rows],
            make_request=request,
            make_metadata=partial(RolloutSettings.of(of_run).metadata, packed=True),
            sharing=SingleRank(),
            call_engine=call_engine,
        )
        drawn = [
            (
                list(output.response.choices[0].token_ids),
                list(chain(*(output.rollout_logprobs or ()))) or None,
            )
            for output in outputs
        ]
        return drawn, engine.tokenizer


def make_engine(
    settings: Mapping[str, Any], model: str, *, base: str, num_samples: int
) -> tuple[Any, Any]:
    """The engine and the request config that the run's trainer had, for one process.

    Args:
        model: directory or hub id of the weights.
        base: the model that was trained; its generation_config.json counts.
        num_samples: how many are drawn at a time.
    """
    verify((*pins.TRAINER, *pins.ENGINE))
    args = base_arguments(settings, model)
    apply_cpu_settings(args, ())
    _, processor = args.get_model_processor(load_model=False)
    engine_kwargs = dict(settings.get("vllm_engine_kwargs") or {})
    if base != model:
        engine_kwargs.setdefault("generation_config", base_arguments(settings, base).model_dir)
    changes = {
        "vllm_engine_kwargs": engine_kwargs,
        "vllm_enable_lora": False,  # adapters are merged
        "vllm_max_num_seqs": settings.get("vllm_max_num_seqs") or num_samples,
        "sleep_level": 0,
        "stop_words": list(settings.get("stop_words") or ()),
    }
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(**{**settings, **changes}),
        model=args,  # has the model's `model_dir`, `model_info` and `model_meta`
        template=args.get_template(processor),
        accelerator=SimpleNamespace(process_index=0),
        vllm_version_ge_0_10_2=True,
    )
    GRPOTrainer._prepare_rollout_params(trainer)
    if not has_accelerator():
        trainer.vllm_tensor_parallel_size = 1

    def engine_of_one_process(*args: Any, **kwargs: Any) -> RolloutEngine:
        return RolloutEngine(*args, **{**kwargs, "distributed_executor_backend": None})

    swift.infer_engine.GRPOVllmEngine = engine_of_one_process
    return GRPOTrainer._prepare_vllm_engine(trainer), trainer.request_config


def base_arguments(settings: Mapping[str, Any], model: str, **changes: Any) -> BaseArguments:
    """ms-swift's arguments about model, template and data, with the run's values.

    Raises:
        ValueError: a plugin of the run, or the model, is not there.
    """
    plugins = settings.get("external_plugins") or []
    missing = [plugin for plugin in plugins if not Path(plugin).expanduser().is_file()]
    if missing:
        raise ReplayError(
            f"--external_plugins {' '.join(missing)} of args.json is not there, seen from "
            f"{Path.cwd()}: run in the folder where the training ran, or leave out what only "
            "rewards need, with --set 'external_plugins=[\"plugins/grpo_ext.py\"]'."
        )
    enforce(check_model(SimpleNamespace(model=model)))
    names = BaseArguments.__dataclass_fields__
    values = {name: value for name, value in settings.items() if name in names}
    own = {"model": model, "adapters": [], "load_args": False, "custom_register_path": []}
    return BaseArguments(**{**values, **own, **changes})


def data_rows(settings: Mapping[str, Any], phase: str) -> Iterator[Mapping[str, Any]]:
    """The rows of `--dataset`, or of what a run evaluated on, as ms-swift loads them."""
    train, evaluated = base_arguments(settings, settings["model"]).load_dataset()
    yield from (train if phase == "train" else evaluated) or ()


@contextmanager
def _one_model(run: Run, weights: Sequence[str]) -> Iterator[str]:
    """A model that vLLM can load; merged adapters stand beside the checkpoints for as long."""
    base, *adapters = weights
    if not adapters:
        yield base
        return
    from swift.pipelines.export.merge_lora import merge_lora

    # The disk of the checkpoints has room for one more.
    parent = run.folder if os.access(run.folder, os.W_OK) else None
    folder = tempfile.mkdtemp(prefix="replay-", dir=parent)
    try:
        args: Any = base_arguments(run.settings, base, adapters=adapters)
        args.output_dir, args.safe_serialization = folder, True
        args.max_shard_size = run.settings["max_shard_size"]
        merge_lora(args, device_map="cpu", replace_if_exists=True)
        gc.collect()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
