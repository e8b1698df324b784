"""The rollout engine: ms-swift's vLLM engine for GRPO, plus the metadata of requests.

It replaces `GRPOVllmEngine` in the trainer (colocate) and in `swift rollout` (server), sync and
async. A request without metadata behaves as in ms-swift. So does another client's request, except
for the seed in the metadata that the server adds.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import requests
import swift.infer_engine
from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine
from swift.infer_engine.protocol import ChatCompletionResponse, RolloutOutput, serialize_ndarray
from swift.template import MaxLengthError
from swift.utils import get_logger
from vllm import exceptions
from vllm.sampling_params import RequestOutputKind, SamplingParams

from swift_grpo_ext.checks.rows import RowError, encoding_fault
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import (
    AnsweredResponse,
    fill_scheduler_fields,
    infos_of,
    response_to,
)
from swift_grpo_ext.rollout.dispatch import FAILURE, REQUEST_FAULT, RequestError
from swift_grpo_ext.rollout.positions import kept_positions
from swift_grpo_ext.rollout.served import current_conversation
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata
from swift_grpo_ext.stops.rule import Stops, find_ending
from swift_grpo_ext.stops.templates import TemplateStops
from swift_grpo_ext.upstream import pins, vllm_repairs
from swift_grpo_ext.upstream.accelerator import has_accelerator, number_bits
from swift_grpo_ext.upstream.contract import verify, verify_overrides
from swift_grpo_ext.upstream.encoding import add_video_metadata
from swift_grpo_ext.upstream.patches import PatchPhase, apply, patch, repair
from swift_grpo_ext.upstream.placeholders import placeholder_ids
from swift_grpo_ext.upstream.rows import column_of

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
    from swift.infer_engine.utils import AdapterRequest
    from swift.template import StdTemplateInputs
    from vllm.logprobs import SampleLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

logger = get_logger()

UPSTREAM_EXTENSION = "swift.pipelines.infer.rollout.WeightSyncWorkerExtension"
VERIFIED_EXTENSION = "swift_grpo_ext.weights.receiver.VerifiedWeightSyncWorkerExtension"
CPU_EXTENSION = "swift_grpo_ext.cpu.receiver.CPUWeightSyncWorkerExtension"

STATE = f"{wire.KEY}.state"  # key of the `RequestState` in an encoded request

# vLLM rejects an invalid prompt with a `ValueError` (0.23) or with its own class (0.32).
REFUSALS = (ValueError, getattr(exceptions, "VLLMClientError", ValueError))

# Matches the errors of vLLM and of ms-swift's template for a prompt that is too long.
TOO_LONG = re.compile(r"max(imum|_| )+model[_ ]len|maximum context length|max_length")

# vLLM caches media twice, in the process that prepares prompts and in the engine's (0.32,
# multimodal/cache). Its error has one of these texts if a cache lost an entry that the other side
# expects.
LOST_MEDIA = ("Expected a cached item for mm_hash", "not in the receiver (P1) cache")
MEDIA_REMEDY = (
    "Set --vllm_mm_processor_cache_gb in this engine's command to 0, which caches nothing, or to "
    "more than its default of 4 GiB."
)


verify(pins.ENGINE)  # before a class builds on it


@dataclass
class RequestState:
    """Data about a request that its encoding does not contain."""

    metadata: RequestMetadata | None = None
    request: object = None  # ms-swift's request, an object or a dictionary
    replica: int | None = None  # the replica to use; None if the engine has only one
    seed: int | None = None  # the first sample's seed; None: vLLM chooses
    stops: Stops | None = None  # None: the stops of ms-swift apply
    is_context_overflow: bool = False  # a later turn's prompt leaves no room for an answer

    @property
    def is_later_turn(self) -> bool:
        return self.metadata is not None and self.metadata.sample_id.turn > 0

    def overflows(self, error: Exception) -> bool:
        """Return whether `error` means that a later turn's prompt leaves no room for an answer."""
        is_refusal = isinstance(error, REFUSALS)
        return self.is_later_turn and is_refusal and TOO_LONG.search(str(error)) is not None


