"""The rollout engine: ms-swift's vLLM engine for GRPO, which answers for groups by their metadata.

It replaces `GRPOVllmEngine` in the trainer (colocate) and in `swift rollout` (server), sync and
async. A request without metadata gets ms-swift's behaviour; one of another client, for which the
server made them, does too, with a seed of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import requests
import swift.infer_engine
from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    RequestConfig,
    RolloutOutput,
    serialize_ndarray,
)
from swift.template import MaxLengthError
from swift.utils import get_logger
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

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
from swift_grpo_ext.rollout.served import leading
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata
from swift_grpo_ext.stops.rule import Ending, Stops
from swift_grpo_ext.stops.templates import TemplateStops
from swift_grpo_ext.upstream import pins, vllm_repairs
from swift_grpo_ext.upstream.accelerator import has_accelerator, number_bits
from swift_grpo_ext.upstream.contract import verify, verify_overrides
from swift_grpo_ext.upstream.encoding import add_video_metadata
from swift_grpo_ext.upstream.patches import Moment, apply, patch, repair
from swift_grpo_ext.upstream.placeholders import placeholder_ids

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest
    from swift.infer_engine.utils import AdapterRequest
    from swift.template import StdTemplateInputs, Template
    from vllm.logprobs import SampleLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

logger = get_logger()

UPSTREAM_EXTENSION = "swift.pipelines.infer.rollout.WeightSyncWorkerExtension"
VERIFIED_EXTENSION = "swift_grpo_ext.weights.receiver.VerifiedWeightSyncWorkerExtension"
CPU_EXTENSION = "swift_grpo_ext.cpu.receiver.CPUWeightSyncWorkerExtension"

TRUNCATED_FROM = f"{wire.KEY}.truncated_from"
"""Key of an encoded prompt that `--max_length` has cut: its length before."""

STATE = f"{wire.KEY}.state"
"""Key of an encoded request's `RequestState`."""


@dataclass
class RequestState:
    """Holds what the engine knows of one request beside its encoding."""

    metadata: RequestMetadata | None = None
    request: object = None
    """ms-swift's request, an object or a dictionary."""

    replica: int | None = None
    """The replica that draws its samples, where the engine has several."""

    seed: int | None = None
    """The first sample's seed; None where vLLM draws a training's samples without one."""

    stops: Stops | None = None
    """What ends its completions; None leaves that to ms-swift."""

    is_context_overflow: bool = False
    """The prompt of a later turn leaves no room for an answer."""


try:  # vLLM 0.32 has a class of its own for what it refuses
    from vllm.exceptions import VLLMClientError
except ImportError:
    VLLMClientError = ValueError

REFUSALS = (ValueError, VLLMClientError)
"""What vLLM refuses a prompt with. What else it raises is its own fault."""

TOO_LONG = re.compile(r"max(imum|_| )+model[_ ]len|maximum context length|max_length")
"""In the refusal of a prompt that is too long, by vLLM or by ms-swift's template."""


def is_later_turn(metadata: RequestMetadata | None) -> TypeGuard[RequestMetadata]:
    return metadata is not None and metadata.sample_id.turn > 0


def is_context_overflow(error: Exception) -> bool:
    return isinstance(error, REFUSALS) and TOO_LONG.search(str(error)) is not None


@repair(
    Moment.CALLED,
    symptom="A turn that --max_length cuts is trained on whole, and nothing tells.",
    upstream="ms-swift 4.6, template/base.py (`_truncate`) cuts the turns of a conversation "
    "as it cuts prompts; training sees all of them.",
    until="an encoded prompt says that it was cut",
)
def mark_truncated(template: Template) -> bool:
    """Have the template of an engine mark an encoded prompt that it has cut (`TRUNCATED_FROM`), and
    return whether it is to refuse such prompts instead."""
    truncate = template._truncate

    def marked(input_ids: list[int], labels: Any, encoded: Any, *args: Any, **kwargs: Any) -> Any:
        length = len(input_ids)
        result = truncate(input_ids, labels, encoded, *args, **kwargs)
        encoded[TRUNCATED_FROM] = length
        return result

    patch(template, _truncate=marked)
    refuses = template.truncation_strategy == "raise"
    if refuses:
        # A first turn is refused, a later one ends its conversation: `_add_request` decides, which
        # is not reached where encoding raises.
        template.truncation_strategy = "left"
    return refuses


