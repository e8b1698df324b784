"""Generates the cases of `stop_cases` with one engine, and writes its answers to OUTPUT.

    python -m tests.rig.stop_engines MODEL (sync | async) OUTPUT

It is a program of its own because vLLM's engines leave processes and globals behind.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.model import get_processor
from swift.template import get_template

from swift_grpo_ext.cpu.settings import apply_cpu_settings
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.stop_cases import CASES, NEW_TOKEN, Case

SETTINGS = {"model_type": "qwen2_5_vl", "torch_dtype": torch.float32}


def request_of(
    case: Case, *, include: bool
) -> tuple[RolloutInferRequest, RequestMetadata, RequestConfig]:
    messages = [
        {"role": "user", "content": case.question},
        {"role": "assistant", "content": case.start},  # goes on from here
    ]
    request = RolloutInferRequest(messages=messages)
    metadata = RequestMetadata(
        sample_id=SampleId(phase="train", step=0, number=0, group=0, index=0),
        count=2,
        run_seed=42,
        as_arrays=True,
        stop_token_ids=case.ids,
        include_stop_str_in_output=include,
    )
    wire.write_metadata(request.data_dict, metadata)
    config = RequestConfig(
        max_tokens=case.max_tokens,
        temperature=1.0,
        top_k=1,  # greedy; at temperature 0 vLLM would refuse several samples
        stop=list(case.words),
        return_details=True,
        logprobs=True,
    )
    return request, metadata, config


def completions_of(output: Any, metadata: RequestMetadata) -> list[dict[str, Any]]:
    """Return the samples of an answer, of a colocated engine or of a server, as JSON values."""
    answer = getattr(output.response, "answer", None)
    if answer is None:
        message = json.loads(json.dumps(output.rollout_infos[wire.KEY]))  # over HTTP
        answer = wire.read_answer(message, metadata, "server 0")
    return [
        {
            "text": sample.text,
            "token_ids": np.asarray(sample.token_ids).tolist(),
            "logprobs": np.asarray(sample.logprobs).tolist(),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        for sample in answer.completions
    ]


async def generate_cases(model: str, use_async: bool) -> dict[str, Any]:
    """Generate each case with one vLLM engine, colocated and as a server."""
    from swift_grpo_ext.rollout.engine import RolloutEngine

    apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
    processor = get_processor(model, new_special_tokens=[NEW_TOKEN], **SETTINGS)
    engine = RolloutEngine(
        model,
        template=get_template(processor, template_type="qwen2_5_vl"),
        use_async_engine=use_async,
        max_model_len=512,
        enforce_eager=True,
        logprobs_mode="raw_logprobs",  # with ms-swift's mode all are 0 under top_k=1
        engine_kwargs={"kv_cache_memory_bytes": 2**27},
        **SETTINGS,
    )
    detokenized: set[bool] = set()
    name, place = ("generate", 1) if use_async else ("add_request", 2)
    upstream = getattr(engine.engine, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        detokenized.add(args[place].detokenize)
        return upstream(*args, **kwargs)

    setattr(engine.engine, name, watched)
    results: dict[str, Any] = {}
    for case, include in product(CASES, (True, False)):
        detokenized.clear()
        completions = []
        for engine.serves in (False, True):
            request, metadata, config = request_of(case, include=include)
            if use_async:
                [output] = await engine.async_infer([request], config, use_tqdm=False)
            else:
                [output] = engine.infer([request], config, use_tqdm=False)
            completions += completions_of(output, metadata)
        results[f"{case.name}/{include}"] = {
            "completions": completions,
            "detokenized": sorted(detokenized),
        }
    return results


if __name__ == "__main__":
    model, engine, output = sys.argv[1:]
    results = asyncio.run(generate_cases(model, engine == "async"))
    Path(output).write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")
