"""The rollout engine: ms-swift's vLLM engine for GRPO that reads envelopes and answers lean.

Takes the place of `GRPOVllmEngine` in the trainer (colocate) and in `swift rollout` (server), sync
and async. A request without an envelope (an evaluation, another client) is served as ms-swift does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import swift.infer_engine
import torch
from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    RequestConfig,
    RolloutOutput,
    serialize_ndarray,
)
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from swift_grpo_ext import wire
from swift_grpo_ext.upstream import server, split_prefill
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import Pin, verify
from swift_grpo_ext.upstream.video import add_video_metadata
from swift_grpo_ext.wire import Completion, Envelope

PINS = (
    Pin("swift.infer_engine", "GRPOVllmEngine", ("model_id_or_path",)),
    Pin("swift.infer_engine", "GRPOVllmEngine.infer",
        ("self", "infer_requests", "request_config", "metrics", "use_tqdm", "adapter_request")),
    Pin("swift.infer_engine", "GRPOVllmEngine.async_infer",
        ("self", "infer_requests", "request_config", "metrics", "use_tqdm", "kwargs")),
    Pin("swift.infer_engine", "GRPOVllmEngine.infer_async",
        ("self", "infer_request", "request_config", "adapter_request", "pre_infer_hook")),
    Pin("swift.infer_engine", "GRPOVllmEngine._create_chat_completion_response",
        ("self", "result", "inputs", "request_config", "request_id")),
    Pin("swift.infer_engine.vllm_engine", "VllmEngine._add_request",
        ("self", "inputs", "generation_config", "request_id", "adapter_request")),
    Pin("swift.infer_engine.infer_engine", "InferEngine._batch_encode",
        ("self", "infer_requests", "strict")),
    Pin("swift.infer_engine.vllm_engine", "VllmEngine.inner_model_executor"),
    Pin("vllm", "SamplingParams.n"),
    Pin("vllm", "SamplingParams.flat_logprobs"),
    Pin("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights",
        ("self", "weights_iterator", "weights_path", "is_checkpoint_format")),
)  # fmt: skip
verify(PINS)

ROLLOUT_MODULE = "swift.pipelines.infer.rollout"
UPSTREAM_EXTENSION = f"{ROLLOUT_MODULE}.WeightSyncWorkerExtension"
CPU_EXTENSION = "swift_grpo_ext.upstream.weight_sync.CPUWeightSyncWorkerExtension"

ENVELOPE = f"{wire.KEY}.envelope"
SAMPLES_AHEAD = f"{wire.KEY}.samples_ahead"
"""Keys under which an encoded request carries, inside the engine, its envelope, and how many more
samples than requests were asked for before it."""


@dataclass
class LeanResponse(ChatCompletionResponse):
    """The samples of one request, without ms-swift's dictionary for each token."""

    completions: list[Completion] = field(default_factory=list)


