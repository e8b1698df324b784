"""One engine, and the ways of drawing a batch with it that `rollout_colocate.py` compares."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import (
    RUN_SEED,
    TEMPERATURE,
    Case,
    count_tokens,
    draw_ours,
    draw_theirs,
    make_config,
    make_samples,
)
from common import Measures, Turn, stopwatch
from PIL import Image
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.rollout.generate import to_rollout_outputs

Prompt = tuple[list[int], bytes | None]
"""Token ids, with one placeholder for an image, and the image's file."""


def make_engine(model: Path, max_num_seqs: int) -> RolloutEngine:
    """As ms-swift's `_prepare_vllm_engine` makes it, in a training of one process."""
    return RolloutEngine(
        str(model),
        model_type="qwen2_5_vl",
        template_type="qwen2_5_vl",
        torch_dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
        max_model_len=8192,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=True,
        enforce_eager=True,
        seed=0,
        logprobs_mode="processed_logprobs",
        engine_kwargs={"kv_cache_memory_bytes": 2**30},
    )


class ColocateWays:
    """Turns of each way for a case; all of them begin with empty caches."""

    def __init__(self, engine: RolloutEngine, max_tokens: int) -> None:
        self._engine = engine
        self._config = make_config(max_tokens)

    def theirs(self, case: Case) -> Turn:
        return partial(self._turn, case, self._draw_theirs)

    def ours(self, case: Case, run_seed: int | None = RUN_SEED) -> Turn:
        return partial(self._turn, case, partial(self._draw_ours, run_seed))

    def bare(self, case: Case) -> Turn:
        return partial(self._bare_turn, self._bare_prompts(case), case.group_size)

    def _turn(self, case: Case, way: Callable[[Any], Any], repetition: int) -> Measures:
        samples = make_samples(case, repetition)
        self._clear_caches()
        measures: Measures = {}
        with stopwatch(measures):
            outputs = way(samples)
        return {**measures, "tokens": count_tokens(outputs)}

    def _bare_turn(self, prompts: Sequence[Prompt], group_size: int, _: int) -> Measures:
        self._clear_caches()
        measures: Measures = {}
        with stopwatch(measures):
            results = self._draw_bare(prompts, group_size)
        return {**measures, "tokens": sum(len(o.token_ids) for r in results for o in r.outputs)}

    def _clear_caches(self) -> None:
        self._engine.engine.reset_prefix_cache()
        self._engine.engine.reset_mm_cache()
        self._engine.engine.reset_encoder_cache()

    def _draw_ours(self, run_seed: int | None, samples: Sequence[Any]) -> list[Any]:
        def ask(requests: list[Any], metadatas: list[Any]) -> list[list[Any]]:
            outputs = self._engine.infer(requests, copy(self._config), use_tqdm=False)
            pairs = zip(outputs, metadatas, strict=True)
            return [to_rollout_outputs(output, metadata, "rank 0") for output, metadata in pairs]

        return draw_ours(samples, run_seed, ask)

    def _draw_theirs(self, samples: Sequence[Any]) -> list[Any]:
        ask = partial(self._engine.infer, request_config=copy(self._config), use_tqdm=False)
        return draw_theirs(samples, ask)

    def _bare_prompts(self, case: Case) -> list[Prompt]:
        singles = Case(image_side=case.image_side, num_prompts=case.num_prompts, group_size=1)
        self._engine.template.set_mode("vllm")
        prompts = []
        for sample in make_samples(singles, 0):
            token_ids = self._engine.template.encode(sample.to_infer_request())["input_ids"]
            data = sample.images[0]["bytes"] if sample.images else None
            prompts.append((token_ids, data))
        return prompts

    def _draw_bare(self, prompts: Sequence[Prompt], group_size: int) -> list[Any]:
        """What `LLM.generate` does."""
        engine = self._engine.engine
        params = SamplingParams(
            n=group_size,
            max_tokens=self._config.max_tokens,
            temperature=TEMPERATURE,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for number, (token_ids, data) in enumerate(prompts):
            prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
            if data is not None:
                image = Image.open(io.BytesIO(data)).convert("RGB")
                prompt["multi_modal_data"] = {"image": image}
            engine.add_request(f"bare-{number}", prompt, params)
        results: list[Any] = []
        while engine.has_unfinished_requests():
            results += [result for result in engine.step() if result.finished]
        return results
