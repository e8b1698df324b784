"""The engine of a run, made again, and asked as the training asked it.

On one machine, in one process, whatever the run had: a sample's tokens depend on nothing else than
its seed, prompt, weights and settings (SPEC S2).
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swift.arguments import BaseArguments
from swift.infer_engine.protocol import RequestConfig
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.checks.preflight import check_model
from swift_grpo_ext.record.row import SampleRow
from swift_grpo_ext.replay.compare import Tokens
from swift_grpo_ext.replay.run import ReplayError, Run, Weights
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import Pin, verify
from swift_grpo_ext.upstream.cpu import apply_cpu_settings

PINS = (
    Pin("swift.arguments", "BaseArguments.get_template", ("self", "processor", "kwargs")),
    Pin("swift.arguments", "BaseArguments.get_model_processor", ("self",)),
    Pin("swift.arguments", "BaseArguments.load_dataset", ("self",)),
    Pin("swift.pipelines.export.merge_lora", "merge_lora",
        ("args", "device_map", "replace_if_exists")),
    Pin("swift.rl_core.data", "OnPolicySample.from_row", ("cls", "row")),
    Pin("swift.rl_core.data", "OnPolicySample.to_infer_request", ("self", "include_extra")),
    # `request_config` and `make_engine` repeat what they do; only a trainer can call them.
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_rollout_params", ("self",)),
    Pin("swift.rlhf_trainers", "GRPOTrainer._prepare_vllm_engine", ("self",)),
)  # fmt: skip
verify(PINS)


def draw_again(
    run: Run,
    weights: Weights,
    prompts: Mapping[str, Mapping[str, Any]],
    rows: Sequence[SampleRow],
) -> tuple[list[Tokens], Any]:
    """Draw the samples of a group anew, in the order of `rows`; and the tokenizer.

    Args:
        prompts: rows of ms-swift's, by their fingerprints.
        rows: the samples, as they were logged.
    """
    from swift_grpo_ext.rollout.draw import RankBatch, draw, to_rollout_outputs
    from swift_grpo_ext.rollout.engine import RolloutEngine
    from swift_grpo_ext.rollout.rank_group import SingleRank

    settings = run.settings
    with _one_model(run, weights) as model:
        engine = make_engine(RolloutEngine, settings, model, base=weights.model, seats=len(rows))
        config = request_config(settings)

        def ask(requests: list[Any], metadatas: list[Any]) -> list[list[Any]]:
            answers = engine.infer(requests, config, use_tqdm=False)
            pairs = zip(answers, metadatas, strict=True)
            return [to_rollout_outputs(answer, metadata, "replay") for answer, metadata in pairs]

        rank_batch = RankBatch(
            sample_ids=[row.sample_id for row in rows],
            fingerprints=[row.fingerprint for row in rows],
            request=lambda number: _request(prompts[rows[number].fingerprint]),
            run_seed=settings["seed"],
            grouped=bool(settings["rollout_group_requests"]),
            packed=True,
            **stop_settings(settings),
        )
        outputs, _ = draw(rank_batch, SingleRank(), ask)
        return [_tokens(output) for output in outputs], engine.tokenizer


def _request(prompt: Mapping[str, Any]) -> Any:
    return OnPolicySample.from_row(dict(prompt)).to_infer_request()


def stop_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of `RankBatch`, beside ms-swift's stop words."""
    return {
        "stop_token_ids": tuple(settings.get("stop_token_ids") or ()),
        "include_stop_str_in_output": settings.get("include_stop_str_in_output", True),
    }


def request_config(settings: Mapping[str, Any]) -> RequestConfig:
    """As `GRPOTrainer._prepare_rollout_params` makes it."""
    return RequestConfig(
        n=1,
        max_tokens=settings["max_completion_length"],
        temperature=settings["temperature"],
        top_p=settings["top_p"],
        top_k=settings["top_k"],
        min_p=settings.get("min_p"),
        repetition_penalty=settings["repetition_penalty"],
        stop=list(settings.get("stop_words") or ()),
        return_details=True,
        logprobs=True,
        structured_outputs_regex=settings.get("structured_outputs_regex"),
    )