class RolloutEngine(GRPOVllmEngine):
    """Generates completions for `swift rlhf` and `swift rollout`."""

    def __init__(self, *args: Any, engine_kwargs: dict[str, Any] | None = None, **kw: Any) -> None:
        engine_kwargs = dict(engine_kwargs or {})
        # `swift rollout` sets a worker extension that receives weights. A colocated engine has
        # none: its trainer loads weights in the same process.
        extension = engine_kwargs.get("worker_extension_cls")
        self.serves = extension is not None
        if extension == UPSTREAM_EXTENSION:
            ours = VERIFIED_EXTENSION if has_accelerator() else CPU_EXTENSION
            engine_kwargs["worker_extension_cls"] = ours
        apply(PatchPhase.ENGINE)
        if self.serves:
            apply(PatchPhase.REPLICA)
        super().__init__(*args, engine_kwargs=engine_kwargs, **kw)
        if self.serves:
            vllm_repairs.exit_when_engine_dies(self.engine)
        self._template_stops = TemplateStops(self.template)
        # Set on the `SamplingParams` object: vLLM 0.32's `from_optional` clamps a bias to -100.
        self._placeholder_bias = dict.fromkeys(placeholder_ids(self.template), float("-inf"))
        size = engine_kwargs.get("data_parallel_size", 1) if self.use_async_engine else 1
        # How many samples each replica is generating (`pinned_to_replica`).
        self._num_running = [0] * size if size > 1 else []
        if self._num_running:
            vllm_repairs.collect_rpc_from_all_replicas(self.engine)

    @property
    def number_bits(self) -> int:
        return number_bits(self.engine.vllm_config)

    # --- calls ---

    def infer(self, *args: Any, **kwargs: Any) -> Any:
        """Return ms-swift's outputs; a server's are in wire format."""
        try:
            return self._written_outputs(super().infer(*args, **kwargs))
        except Exception as e:
            return self.failure(e)

    async def async_infer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the same as `infer`, from an async engine."""
        try:
            return self._written_outputs(await super().async_infer(*args, **kwargs))
        except Exception as e:
            return self.failure(e)

    def failure(self, error: Exception) -> dict[str, Any]:
        """Return the error reply of a server's replica, instead of ms-swift's None; a colocated
        engine raises the error."""
        text = str(error)
        if any(words in text for words in LOST_MEDIA):
            text = text.rstrip(".")
            cause, error = error, RuntimeError(f"{type(error).__name__}: {text}. {MEDIA_REMEDY}")
            error.__cause__ = cause
        if not self.serves:
            raise error
        vllm_repairs.exit_if_engine_is_dead(error)
        logger.error("A replica has failed.", exc_info=error)
        is_fault = isinstance(error, RequestError)
        text = str(error) if is_fault else f"{type(error).__name__}: {error}"
        return {FAILURE: text, REQUEST_FAULT: is_fault}

    async def infer_async(
        self,
        infer_request: RolloutInferRequest,
        request_config: RequestConfig | None = None,
        **kwargs: Any,
    ) -> Any:
        infer = partial(self._infer_async, infer_request, request_config, kwargs)
        conversation = current_conversation.get()
        if conversation is not None:
            return await conversation.infer_turn(infer_request, request_config, infer)
        return await infer(wire.read_metadata(column_of(infer_request, "data_dict")))

    async def _infer_async(
        self,
        request: RolloutInferRequest,
        config: RequestConfig | None,
        kwargs: dict[str, Any],
        metadata: RequestMetadata | None,
    ) -> Any:
        state = RequestState(metadata, request)
        count = metadata.count if metadata is not None else 1
        is_encoded = False

        def attach(encoded: dict[str, Any]) -> dict[str, Any]:
            # ms-swift calls this between the encoding and `_add_request`.
            nonlocal is_encoded
            is_encoded = True
            if self._num_running:  # choose the replica with the fewest samples
                state.replica = self._num_running.index(min(self._num_running))
                self._num_running[state.replica] += count
            encoded["inputs"][STATE] = state
            return encoded

        try:
            return await super().infer_async(request, config, **kwargs, pre_infer_hook=attach)
        except Exception as e:
            if isinstance(e, REFUSALS) and not isinstance(e, MaxLengthError):
                await self.engine.renderer.clear_mm_cache_async()  # as in `_add_request`
            if state.overflows(e):
                return self._overflow_response(state, column_of(request, "uuid") or "")
            if not is_encoded or isinstance(e, REFUSALS):
                self._refuse(request, e)
            raise
        finally:
            if state.replica is not None:
                self._num_running[state.replica] -= count

    # --- requests ---

    def set_default_max_tokens(self, request_config: RequestConfig, inputs: dict[str, Any]) -> None:
        try:
            super().set_default_max_tokens(request_config, inputs)
        except ValueError:  # the prompt is too long; `_add_request` raises, naming the row
            request_config.max_tokens = 1

    def _refuse(self, request: object, error: Exception) -> NoReturn:
        """Raise an error that names the request's row: a `RequestError` on a server, if any replica
        would fail on the request, else a `RowError`."""
        if isinstance(error, (RowError, RequestError)):
            raise error  # it names the row already
        named = RowError(request, encoding_fault(request, error))
        # Missing files and unreachable addresses: another machine may have access.
        is_local = isinstance(error, OSError) and (
            error.errno is not None or isinstance(error, requests.RequestException)
        )
        if self.serves and not is_local:
            raise RequestError(f"{type(named).__name__}: {named}") from named
        raise named from error

    def _batch_encode(self, infer_requests: Sequence[Any], strict: bool) -> Any:
        # `strict=True` would raise the first error without naming its request.
        batched_inputs, errors = super()._batch_encode(infer_requests, strict=False)
        states = [
            RequestState(wire.read_metadata(column_of(request, "data_dict")), request)
            for request in infer_requests
        ]
        for number, error in errors:
            if not states[number].overflows(error):
                self._refuse(infer_requests[number], error)
            states[number].is_context_overflow = True
            batched_inputs.insert(number, {"input_ids": []})
        for inputs, state in zip(batched_inputs, states, strict=True):
            inputs[STATE] = state
        return batched_inputs, []

    def _add_request(
        self,
        inputs: dict[str, Any],
        generation_config: SamplingParams,
        request_id: str,
        adapter_request: AdapterRequest | None = None,
    ) -> Any:
        # All paths of ms-swift add their requests here.
        state: RequestState = inputs[STATE]
        metadata = state.metadata
        if metadata is not None:
            seed = metadata.seed_of(0)
            if seed is not None:
                generation_config.seed = seed
            if metadata.from_other_client:
                state.seed = generation_config.seed  # the client may have set its own
            else:
                state.seed = seed
                state.stops = self._set_parameters(generation_config, metadata)
        generation_config.logit_bias = (generation_config.logit_bias or {}) | self._placeholder_bias
        add_video_metadata(inputs)
        # ms-swift truncates later turns like prompts (4.6, template/base.py, `_truncate`), but
        # training sees the whole turn. A turn of exactly `max_length` may have been truncated.
        longest = self.template.max_length or math.inf
        is_cut = state.is_later_turn and len(inputs["input_ids"]) >= longest
        add = super()._add_request
        with vllm_repairs.pinned_to_replica(self.engine, state.replica):
            try:
                if is_cut or state.is_context_overflow:
                    raise MaxLengthError("longer than max_length")
                return add(inputs, generation_config, request_id, adapter_request)
            except REFUSALS as e:
                if not self.use_async_engine and not isinstance(e, MaxLengthError):
                    # vLLM checks a prompt's length last (0.32, v1/engine/input_processor.py). By
                    # then its media count as cached in the engine, which never gets them: a later
                    # prompt would not send them, and fail.
                    self.engine.renderer.clear_mm_cache()
                if not state.overflows(e):
                    self._refuse(state.request, e)
                if self.use_async_engine:
                    raise  # `_infer_async` handles it
                # ms-swift expects an output for each request: generate a single token instead.
                state.is_context_overflow = True
                generation_config.max_tokens, generation_config.n = 1, 1
                token = {"input_ids": [self.template.tokenizer.eos_token_id]}
                return add(token, generation_config, request_id, adapter_request)

    def _set_parameters(self, params: SamplingParams, metadata: RequestMetadata) -> Stops:
        """Set the sampling parameters of a trainer's request, and return its stops."""
        assert metadata.stop_token_ids is not None
        params.n = metadata.count
        # ms-swift keeps a request's last output, which otherwise has only the sample that ended
        # last (vLLM 0.32, v1/engine/parallel_sampling.py).
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if metadata.as_arrays:  # no caller reads the tokens as texts
            params.flat_logprobs = params.logprobs == 0
        # `params.stop` has the user's and the template's stop words; some of them are one token.
        stops = self._template_stops.stops(
            params.stop or (), metadata.stop_token_ids, include=metadata.include_stop_str_in_output
        )
        ids = [*(params.stop_token_ids or ()), *stops.tokens]
        params.stop_token_ids = list(dict.fromkeys(ids))
        params.stop = list(stops.strings)
        params.include_stop_str_in_output = stops.include
        params.detokenize = bool(stops.strings)  # only needed to match strings (T6)
        # Stop strings may hold special tokens.
        params.skip_special_tokens = False
        params.spaces_between_special_tokens = False
        return stops

    # --- answers ---

    def _create_chat_completion_response(
        self,
        result: RequestOutput,
        inputs: dict[str, Any],
        request_config: RequestConfig,
        request_id: str,
    ) -> ChatCompletionResponse:
        state: RequestState = inputs[STATE]
        metadata = state.metadata
        # Pop them in any case: positions left here would evict those of other requests.
        positions = kept_positions.pop(request_id, None)
        args = (result, inputs, request_config, request_id)
        if metadata is None:
            return super()._create_chat_completion_response(*args)
        if state.is_context_overflow:
            return self._overflow_response(state, request_id)
        template_inputs = inputs["template_inputs"]
        # Before ms-swift's response, which changes the log-probabilities.
        completions = [self._completion(each, state, template_inputs) for each in result.outputs]
        answer = Answer(completions, Prompt(list(result.prompt_token_ids), positions))
        if metadata.from_other_client:
            response = super()._create_chat_completion_response(*args)
            for k, choice in enumerate(response.choices):
                completions[k] = replace(completions[k], text=choice.message.content)
            return AnsweredResponse(**vars(response), answer=answer)
        made = response_to(answer, self.model_name, request_id, has_choices=not metadata.as_arrays)
        fill_scheduler_fields(made, self.template, template_inputs.tools)
        return made

    def _overflow_response(self, state: RequestState, request_id: str) -> AnsweredResponse:
        """Return an empty answer with finish reason "length": the prompt leaves no room."""
        metadata = state.metadata
        assert metadata is not None
        completions = [
            Completion(
                text="",
                token_ids=[],
                logprobs=[],
                finish_reason="length",
                seed=metadata.seed_of(k),
                replica=self._name(state.replica),
            )
            for k in range(metadata.count)
        ]
        answer = Answer(completions, Prompt([]))
        return response_to(answer, self.model_name, request_id, has_choices=not metadata.as_arrays)

    def _completion(
        self, output: CompletionOutput, state: RequestState, template_inputs: StdTemplateInputs
    ) -> Completion:
        """Return one of vLLM's completions, cut at its stop. Another client's completion is not
        cut, and its text is added later."""
        token_ids, experts = list(output.token_ids), output.routed_experts
        logprobs = flat_logprobs(output.logprobs, token_ids)
        text, finish_reason, stop_reason = "", output.finish_reason, None
        if finish_reason == "error":  # its empty text is no sample
            raise RuntimeError(
                "vLLM ended a request with an error; its log has the cause. For a `Multi-modal "
                f"cache miss`: {MEDIA_REMEDY}"
            )
        if (stops := state.stops) is not None:
            decode = self._template_stops.decode
            ending = find_ending(token_ids, decode, stops)
            if ending.reason is None and finish_reason == "stop" and token_ids:
                # vLLM stopped at an end token from the model's generation_config.json.
                ends = {**stops.tokens, token_ids[-1]: token_ids[-1]}
                ending = find_ending(token_ids, decode, replace(stops, tokens=ends))
            # vLLM stops one token late if a stop string's last token ends within a character
            # (stops/rule.py).
            surplus = len(token_ids) - ending.num_tokens
            if surplus and experts is not None:
                experts = experts[:-surplus]
            token_ids = token_ids[: ending.num_tokens]
            logprobs = logprobs and logprobs[: ending.num_tokens]
            text = self._template_stops.text(token_ids, ending, template_inputs)
            stop_reason = ending.reason
            finish_reason = finish_reason if stop_reason is None else "stop"
        return Completion(
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            seed=None if state.seed is None else state.seed + output.index,
            replica=self._name(state.replica),
            routed_experts=serialize_ndarray(experts) if self.serves else experts,
        )

    def _written_outputs(self, outputs: list[RolloutOutput]) -> list[RolloutOutput]:
        """Add infos for reward functions; on a server, write groups in wire format."""
        for i, output in enumerate(outputs):
            response = output.response
            if not isinstance(response, AnsweredResponse):
                continue
            if response.choices:
                output.rollout_infos |= infos_of(response.answer.completions[0])
            elif self.serves:
                bare = ChatCompletionResponse(response.model, [], response.usage, id=response.id)
                infos = {wire.KEY: wire.write_answer(response.answer)}
                outputs[i] = RolloutOutput(response=bare, rollout_infos=infos)
        return outputs

    def _name(self, replica: int | None) -> str:
        """Return the name of a server's replica; the trainer names a colocated engine."""
        # ms-swift sets the variable in each worker (4.6, pipelines/infer/rollout.py, `llm_worker`).
        number = os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0") if replica is None else replica
        return f"replica {number}" if self.serves else ""


def flat_logprobs(logprobs: SampleLogprobs | None, token_ids: list[int]) -> list[float] | None:
    """Return the sampled tokens' log-probabilities, from vLLM's nested or flat form."""
    if logprobs is None:
        return None
    flat = getattr(logprobs, "logprobs", None)
    # With `logprobs=0` each position has one entry, the sampled token's.
    if flat is not None and len(flat) == len(token_ids):
        return list(flat)
    return [position[i].logprob for position, i in zip(logprobs, token_ids, strict=True)]


verify_overrides(RolloutEngine)


@repair(PatchPhase.SERVER)
def use_rollout_engine() -> None:
    """Replace the engine class that the trainer imports by `RolloutEngine`.

    Symptom: ms-swift's own engine ignores the seeds, counts and stops of single requests.
    Upstream: ms-swift 4.6, rlhf_trainers/rollout_mixin.py imports `GRPOVllmEngine` by name. Can go
    when ms-swift lets a plugin name the engine's class.
    """
    patch(swift.infer_engine, GRPOVllmEngine=RolloutEngine)