class RolloutEngine(GRPOVllmEngine):
    """Generates completions for `swift rlhf` and `swift rollout`."""

    def __init__(self, *args: Any, engine_kwargs: dict[str, Any] | None = None, **kw: Any) -> None:
        engine_kwargs = dict(engine_kwargs or {})
        # `swift rollout` gives its engines a worker that receives weights. A colocated engine has
        # none: its trainer loads them in the same process.
        extension = engine_kwargs.get("worker_extension_cls")
        self.serves = extension is not None
        if extension == UPSTREAM_EXTENSION:
            ours = VERIFIED_EXTENSION if has_accelerator() else CPU_EXTENSION
            engine_kwargs["worker_extension_cls"] = ours
        apply(Moment.ENGINE)
        if self.serves:
            apply(Moment.REPLICA)
        super().__init__(*args, engine_kwargs=engine_kwargs, **kw)
        self._refuses_truncated = mark_truncated(self.template)
        if self.serves:
            vllm_repairs.exit_when_engine_dies(self.engine)
        self._template_stops = TemplateStops(self.template)
        # For finished `SamplingParams`: vLLM 0.32 clamps what `from_optional` gets to -100, which
        # logits can outweigh.
        self._placeholder_bias = dict.fromkeys(placeholder_ids(self.template), float("-inf"))
        size = engine_kwargs.get("data_parallel_size", 1) if self.use_async_engine else 1
        # Samples that each replica is drawing. vLLM would spread the samples of one request, each
        # replica would encode its images, and nobody would know which one drew a sample.
        self._num_drawing = [0] * size if size > 1 else []
        if self._num_drawing:
            vllm_repairs.collect_rpc_from_all_replicas(self.engine)

    @property
    def number_bits(self) -> int:
        return number_bits(self.engine.vllm_config)

    # --- calls ---

    def infer(
        self, infer_requests: Sequence[RolloutInferRequest], *args: Any, **kwargs: Any
    ) -> Any:
        """Return ms-swift's outputs, on a server as it sends them."""
        try:
            return self._written_outputs(super().infer(infer_requests, *args, **kwargs))
        except Exception as e:
            return self.failure(e)

    async def async_infer(
        self, infer_requests: Sequence[RolloutInferRequest], *args: Any, **kwargs: Any
    ) -> Any:
        """Return what `infer` returns, for an async engine."""
        try:
            return self._written_outputs(await super().async_infer(infer_requests, *args, **kwargs))
        except Exception as e:
            return self.failure(e)

    def read_texts(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `infer` does, or a coroutine: schedulers hand on what they do not know."""
        infer = self.async_infer if self.use_async_engine else self.infer
        return infer(*args, **kwargs)

    def failure(self, error: Exception) -> dict[str, Any]:
        """Return the reply of a server's replica that has failed; ms-swift's loop would reply None.

        Raises:
            Exception: `error`, by an engine without clients.
        """
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
        conversation = leading.get()
        if conversation is not None:
            return await conversation.ask(infer_request, request_config, infer)
        return await infer(wire.read_metadata(wire.data_dict_of(infer_request)))

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
            if self._num_drawing:  # to the replica that draws the fewest samples now
                state.replica = self._num_drawing.index(min(self._num_drawing))
                self._num_drawing[state.replica] += count
            encoded["inputs"][STATE] = state
            return encoded

        try:
            return await super().infer_async(request, config, **kwargs, pre_infer_hook=attach)
        except Exception as e:
            if is_later_turn(metadata) and is_context_overflow(e):
                return self._context_overflow_response(metadata, state, request.uuid or "")
            if not is_encoded or isinstance(e, REFUSALS):
                self._refuse(request, e)
            raise
        finally:
            if state.replica is not None:
                self._num_drawing[state.replica] -= count

    # --- requests ---

    def set_default_max_tokens(self, request_config: RequestConfig, inputs: dict[str, Any]) -> None:
        """Leave a prompt that has no room for a completion to vLLM, which refuses it where its row
        is known."""
        try:
            super().set_default_max_tokens(request_config, inputs)
        except ValueError:
            request_config.max_tokens = 1

    def _refuse(self, request: object, error: Exception) -> NoReturn:
        """Raise what names the row of a request that cannot be encoded, or that vLLM refuses.

        Args:
            request: ms-swift's, as an object or a dictionary.

        Raises:
            RequestError: by a server, where the request itself is at fault. A file that this
                machine does not have, and an address that it cannot reach, may be another's.
            RowError: else.
        """
        if isinstance(error, (RowError, RequestError)):
            raise error  # named already, within
        named = RowError(request, encoding_fault(request, error, fetches=not self.serves))
        is_elsewhere = isinstance(error, OSError) and (
            error.errno is not None or isinstance(error, requests.RequestException)
        )
        if self.serves and not is_elsewhere:
            raise RequestError(f"{type(named).__name__}: {named}") from named
        raise named from error

    def _batch_encode(self, infer_requests: Sequence[Any], strict: bool) -> Any:
        # Not strictly: ms-swift would raise the first error without the number of its request.
        batched_inputs, errors = super()._batch_encode(infer_requests, strict=False)
        for number, error in errors:
            self._refuse(infer_requests[number], error)
        for inputs, request in zip(batched_inputs, infer_requests, strict=True):
            metadata = wire.read_metadata(wire.data_dict_of(request))
            inputs[STATE] = RequestState(metadata, request)
        return batched_inputs, errors

    def _add_request(
        self,
        inputs: dict[str, Any],
        generation_config: SamplingParams,
        request_id: str,
        adapter_request: AdapterRequest | None = None,
    ) -> Any:
        """Every path of ms-swift adds its requests here, one at a time, with their parameters."""
        state: RequestState = inputs.setdefault(STATE, RequestState())
        metadata = state.metadata
        if metadata is not None and metadata.seed is not None:
            generation_config.seed = metadata.seed
        if metadata is not None and metadata.stop_token_ids is None:
            state.seed = generation_config.seed  # perhaps the client's own
        elif metadata is not None:
            state.seed = metadata.seed
            state.stops = self._set_parameters(generation_config, metadata)
        generation_config.logit_bias = (generation_config.logit_bias or {}) | self._placeholder_bias
        add_video_metadata(inputs)
        add = super()._add_request
        with vllm_repairs.pinned_to_replica(self.engine, state.replica):
            try:
                is_refused = self._refuses_truncated or is_later_turn(metadata)
                if TRUNCATED_FROM in inputs and is_refused:
                    raise MaxLengthError(
                        f"Current length of row({inputs[TRUNCATED_FROM]}) is larger than the "
                        f"max_length({self.template.max_length})."
                    )
                return add(inputs, generation_config, request_id, adapter_request)
            except REFUSALS as e:
                if not is_later_turn(metadata) or not is_context_overflow(e):
                    self._refuse(state.request, e)
                if self.use_async_engine:
                    raise  # to `_infer_async`
                # ms-swift looks for an output of each id that it has added: a request of one token,
                # in the place of this one, ends at once.
                state.is_context_overflow = True
                generation_config.max_tokens, generation_config.n = 1, 1
                token = {"input_ids": [self.template.tokenizer.eos_token_id]}
                return add(token, generation_config, request_id, adapter_request)

    def _set_parameters(self, params: SamplingParams, metadata: RequestMetadata) -> Stops:
        """Set what a training's request asks of vLLM, and return what ends its completions."""
        assert metadata.stop_token_ids is not None
        params.n = metadata.count
        # Else the last output of a request holds the one sample that ended last (vLLM 0.32,
        # v1/engine/parallel_sampling.py), and ms-swift keeps the last.
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if metadata.as_arrays:
            # Leave out the text of each log-probability's token: it has no reader.
            params.flat_logprobs = params.logprobs == 0
        # ms-swift has set the user's stop words and the template's; it gives one-token words as
        # ids too.
        stops = self._template_stops.stops(
            params.stop or (), metadata.stop_token_ids, include=metadata.include_stop_str_in_output
        )
        ids = [*(params.stop_token_ids or ()), *stops.tokens]
        params.stop_token_ids = list(dict.fromkeys(ids))
        params.stop = list(stops.strings)
        params.include_stop_str_in_output = stops.include
        params.detokenize = bool(stops.strings)  # only to find them (T6)
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
        # Of each answer, read or not: what stays there pushes others out.
        positions = kept_positions.pop(request_id, None)
        args = (result, inputs, request_config, request_id)
        if metadata is None:
            response = super()._create_chat_completion_response(*args)
            if getattr(request_config, "prompt_logprobs", None) is not None:  # ms-swift drops them
                response.prompt_logprobs = self._format_prompt_logprobs(result.prompt_logprobs)
            return response
        if state.is_context_overflow:
            return self._context_overflow_response(metadata, state, request_id)
        template_inputs = inputs["template_inputs"]
        # First: ms-swift's own response changes the log-probabilities.
        drawn = [self._completion(output, state, template_inputs) for output in result.outputs]
        prompt = Prompt(list(result.prompt_token_ids), positions)
        if metadata.is_other_clients:
            response = super()._create_chat_completion_response(*args)
            texts = [choice.message.content for choice in response.choices]
            drawn = [replace(c, text=text) for c, text in zip(drawn, texts, strict=True)]
            return AnsweredResponse(**vars(response), answer=Answer(drawn, prompt))
        made = response_to(
            Answer(drawn, prompt),
            model=self.model_name,
            request_id=request_id,
            has_choices=not metadata.as_arrays,
        )
        fill_scheduler_fields(made, self.template, template_inputs.tools)
        return made

    def _completion(
        self, output: CompletionOutput, state: RequestState, template_inputs: StdTemplateInputs
    ) -> Completion:
        """Return one of vLLM's completions, cut where it ends; another client's is left as it is,
        and has no text yet."""
        token_ids, experts = list(output.token_ids), output.routed_experts
        logprobs = _flat_logprobs(output.logprobs, token_ids)
        text, finish_reason, stop_reason = "", output.finish_reason, None
        if state.stops is not None:
            ending = self._ending(token_ids, finish_reason, state.stops)
            # vLLM stops late where the token that completes a stop string ends within a character
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
            routed_experts=experts,
        )

    def _ending(self, token_ids: list[int], finish_reason: str | None, stops: Stops) -> Ending:
        """Return where a completion ends, and by what."""
        ending = self._template_stops.find_ending(token_ids, stops)
        if ending.reason is None and finish_reason == "stop" and token_ids:
            # An end that vLLM read from the model's generation_config.json.
            ends = {**stops.tokens, token_ids[-1]: token_ids[-1]}
            ending = self._template_stops.find_ending(token_ids, replace(stops, tokens=ends))
        return ending

    def _context_overflow_response(
        self, metadata: RequestMetadata, state: RequestState, request_id: str
    ) -> ChatCompletionResponse:
        """Return the answer to a later turn whose prompt leaves no room for one: it has no token,
        and has ended as "length"."""
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
        return response_to(
            Answer(completions, Prompt([])),
            model=self.model_name,
            request_id=request_id,
            has_choices=not metadata.as_arrays,
        )

    def _written_outputs(self, outputs: list[RolloutOutput]) -> list[RolloutOutput]:
        """Return the outputs with what reward functions find; on a server, groups become plain
        arrays for the wire."""
        for i, output in enumerate(outputs):
            response = output.response
            if not isinstance(response, AnsweredResponse) or response.answer is None:
                continue
            completions, prompt = response.answer
            if response.choices:
                output.rollout_infos |= infos_of(completions[0])
            elif self.serves:
                completions = [
                    replace(c, routed_experts=serialize_ndarray(c.routed_experts))
                    for c in completions
                ]
                answer = wire.write_answer(Answer(completions, prompt))
                bare = ChatCompletionResponse(response.model, [], response.usage, id=response.id)
                outputs[i] = RolloutOutput(response=bare, rollout_infos={wire.KEY: answer})
        return outputs

    def _name(self, replica: int | None) -> str:
        """Return the name of a server's replica; a colocated engine is named by its trainer."""
        # Worker processes of `swift rollout` have their number in the environment (ms-swift 4.6,
        # pipelines/infer/rollout.py, `llm_worker`).
        number = os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0") if replica is None else replica
        return f"replica {number}" if self.serves else ""


