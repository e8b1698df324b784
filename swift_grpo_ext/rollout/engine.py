"""The rollout engine: ms-swift's vLLM engine for GRPO, which answers for groups by their metadata.

It replaces `GRPOVllmEngine` in the trainer (colocate) and in `swift rollout` (server), sync and
async. A request without metadata gets ms-swift's behaviour; one of another client, for which the
server made them, does too, with a seed of its own.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import requests
import swift.infer_engine
from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
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
from swift_grpo_ext.rollout.conversation import Conversation, turn_of, write_turns
from swift_grpo_ext.rollout.dispatch import (
    FAILURE,
    REQUEST_FAULT,
    RequestError,
    activity,
    noted_failure,
)
from swift_grpo_ext.rollout.generate import GroupResponse, NamedResponse
from swift_grpo_ext.rollout.positions import kept_positions
from swift_grpo_ext.rollout.wire import Completion, Prompt, RequestMetadata
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.stops.rule import Ending, Stops
from swift_grpo_ext.stops.templates import StoppedChoice, TemplateStops, record_stop_reason
from swift_grpo_ext.upstream import pins, vllm_repairs
from swift_grpo_ext.upstream.accelerator import has_accelerator, number_bits
from swift_grpo_ext.upstream.contract import verify
from swift_grpo_ext.upstream.encoding import add_video_metadata, tool_calls
from swift_grpo_ext.upstream.local_names import request_of
from swift_grpo_ext.upstream.patches import Moment, apply, patch
from swift_grpo_ext.upstream.placeholders import placeholder_ids

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest
    from swift.infer_engine.utils import AdapterRequest
    from swift.template import Template
    from vllm.logprobs import SampleLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

logger = get_logger()

UPSTREAM_EXTENSION = "swift.pipelines.infer.rollout.WeightSyncWorkerExtension"
VERIFIED_EXTENSION = "swift_grpo_ext.weights.receiver.VerifiedWeightSyncWorkerExtension"
CPU_EXTENSION = "swift_grpo_ext.cpu.receiver.CPUWeightSyncWorkerExtension"

METADATA = f"{wire.KEY}.metadata"
STOPS = f"{wire.KEY}.stops"
REQUEST = f"{wire.KEY}.request"
CUT = f"{wire.KEY}.cut"
NO_ROOM = f"{wire.KEY}.no_room"
REPLICA = f"{wire.KEY}.replica"
SEED = f"{wire.KEY}.seed"
"""Keys that an encoded request has inside the engine: metadata, what ends completions, what it was,
its length where `--max_length` has cut it, whether it is a turn that has no room, the number of the
replica that draws it, where an engine has several, and the seed that vLLM was given."""


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


def is_about_length(error: Exception) -> bool:
    return isinstance(error, REFUSALS) and TOO_LONG.search(str(error)) is not None


def note_cuts(template: Template) -> bool:
    """Have the template of an engine say of an encoded prompt that it was cut, under `CUT`, where
    that is so, and return whether it is to refuse such prompts instead."""
    cut = template._truncate

    def noted(input_ids: list[int], labels: Any, encoded: Any, *args: Any, **kwargs: Any) -> Any:
        length = len(input_ids)
        result = cut(input_ids, labels, encoded, *args, **kwargs)
        encoded[CUT] = length
        return result

    patch(template, _truncate=noted)
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
        self._refuses_cuts = note_cuts(self.template)
        if self.serves:
            vllm_repairs.end_with_core(self.engine)
        self._template_stops = TemplateStops(self.template)
        # For finished `SamplingParams`: vLLM 0.32 clamps what `from_optional` gets to -100, which
        # logits can outweigh.
        self._placeholder_bias = dict.fromkeys(placeholder_ids(self.template), float("-inf"))
        size = engine_kwargs.get("data_parallel_size", 1) if self.use_async_engine else 1
        # Samples that each replica is drawing. vLLM would spread the samples of one request, each
        # replica would encode its images, and nobody would know which one drew a sample.
        self._num_drawing = [0] * size if size > 1 else []
        if self._num_drawing:
            vllm_repairs.hear_all(self.engine)

    @property
    def number_bits(self) -> int:
        return number_bits(self.engine.vllm_config)

    # --- requests ---

    def infer(
        self, infer_requests: Sequence[RolloutInferRequest], *args: Any, **kwargs: Any
    ) -> Any:
        """Return ms-swift's outputs, on a server as it sends them."""
        with self._noted():
            return self._written_outputs(super().infer(infer_requests, *args, **kwargs))

    async def async_infer(
        self, infer_requests: Sequence[RolloutInferRequest], *args: Any, **kwargs: Any
    ) -> Any:
        """Return what `infer` returns, for an async engine."""
        with self._noted():
            return self._written_outputs(await super().async_infer(infer_requests, *args, **kwargs))

    def read_texts(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `infer` does, or a coroutine: schedulers hand on what they do not know."""
        infer = self.async_infer if self.use_async_engine else self.infer
        return infer(*args, **kwargs)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Have a server's replica answer why it failed; ms-swift's loop would answer None."""
        try:
            yield
        except Exception as e:
            if self.serves:
                vllm_repairs.end_if_dead(e)
                is_fault = isinstance(e, RequestError)
                failure = str(e) if is_fault else f"{type(e).__name__}: {e}"
                noted_failure.update({FAILURE: failure, REQUEST_FAULT: is_fault})
            raise

    # `request_of` finds a request by the name of this argument.
    # pragma: no mutate start
    async def infer_async(
        self,
        infer_request: RolloutInferRequest,
        request_config: RequestConfig | None = None,
        *,
        adapter_request: AdapterRequest | None = None,
        pre_infer_hook: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Any:
        # Where a scheduler leads the conversation, its sample's metadata count the turns, not those
        # of the request, which a scheduler may have made or copied.
        led = _led.get()
        data_dict = led.data_dict if led else wire.data_dict_of(infer_request)
        metadata = wire.read_metadata(data_dict)
        if metadata is not None and data_dict is not None:
            # Before the first `await`: requests side by side are turns of their own.
            wire.write_metadata(data_dict, metadata.next_turn())
        is_ours = metadata is not None and not metadata.is_other_clients
        if is_ours and request_config is not None and (request_config.n or 1) > 1:
            raise RequestError(
                f"--multi_turn_scheduler: its `run` asked for n={request_config.n} completions in "
                "one request: their seeds would be those of other samples. Expected: one request "
                "each, with n=1; requests side by side are served together."
            )

        is_encoded = False
        replica: int | None = None
        count = metadata.count if metadata is not None else 1

        def attach(kwargs: dict[str, Any]) -> dict[str, Any]:
            # ms-swift calls this between the encoding and `_add_request`.
            nonlocal is_encoded, replica
            is_encoded = True
            if self._num_drawing:  # to the replica that draws the fewest samples now
                replica = self._num_drawing.index(min(self._num_drawing))
                self._num_drawing[replica] += count
            kwargs["inputs"] |= {METADATA: metadata, REQUEST: infer_request, REPLICA: replica}
            return pre_infer_hook(kwargs) if pre_infer_hook else kwargs

        hooks: dict[str, Any] = {"adapter_request": adapter_request, "pre_infer_hook": attach}
        began = time.monotonic()
        try:
            with activity.in_engine():
                response = await super().infer_async(infer_request, request_config, **hooks)
        except Exception as e:
            if not is_later_turn(metadata) or not is_about_length(e):
                if led is not None:
                    led.engine_failure = e  # not the scheduler's: it is raised as it is
                if not is_encoded or isinstance(e, REFUSALS):
                    self._refuse(infer_request, e)
                raise
            response = self._no_room(metadata, infer_request.uuid or "", replica)
        finally:
            if replica is not None:
                self._num_drawing[replica] -= count
        is_one = len(response.choices) == 1  # another client's scheduler may ask for several
        if led is not None and metadata is not None and not metadata.as_arrays and is_one:
            led.note(infer_request, metadata, response, _name(replica), began)
        return response

    # pragma: no mutate end
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
        named = RowError(request, encoding_fault(request, error))
        is_elsewhere = isinstance(error, OSError) and (
            error.errno is not None or isinstance(error, requests.RequestException)
        )
        if self.serves and not is_elsewhere:
            raise RequestError(f"{type(named).__name__}: {named}") from named
        raise named from error

    def _batch_encode(self, infer_requests: Sequence[Any], strict: bool) -> Any:
        # Never strictly: ms-swift raises the first error without the number of its request.
        batched_inputs, errors = super()._batch_encode(infer_requests, False)
        if strict and errors:
            number, error = errors[0]
            self._refuse(infer_requests[number], error)
        failed = {i for i, _ in errors}
        encoded = (request for i, request in enumerate(infer_requests) if i not in failed)
        for inputs, request in zip(batched_inputs, encoded, strict=True):
            inputs[METADATA] = wire.read_metadata(wire.data_dict_of(request))
            inputs[REQUEST] = request
        return batched_inputs, errors

    def _add_request(
        self,
        inputs: dict[str, Any],
        generation_config: SamplingParams,
        request_id: str,
        adapter_request: AdapterRequest | None = None,
    ) -> Any:
        """Every path of ms-swift adds its requests here, one at a time, with their parameters."""
        metadata = inputs.get(METADATA)
        if metadata is not None and metadata.seed is not None:
            generation_config.seed = metadata.seed
        inputs[SEED] = generation_config.seed
        if metadata is not None and metadata.stop_token_ids is not None:
            generation_config.n = metadata.count
            # Else the last output of a request holds the one sample that ended last (vLLM 0.32,
            # v1/engine/parallel_sampling.py), and ms-swift keeps the last.
            generation_config.output_kind = RequestOutputKind.FINAL_ONLY
            if metadata.as_arrays and hasattr(generation_config, "flat_logprobs"):  # not vLLM 0.11
                # No text of each log-probability's token, which nobody reads.
                generation_config.flat_logprobs = generation_config.logprobs == 0
            # ms-swift has set the user's stop words and the template's; it gives one-token words as
            # ids too.
            inputs[STOPS] = stops = self._template_stops.stops(
                generation_config.stop or (),
                metadata.stop_token_ids,
                include=metadata.include_stop_str_in_output,
            )
            ids = [*(generation_config.stop_token_ids or ()), *stops.tokens]
            generation_config.stop_token_ids = list(dict.fromkeys(ids))
            generation_config.stop = list(stops.strings)
            generation_config.include_stop_str_in_output = stops.include
            generation_config.detokenize = bool(stops.strings)  # only to find them (T6)
            # Stop strings may hold special tokens.
            generation_config.skip_special_tokens = False
            generation_config.spaces_between_special_tokens = False
        generation_config.logit_bias = (generation_config.logit_bias or {}) | self._placeholder_bias
        add_video_metadata(inputs)
        add = super()._add_request
        with vllm_repairs.drawn_by(self.engine, inputs.get(REPLICA)):
            try:
                if CUT in inputs and (self._refuses_cuts or is_later_turn(metadata)):
                    raise MaxLengthError(
                        f"Current length of row({inputs[CUT]}) is larger than the "
                        f"max_length({self.template.max_length})."
                    )
                return add(inputs, generation_config, request_id, adapter_request)
            except REFUSALS as e:
                if not is_later_turn(metadata) or not is_about_length(e):
                    self._refuse(inputs.get(REQUEST), e)
                if self.use_async_engine:
                    raise  # to `infer_async`
                # ms-swift looks for an output of each id that it has added: a request of one token,
                # in the place of this one, ends at once.
                inputs[NO_ROOM] = True
                generation_config.max_tokens, generation_config.n = 1, 1
                token = {"input_ids": [self.template.tokenizer.eos_token_id]}
                return add(token, generation_config, request_id, adapter_request)

    # --- answers ---

    def _create_chat_completion_response(
        self,
        result: RequestOutput,
        inputs: dict[str, Any],
        request_config: RequestConfig,
        request_id: str,
    ) -> ChatCompletionResponse:
        metadata = inputs.get(METADATA)
        # Of each answer, read or not: what stays there pushes others out.
        prompt_positions = kept_positions.pop(request_id, None)
        args = (result, inputs, request_config, request_id)
        if metadata is None:
            response = super()._create_chat_completion_response(*args)
            if getattr(request_config, "prompt_logprobs", None) is not None:  # ms-swift drops them
                response.prompt_logprobs = self._format_prompt_logprobs(result.prompt_logprobs)
            return response
        if inputs.get(NO_ROOM):
            return self._no_room(metadata, request_id, inputs.get(REPLICA))
        if metadata.is_other_clients:
            response = super()._create_chat_completion_response(*args)
            named = {"seed": inputs[SEED], "replica": _name(inputs.get(REPLICA))}
            return NamedResponse(**vars(response), **named)
        ended = []
        for output in result.outputs:
            # Cut first: what ms-swift or we make of an output below reads the cut token ids.
            ending = self._take_ending(output, inputs[STOPS])
            text = self._template_stops.text(output.token_ids, ending, inputs["template_inputs"])
            ended.append((output, ending, text))
        if not metadata.as_arrays:
            # ms-swift's form, which schedulers read, with our text and the stop reason.
            response = super()._create_chat_completion_response(*args)
            choices: list[ChatCompletionResponseChoice] = []
            for choice, (output, ending, text) in zip(response.choices, ended, strict=True):
                if text != choice.message.content:
                    calls = tool_calls(self.template, text, inputs["template_inputs"].tools)
                    choice.message.content, choice.message.tool_calls = text, calls
                ended_by = {"finish_reason": output.finish_reason, "stop_reason": ending.reason}
                choices.append(StoppedChoice(**{**vars(choice), **ended_by}))
            response.choices = choices
            return response
        replica = _name(inputs.get(REPLICA))
        completions = []
        for output, ending, text in ended:
            completions.append(
                Completion(
                    text=text,
                    token_ids=output.token_ids,
                    logprobs=_flat_logprobs(output.logprobs, output.token_ids),
                    finish_reason=output.finish_reason,
                    stop_reason=ending.reason,
                    seed=metadata.seed_of(output.index),
                    replica=replica,
                    routed_experts=getattr(output, "routed_experts", None),  # not vLLM 0.11
                )
            )
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        return GroupResponse(
            model=self.model_name,
            choices=[],
            usage=self._get_usage_info(len(result.prompt_token_ids), num_tokens),
            id=request_id,
            prompt_token_ids=list(result.prompt_token_ids),
            prompt_positions=prompt_positions,
            completions=completions,
        )

    def _no_room(
        self, metadata: RequestMetadata, request_id: str, replica: int | None
    ) -> ChatCompletionResponse:
        """Return the answer to a later turn whose prompt leaves no room for one: it has no token,
        and has ended as "length"."""
        common = {"model": self.model_name, "usage": self._get_usage_info(0, 0), "id": request_id}
        if not metadata.as_arrays:
            message = ChatMessage(role="assistant", content="")
            choice = StoppedChoice(0, message, finish_reason="length", token_ids=[])
            return ChatCompletionResponse(**common, choices=[choice], prompt_token_ids=[])
        completions = [
            Completion(
                text="",
                token_ids=[],
                logprobs=[],
                finish_reason="length",
                seed=metadata.seed_of(k),
                replica=_name(replica),
            )
            for k in range(metadata.count)
        ]
        return GroupResponse(**common, choices=[], prompt_token_ids=[], completions=completions)

    def _take_ending(self, output: CompletionOutput, stops: Stops) -> Ending:
        """Find where one of vLLM's completions ends, and remove all tokens behind that."""
        token_ids = list(output.token_ids)
        ending = self._template_stops.find_ending(token_ids, stops)
        if ending.reason is None and output.finish_reason == "stop" and token_ids:
            # An end that vLLM read from the model's generation_config.json.
            ends = {**stops.tokens, token_ids[-1]: token_ids[-1]}
            ending = self._template_stops.find_ending(token_ids, replace(stops, tokens=ends))
        if ending.reason is not None:
            output.finish_reason = "stop"
        output.token_ids = token_ids[: ending.num_tokens]
        # vLLM stops late where the token that completes a stop string ends within a character
        # (stops/rule.py).
        surplus = len(token_ids) - ending.num_tokens
        for name in ("logprobs", "routed_experts") if surplus else ():
            values = getattr(output, name, None)
            if values is not None:
                setattr(output, name, values[:-surplus])
        return ending

    async def _batch_infer_stream(
        self, tasks: Sequence[Coroutine[Any, Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """Await a server's schedulers, of which each sample has a task."""
        tasks = [_in_conversation(task) for task in tasks]
        with self._noted():
            return await super()._batch_infer_stream(tasks, *args, **kwargs)

    def _written_outputs(self, outputs: list[RolloutOutput]) -> list[RolloutOutput]:
        """Return the outputs; on a server, groups become plain arrays for the wire."""
        for i, output in enumerate(outputs):
            record_stop_reason(output)
            response = output.response
            if isinstance(response, NamedResponse):
                output.rollout_infos |= {"seed": response.seed, "replica": response.replica}
            if not self.serves or not isinstance(response, GroupResponse):
                continue
            completions = [
                replace(c, routed_experts=serialize_ndarray(c.routed_experts))
                for c in response.completions
            ]
            replica = completions[0].replica
            prompt = Prompt(response.prompt_token_ids or [], response.prompt_positions)
            answer = wire.write_answer(completions, prompt, replica)
            bare = ChatCompletionResponse(response.model, [], response.usage, id=response.id)
            outputs[i] = RolloutOutput(response=bare, rollout_infos={wire.KEY: answer})
        return outputs


@dataclass
class _Led:
    """A conversation that a server's scheduler leads, one in each task."""

    data_dict: dict[str, Any] | None
    """The sample's; its metadata is that of the next turn. Schedulers may ask with requests that
    they made themselves, which have no metadata, and with copies of one request side by side."""

    conversation: Conversation = field(default_factory=Conversation)
    responses: list[ChatCompletionResponse] = field(default_factory=list)
    answered: float = field(default_factory=time.monotonic)
    """When the last answer came."""

    engine_failure: Exception | None = None

    def note(
        self,
        request: RolloutInferRequest,
        metadata: RequestMetadata,
        response: ChatCompletionResponse,
        replica: str,
        began: float,
    ) -> None:
        seed = response.seed if isinstance(response, NamedResponse) else metadata.seed
        infos = {"seed": seed, "replica": replica}
        output = record_stop_reason(RolloutOutput(response=response, rollout_infos=infos))
        now = time.monotonic()
        turn = turn_of(
            output,
            metadata.sample_id,
            prompt_hash(request),
            engine_seconds=now - began,
            tool_seconds=began - self.answered,
        )
        self.conversation.note(request, turn)
        self.responses.append(response)
        self.answered = now


_led: ContextVar[_Led | None] = ContextVar("led", default=None)


async def _in_conversation(task: Coroutine[Any, Any, Any]) -> Any:
    """Await one of `_batch_infer_stream`'s coroutines, each of which runs in a context of its own.

    Raises:
        UnsupportedUpstreamError: it does not say which request it serves.
    """
    data_dict = wire.data_dict_of(request_of(task))
    metadata = wire.read_metadata(data_dict)
    # A single turn is no conversation: the engine's own coroutine, or a training's for a group.
    is_single = getattr(task, "cr_code", None) is RolloutEngine.infer_async.__code__
    if metadata is None or is_single or metadata.as_arrays or metadata.count > 1:
        return await task
    led = _Led(data_dict)
    _led.set(led)
    with activity.in_conversation():
        try:
            made = await task
        except (RequestError, RowError):
            raise
        except Exception as e:
            if e is led.engine_failure:
                raise
            turn = len(led.responses) + 1
            raise RuntimeError(
                f"{replace(metadata.sample_id, turn=0)} in turn {turn}: the server's "
                f"--multi_turn_scheduler failed, {type(e).__name__}: {e}"
            ) from e
    outputs = made if isinstance(made, list) else [made]
    for output in outputs:
        record_stop_reason(output)
        # A scheduler that made one output made it of all turns; of several, each of one turn.
        pairs = zip(led.conversation.turns, led.responses, strict=True)
        turns = [t for t, r in pairs if len(outputs) == 1 or r is output.response]
        if turns:
            write_turns(output, turns)
            if metadata.is_other_clients:
                last = turns[-1].completion
                output.rollout_infos |= {"seed": last.seed, "replica": last.replica}
    return made


def _name(replica: int | None) -> str:
    """Return the name of a replica of this engine, or of the one replica that this engine is."""
    # Worker processes of `swift rollout` have their number in the environment (ms-swift 4.6,
    # pipelines/infer/rollout.py, `llm_worker`).
    number = os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0") if replica is None else replica
    return f"replica {number}"


def _flat_logprobs(logprobs: SampleLogprobs | None, token_ids: list[int]) -> list[float] | None:
    """Return the sampled tokens' log-probabilities, from vLLM's dictionaries or its flat form."""
    if logprobs is None:
        return None
    flat = getattr(logprobs, "logprobs", None)
    # With `logprobs=0` each position has one entry, the sampled token's.
    if flat is not None and len(flat) == len(token_ids):
        return list(flat)
    return [position[i].logprob for position, i in zip(logprobs, token_ids, strict=True)]


_verify_once = cache(verify)  # of a second training in one process, the hooks are ours


def use_rollout_engine() -> None:
    """Put `RolloutEngine` where the trainer looks for its engine.

    Raises:
        UnsupportedUpstreamError: ms-swift or vLLM does not have the hooks that we extend.
    """
    _verify_once(pins.ENGINE)
    patch(swift.infer_engine, GRPOVllmEngine=RolloutEngine)