class RolloutEngine(GRPOVllmEngine):
    """Generates completions for `swift rlhf` and `swift rollout`."""

    def __init__(self, *args: Any, engine_kwargs: dict[str, Any] | None = None, **kw: Any) -> None:
        engine_kwargs = dict(engine_kwargs or {})
        extension = engine_kwargs.get("worker_extension_cls")
        self._serves = extension is not None
        if not has_accelerator():
            if extension == UPSTREAM_EXTENSION:
                engine_kwargs["worker_extension_cls"] = CPU_EXTENSION
            split_prefill.install()
        super().__init__(*args, engine_kwargs=engine_kwargs, **kw)

    # --- requests ---

    def infer(self, infer_requests: Any, *args: Any, **kwargs: Any) -> list[RolloutOutput]:
        return self._answers(super().infer(infer_requests, *args, **kwargs))

    async def async_infer(
        self, infer_requests: Any, *args: Any, **kwargs: Any
    ) -> list[RolloutOutput]:
        return self._answers(await super().async_infer(infer_requests, *args, **kwargs))

    async def infer_async(
        self,
        infer_request: Any,
        request_config: RequestConfig | None = None,
        *,
        adapter_request: Any = None,
        pre_infer_hook: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Any:
        envelope = take_turn(infer_request)

        def attach(kwargs: dict[str, Any]) -> dict[str, Any]:
            kwargs["inputs"][ENVELOPE] = envelope
            return pre_infer_hook(kwargs) if pre_infer_hook else kwargs

        return await super().infer_async(
            infer_request,
            request_config,
            adapter_request=adapter_request,
            pre_infer_hook=attach,
        )

    def _batch_encode(self, infer_requests: Sequence[Any], strict: bool) -> Any:
        batched_inputs, errors = super()._batch_encode(infer_requests, strict)
        failed = {i for i, _ in errors}
        encoded = (request for i, request in enumerate(infer_requests) if i not in failed)
        samples_ahead = 0
        for inputs, request in zip(batched_inputs, encoded, strict=True):
            envelope = inputs[ENVELOPE] = wire.read_envelope(_data_dict(request))
            inputs[SAMPLES_AHEAD] = samples_ahead
            samples_ahead += envelope.count - 1 if envelope else 0
        return batched_inputs, errors

    def _add_request(
        self,
        inputs: dict[str, Any],
        generation_config: SamplingParams,
        request_id: str,
        adapter_request: Any = None,
    ) -> Any:
        """Every path of ms-swift adds its requests here, one at a time, with their parameters."""
        envelope = inputs.get(ENVELOPE)
        if envelope is not None:
            generation_config.n = envelope.count
            generation_config.output_kind = RequestOutputKind.FINAL_ONLY
            if envelope.seed is not None:
                generation_config.seed = envelope.seed
            elif generation_config.seed is not None:
                # ms-swift has added the number of the request, and means that of the sample.
                generation_config.seed += inputs.get(SAMPLES_AHEAD, 0)
            if envelope.lean:
                self._spare_words(generation_config)
        add_video_metadata(inputs)
        return super()._add_request(inputs, generation_config, request_id, adapter_request)

    def _spare_words(self, generation_config: SamplingParams) -> None:
        """Keep vLLM from making text that nobody reads: of each log-probability's token, and of the
        completion where all stop words are special tokens, which it then stops at by their ids."""
        generation_config.flat_logprobs = generation_config.logprobs == 0
        ids = {self.tokenizer.convert_tokens_to_ids(t) for t in self.tokenizer.all_special_tokens}
        by_id = ids.intersection(generation_config.stop_token_ids or ())
        by_text = [
            word
            for word in generation_config.stop or ()
            if self.tokenizer.convert_tokens_to_ids(word) not in by_id
        ]
        generation_config.stop = by_text
        generation_config.detokenize = bool(by_text)

    # --- answers ---

    def _create_chat_completion_response(
        self, result: Any, inputs: dict[str, Any], request_config: RequestConfig, request_id: str
    ) -> ChatCompletionResponse:
        envelope = inputs.get(ENVELOPE)
        if envelope is None or not envelope.lean:
            return super()._create_chat_completion_response(
                result, inputs, request_config, request_id
            )
        num_tokens = sum(len(output.token_ids) for output in result.outputs)
        return LeanResponse(
            model=self.model_name,
            choices=[],
            usage=self._get_usage_info(len(result.prompt_token_ids), num_tokens),
            id=request_id,
            prompt_token_ids=list(result.prompt_token_ids),
            completions=[
                self._completion(output, envelope, inputs["template_inputs"])
                for output in result.outputs
            ],
        )

    def _completion(self, output: Any, envelope: Envelope, template_inputs: Any) -> Completion:
        token_ids = list(output.token_ids)
        text = self.template.decode_generate_ids(token_ids, template_inputs=template_inputs)
        routed_experts = getattr(output, "routed_experts", None)
        return Completion(
            text=text,
            token_ids=token_ids,
            logprobs=_flat_logprobs(output.logprobs, token_ids),
            finish_reason=output.finish_reason,
            seed=envelope.seed_of(output.index),
            extra=None if routed_experts is None else {"routed_experts": routed_experts},
        )

    def _answers(self, outputs: list[RolloutOutput]) -> list[RolloutOutput]:
        """What a server sends: lean responses packed."""
        if not self._serves:
            return outputs
        replica = f"replica {os.environ.get('SWIFT_ROLLOUT_DP_RANK', '0')}"
        return [
            _pack(output.response, replica) if isinstance(output.response, LeanResponse) else output
            for output in outputs
        ]

    # --- weights ---

    def reload_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights of a colocated engine, by their checkpoint names.

        vLLM's CPU layers keep packed weights only, which `model.load_weights` cannot fill (vLLM
        0.32, `dispatch_cpu_unquantized_gemm`); this rebuilds them, all but a tied head's, which
        waits for ms-swift's `finish_vllm_weight_reload` after all weights have come.
        """
        model_runner = self.inner_model_executor.driver_worker.worker.model_runner
        model_runner.reload_weights(weights_iterator=iter(weights))


def take_turn(request: Any) -> Envelope | None:
    """The envelope of a request that is about to be served.

    The request then asks for its next turn: a multi-turn scheduler sends it, or a copy, again.
    """
    data_dict = _data_dict(request)
    envelope = wire.read_envelope(data_dict)
    if envelope is not None and data_dict is not None:
        wire.write_envelope(data_dict, envelope.next_turn())
    return envelope


def _data_dict(request: Any) -> dict[str, Any] | None:
    """ms-swift's requests come as objects and as dictionaries."""
    found = request.get("data_dict") if isinstance(request, dict) else request.data_dict
    return found if isinstance(found, dict) else None


def _flat_logprobs(logprobs: Any, token_ids: list[int]) -> list[float] | None:
    """Log-probabilities of the sampled tokens, from vLLM's list of dictionaries or flat form."""
    if logprobs is None:
        return None
    flat = getattr(logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(token_ids):
        return list(flat)
    return [position[i].logprob for position, i in zip(logprobs, token_ids, strict=True)]


def _pack(response: LeanResponse, replica: str) -> RolloutOutput:
    completions = response.completions
    for completion in completions:
        if completion.extra:
            completion.extra["routed_experts"] = serialize_ndarray(
                completion.extra["routed_experts"]
            )
    answer = wire.pack_answer(completions, response.prompt_token_ids, replica)
    bare = ChatCompletionResponse(response.model, [], response.usage, id=response.id)
    return RolloutOutput(response=bare, rollout_infos={wire.KEY: answer})


def install() -> None:
    """Put `RolloutEngine` where the trainer and `swift rollout` look for their engine."""
    swift.infer_engine.GRPOVllmEngine = RolloutEngine
    if ROLLOUT_MODULE in sys.modules:
        sys.modules[ROLLOUT_MODULE].GRPOVllmEngine = RolloutEngine  # type: ignore[attr-defined]
        server.install()
