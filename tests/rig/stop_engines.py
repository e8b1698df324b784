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
from swift_grpo_ext.rollout.wire import Completion, RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.stop_cases import CASES, NEW_TOKEN, Case

COUNT = 2
SETTINGS = {"model_type": "qwen2_5_vl", "torch_dtype": torch.float32}


def make_request(
    case: Case, *, as_arrays: bool, include: bool, count: int
) -> tuple[RolloutInferRequest, RequestMetadata, RequestConfig]:
    messages = [
        {"role": "user", "content": case.question},
        {"role": "assistant", "content": case.start},  # goes on from here
    ]
    request = RolloutInferRequest(messages=messages)
    metadata = RequestMetadata(
        sample_id=SampleId(phase="train", step=0, number=0, group=0, index=0),
        count=count,
        run_seed=42,
        as_arrays=as_arrays,
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


def record(answer: Any, text: str, logprobs: Any, stop_reason: Any) -> dict[str, Any]:
    return {
        "text": text,
        "token_ids": np.asarray(answer.token_ids).tolist(),
        "logprobs": np.asarray(logprobs).tolist(),
        "finish_reason": answer.finish_reason,
        "stop_reason": stop_reason,
    }


def record_of(completion: Completion) -> dict[str, Any]:
    return record(completion, completion.text, completion.logprobs, completion.stop_reason)


def record_of_choice(choice: Any, stop_reason: Any) -> dict[str, Any]:
    """Record an answer in ms-swift's form."""
    logprobs = [token["logprob"] for token in choice.logprobs["content"]]
    return record(choice, choice.message.content, logprobs, stop_reason)


async def generate_cases(model: str, use_async: bool) -> dict[str, Any]:
    """Generate each case with one vLLM engine, in every form of request and answer."""
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
        forms = {}
        for form in ("lean", "ms-swift's", "served"):
            engine.serves = form == "served"
            request, metadata, config = make_request(
                case, as_arrays=form != "ms-swift's", include=include, count=COUNT
            )
            if use_async:
                [output] = await engine.async_infer([request], config, use_tqdm=False)
            else:
                [output] = engine.infer([request], config, use_tqdm=False)
            if form == "ms-swift's":
                choices, answer = output.response.choices, output.response.answer
                pairs = zip(choices, answer.completions, strict=True)
                forms[form] = [record_of_choice(each, c.stop_reason) for each, c in pairs]
            elif form == "lean":
                forms[form] = [*map(record_of, output.response.answer.completions)]
            else:
                answer = json.loads(json.dumps(output.rollout_infos[wire.KEY]))  # over HTTP
                completions, _ = wire.read_answer(answer, metadata, "server 0")
                forms[form] = [*map(record_of, completions)]
        results[f"{case.name}/{include}"] = {"forms": forms, "detokenized": sorted(detokenized)}
    return results


if __name__ == "__main__":
    model, engine, output = sys.argv[1:]
    results = asyncio.run(generate_cases(model, engine == "async"))
    Path(output).write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")