def make_engine(
    engine_class: Any, settings: Mapping[str, Any], model: str, *, base: str, seats: int
) -> Any:
    """As `GRPOTrainer._prepare_vllm_engine` makes it, for one process.

    Args:
        model: directory or hub id of the weights.
        base: of the model that was trained: its generation_config.json counts.
        seats: samples that are drawn at a time.
    """
    args = base_arguments(settings, model)
    apply_cpu_settings(args, ())
    _, processor = args.get_model_processor(load_model=False)
    template = args.get_template(processor)
    kwargs = dict(settings.get("vllm_engine_kwargs") or {})
    if base != model:
        kwargs.setdefault("generation_config", base_arguments(settings, base).model_dir)
    ranks = settings.get("vllm_tensor_parallel_size") or 1
    return engine_class(
        args.model_dir,
        torch_dtype=args.model_info.torch_dtype,
        model_type=args.model_meta.model_type,
        tensor_parallel_size=ranks if has_accelerator() else 1,
        gpu_memory_utilization=settings["vllm_gpu_memory_utilization"],
        enable_prefix_caching=settings["vllm_enable_prefix_caching"],
        max_num_seqs=settings.get("vllm_max_num_seqs") or seats,
        enforce_eager=settings["vllm_enforce_eager"],
        limit_mm_per_prompt=settings.get("vllm_limit_mm_per_prompt"),
        max_model_len=settings.get("vllm_max_model_len"),
        seed=0,
        disable_cascade_attn=settings["vllm_disable_cascade_attn"],
        load_format=kwargs.pop("load_format", "auto"),
        mm_processor_cache_gb=settings.get("vllm_mm_processor_cache_gb"),
        template=template,
        engine_kwargs=kwargs,
        logprobs_mode="processed_logprobs",
    )


def base_arguments(settings: Mapping[str, Any], model: str, **changes: Any) -> BaseArguments:
    """ms-swift's arguments about model, template and data, with the run's values.

    Raises:
        ValueError: a plugin of the run or the model is not there.
    """
    plugins = settings.get("external_plugins") or []
    missing = [plugin for plugin in plugins if not Path(plugin).expanduser().is_file()]
    if missing:
        raise ReplayError(
            f"--external_plugins {' '.join(missing)} of args.json is not there, seen from "
            f"{Path.cwd()}: run in the folder where the training ran, or leave out what only "
            "rewards need, with --set 'external_plugins=[\"plugins/grpo_ext.py\"]'."
        )
    check_model(SimpleNamespace(model=model))
    names = BaseArguments.__dataclass_fields__
    values = {name: value for name, value in settings.items() if name in names}
    own = {"model": model, "adapters": [], "load_args": False, "custom_register_path": []}
    return BaseArguments(**{**values, **own, **changes})


def data_rows(settings: Mapping[str, Any], phase: str) -> Iterator[Mapping[str, Any]]:
    """The rows of `--dataset`, or of what a run evaluated on, as ms-swift loads them."""
    train, evaluated = base_arguments(settings, settings["model"]).load_dataset()
    yield from (train if phase == "train" else evaluated) or ()


@contextmanager
def _one_model(run: Run, weights: Weights) -> Iterator[str]:
    """A model that vLLM can load; adapters are merged beside the checkpoints for as long."""
    if not weights.adapters:
        yield weights.model
        return
    from swift.pipelines.export.merge_lora import merge_lora

    folder = tempfile.mkdtemp(prefix="replay-", dir=_writable(run.folder))
    try:
        args: Any = base_arguments(run.settings, weights.model, adapters=list(weights.adapters))
        args.output_dir, args.safe_serialization = folder, True
        args.max_shard_size = run.settings["max_shard_size"]
        merge_lora(args, device_map="cpu", replace_if_exists=True)
        gc.collect()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _writable(folder: Path) -> Path | None:
    """Where the run keeps its checkpoints there is room for one more; else the system's choice."""
    return folder if os.access(folder, os.W_OK) else None


def _tokens(output: Any) -> Tokens:
    token_ids = list(output.response.choices[0].token_ids)
    logprobs = [p for turn in output.rollout_logprobs or () for p in turn]
    return Tokens(token_ids=token_ids, logprobs=logprobs or None)
