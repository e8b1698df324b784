"""Draws the cases of `stop_cases` with one engine, and writes down what it answered.

    python -m tests.stack.stop_engines MODEL (sync | async | transformers) OUTPUT

A program of its own: vLLM's engines and what they leave behind end with it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.model import get_model_processor, get_processor
from swift.template import get_template

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import Completion, RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.upstream.cpu import apply_cpu_settings
from tests.stack.stop_cases import CASES, NEW_TOKEN, Case

COUNT = 2
SETTINGS = {"model_type": "qwen2_5_vl", "torch_dtype": torch.float32}


def make_request(case: Case, metadata: RequestMetadata) -> RolloutInferRequest:
    messages = [
        {"role": "user", "content": case.question},
        {"role": "assistant", "content": case.start},  # goes on from here
    ]
    request = RolloutInferRequest(messages=messages)
    wire.write_metadata(request.data_dict, metadata)
    return request


def make_envelope(case: Case, *, packed: bool, include: bool, count: int) -> RequestMetadata:
    return RequestMetadata(
        sample_id=SampleId(phase="train", step=0, number=0, group=0, index=0),
        count=count,
        run_seed=42,
        packed=packed,
        stop_token_ids=case.ids,
        include_stop_str_in_output=include,
    )


def make_config(case: Case) -> RequestConfig:
    return RequestConfig(
        max_tokens=case.max_tokens,
        temperature=1.0,
        top_k=1,  # greedy, but vLLM draws several samples of it
        stop=list(case.words),
        return_details=True,
        logprobs=True,
    )


def record(completion: Completion) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": np.asarray(completion.token_ids).tolist(),
        "logprobs": np.asarray(completion.logprobs).tolist(),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }


def record_of_choice(choice: Any, infos: dict[str, Any] | None = None) -> dict[str, Any]:
    if infos is not None:
        assert infos["stop_reason"] == choice.stop_reason
    content = choice.logprobs["content"] if choice.logprobs else []
    return {
        "text": choice.message.content,
        "token_ids": list(choice.token_ids),
        "logprobs": [token["logprob"] for token in content],
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


class Drawing:
    """Each case through one vLLM engine, in every form of request and answer."""

    def __init__(self, model: str, use_async: bool) -> None:
        from swift_grpo_ext.rollout.engine import RolloutEngine

        apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
        processor = get_processor(model, new_special_tokens=[NEW_TOKEN], **SETTINGS)
        self.is_async = use_async
        self.detokenized: list[bool] = []
        self.engine = RolloutEngine(
            model,
            template=get_template(processor, template_type="qwen2_5_vl"),
            use_async_engine=use_async,
            max_model_len=512,
            enforce_eager=True,
            logprobs_mode="raw_logprobs",  # with ms-swift's mode all are 0 under top_k=1
            engine_kwargs={"kv_cache_memory_bytes": 2**27},
            **SETTINGS,
        )
        self._watch_detokenizing()

    def _watch_detokenizing(self) -> None:
        name = "generate" if self.is_async else "add_request"
        upstream = getattr(self.engine.engine, name)
        at = 1 if self.is_async else 2

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.detokenized.append(args[at].detokenize)
            return upstream(*args, **kwargs)

        setattr(self.engine.engine, name, watched)

    async def draw(self, case: Case, *, packed: bool, include: bool) -> list[dict[str, Any]]:
        metadata = make_envelope(case, packed=packed, include=include, count=COUNT)
        request = make_request(case, metadata)
        if self.is_async:
            outputs = await self.engine.async_infer([request], make_config(case), use_tqdm=False)
        else:
            outputs = self.engine.infer([request], make_config(case), use_tqdm=False)
        response = outputs[0].response
        if packed:
            answer = outputs[0].rollout_infos.get(wire.KEY)
            if answer is None:
                return [record(c) for c in response.completions]
            answer = json.loads(json.dumps(answer))  # over HTTP
            return [record(c) for c in wire.unpack_answer(answer, metadata, "server 0")[0]]
        return [record_of_choice(choice) for choice in response.choices]

    async def draw_all(self) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for case in CASES:
            for include in (True, False):
                del self.detokenized[:]
                forms = {
                    "lean": await self.draw(case, packed=True, include=include),
                    "ms-swift's": await self.draw(case, packed=False, include=include),
                }
                self.engine._serves = True
                forms["served"] = await self.draw(case, packed=True, include=include)
                self.engine._serves = False
                results[f"{case.name}/{include}"] = {
                    "forms": forms,
                    "detokenized": sorted(set(self.detokenized)),
                }
        return results


def draw_with_transformers(model_dir: str) -> dict[str, Any]:
    """All cases that share their settings go through in one batch, which pads them."""
    from swift_grpo_ext.rollout.transformers_engine import RolloutTransformersEngine

    model, processor = get_model_processor(model_dir, new_special_tokens=[NEW_TOKEN], **SETTINGS)
    template = get_template(processor, template_type="qwen2_5_vl")
    engine = RolloutTransformersEngine(model.eval(), template=template, max_batch_size=0)
    results: dict[str, Any] = {}
    for case in CASES:
        # Neighbours in the batch end sooner or later than it.
        others = [c for c in CASES if c.start in ("Dave", "FIN")][:2]
        for include in (True, False):
            requests = [
                make_request(one, make_envelope(case, packed=False, include=include, count=1))
                for one in (others[0], case, others[1])
            ]
            _, output, _ = engine.infer(requests, make_config(case), use_tqdm=False)
            (choice,) = output.response.choices
            results[f"{case.name}/{include}"] = {
                "forms": {"batch": [record_of_choice(choice, output.rollout_infos)]}
            }
    return results


def main() -> None:
    model, engine, output = sys.argv[1:]
    if engine == "transformers":
        results = draw_with_transformers(model)
    else:
        results = asyncio.run(Drawing(model, engine == "async").draw_all())
    Path(output).write_text(json.dumps(results, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main()