def _flat_logprobs(logprobs: SampleLogprobs | None, token_ids: list[int]) -> list[float] | None:
    """Return the sampled tokens' log-probabilities, from vLLM's dictionaries or its flat form."""
    if logprobs is None:
        return None
    flat = getattr(logprobs, "logprobs", None)
    # With `logprobs=0` each position has one entry, the sampled token's.
    if flat is not None and len(flat) == len(token_ids):
        return list(flat)
    return [position[i].logprob for position, i in zip(logprobs, token_ids, strict=True)]


@cache  # a second training in one process finds our own hooks
def _verify_once() -> None:
    verify(pins.ENGINE)
    verify_overrides(RolloutEngine)


@repair(
    Moment.SERVER,
    Moment.CALLED,
    symptom="ms-swift makes its own engine, which has no place for seeds, counts and stops "
    "of single requests.",
    upstream="ms-swift 4.6, rlhf_trainers/rollout_mixin.py imports `GRPOVllmEngine` by name.",
    until="ms-swift lets a plugin name the engine's class",
)
def use_rollout_engine() -> None:
    """Put `RolloutEngine` where the trainer looks for its engine.

    Raises:
        UnsupportedUpstreamError: ms-swift or vLLM does not have the hooks that we extend.
    """
    _verify_once()
    patch(swift.infer_engine, GRPOVllmEngine=RolloutEngine)
