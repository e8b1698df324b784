"""Generate the samples of a logged group again, with the run's settings and weights.

The engine runs in one process, whatever the run had: a sample's tokens depend on its seed, prompt,
weights and settings alone (docs/promises.md, S2).
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from swift.arguments import BaseArguments
from swift.infer_engine.protocol import RequestConfig
from swift.rl_core.data import OnPolicySample

from swift_grpo_ext.cpu.settings import apply_cpu_settings
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import answer_of
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.wire import Completion, RequestMetadata
from swift_grpo_ext.sampling.prompt_hash import PROMPT_FIELDS
from swift_grpo_ext.tools.replay.run import Run

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generate_again(
    run: Run,
    weights: Sequence[str],
    asked: Sequence[tuple[SampleRow, Mapping[str, Any]]],
) -> list[Completion]:
    """Generate samples of a group, or turns of them, again, in their order.

    Args:
        weights: a model, and adapters to merge into it, as `weights_of` returns them.
        asked: the samples, as they were logged, and ms-swift's rows of their prompts.
    """
    settings = run.settings
    requests = []
    for row, prompt in asked:
        # One request a sample: it has the seed that it had in its group's request.
        metadata = RequestMetadata(
            sample_id=row.sample_id,
            count=1,
            run_seed=settings["seed"],
            as_arrays=True,
            stop_token_ids=tuple(settings.get("stop_token_ids") or ()),
            include_stop_str_in_output=settings.get("include_stop_str_in_output", True),
        )
        request = OnPolicySample.from_row(dict(prompt)).to_infer_request()
        wire.write_metadata(request.data_dict, metadata)
        requests.append(request)
    # As `GRPOTrainer._prepare_rollout_params` (ms-swift 4.6, rollout_mixin.py).
    config = RequestConfig(
        n=1,
        max_tokens=settings["max_completion_length"],
        stop=list(settings.get("stop_words") or ()),
        return_details=True,
        logprobs=True,
        structured_outputs_regex=settings.get("structured_outputs_regex"),
        **{name: settings[name] for name in SAMPLING},
    )
    with _one_model(run, weights) as model:
        engine = _make_engine(settings, model, base=weights[0], num_samples=len(asked))
        outputs = engine.infer(requests, config, use_tqdm=False)
        return [answer_of(output).completions[0] for output in outputs]


def request_columns(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row in the form in which a scheduler has them in its requests."""
    request = OnPolicySample.from_row(dict(prompt)).to_infer_request()
    columns = {name: getattr(request, name, None) for name in PROMPT_FIELDS}
    return {name: value for name, value in columns.items() if value}


def _make_engine(
    settings: Mapping[str, Any], model: str, *, base: str, num_samples: int
) -> RolloutEngine:
    """Build the engine that the run's trainer had, for one process.

    Args:
        model: the directory or hub id of the weights.
        base: the model that was trained; its generation_config.json counts.
        num_samples: how many samples are generated at a time.
    """
    args = base_arguments(settings, model)
    apply_cpu_settings(args, ())
    _, processor = args.get_model_processor(load_model=False)
    engine_kwargs = dict(settings.get("vllm_engine_kwargs") or {})
    if base != model:
        engine_kwargs.setdefault("generation_config", base_arguments(settings, base).model_dir)
    # As `GRPOTrainer._prepare_vllm_engine`.
    return RolloutEngine(
        args.model_dir,
        torch_dtype=args.torch_dtype,
        model_type=args.model_type,
        template=args.get_template(processor),
        gpu_memory_utilization=settings["vllm_gpu_memory_utilization"],
        max_model_len=settings["vllm_max_model_len"],
        max_num_seqs=settings.get("vllm_max_num_seqs") or num_samples,
        enforce_eager=settings["vllm_enforce_eager"],
        enable_prefix_caching=settings["vllm_enable_prefix_caching"],
        limit_mm_per_prompt=settings["vllm_limit_mm_per_prompt"],
        disable_cascade_attn=settings["vllm_disable_cascade_attn"],
        load_format=engine_kwargs.pop("load_format", "auto"),
        logprobs_mode="processed_logprobs",  # those of the distribution that is sampled from
        engine_kwargs=engine_kwargs,
    )


def base_arguments(settings: Mapping[str, Any], model: str, **changes: Any) -> BaseArguments:
    """Build ms-swift's arguments about model, template and data, with the run's values.

    They load the run's plugins, as their paths are seen from the current folder.
    """
    values = {
        name: value
        for name, value in settings.items()
        if name in BaseArguments.__dataclass_fields__
    }
    values |= {"model": model, "adapters": [], "load_args": False, "custom_register_path": []}
    return BaseArguments(**{**values, **changes})


@contextmanager
def _one_model(run: Run, weights: Sequence[str]) -> Iterator[str]:
    """Give a model that vLLM can load; merged adapters stand beside the checkpoints for as long."""
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
