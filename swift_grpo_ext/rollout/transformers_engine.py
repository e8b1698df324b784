"""Stops for `--use_vllm false`: ms-swift's transformers engine with the rule of `stops`.

Symptom: a stop string longer than 20 tokens is not found; a completion that a stop ends with its
last possible token is reported as `length`, and so as truncated; a sampled padding token vanishes
from token ids; the text runs past the stop string; what matched is not said.
Upstream: ms-swift 4.6, template/utils.py (`StopWordsCriteria`), infer_engine/transformers_engine.py
(`_infer_full`).
Adaptation: a subclass of the engine, with a criterion and answers of its own for requests that have
metadata, and ms-swift's for others.
Can go when ms-swift's engine finds stops of any length and answers with what matched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from swift.infer_engine import TransformersEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatMessage,
    RequestConfig,
)
from torch.distributed.fsdp import FSDPModule
from transformers import StoppingCriteria, StoppingCriteriaList

from swift_grpo_ext.checks.rows import RowError, encoding_fault
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.stops.rule import Stops
from swift_grpo_ext.stops.templates import StoppedChoice, TemplateStops
from swift_grpo_ext.upstream.encoding import tool_calls

if TYPE_CHECKING:
    from swift.infer_engine.protocol import RolloutInferRequest

Hook = Callable[[dict[str, Any]], dict[str, Any]]
"""Changes the arguments of `_infer_full` before it is called."""

WINDOW_MARGIN = 8
"""Tokens of the window beyond those that can hold a stop string, each at least one byte: decoders
treat the first of a text differently (a character cut in two, a space left out)."""


class StopsCriterion(StoppingCriteria):
    """Ends each row with the token that completes a stop string, or with a stop token."""

    def __init__(self, template_stops: TemplateStops, stops: Stops) -> None:
        self._template_stops = template_stops
        self._stops = stops
        longest = max((len(string.encode()) for string in stops.strings), default=0)
        self._window = longest + WINDOW_MARGIN
        self._start: int | None = None
        self._is_done: list[bool] = []

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        if self._start is None:
            self._start = input_ids.shape[1] - 1  # the first call follows the first sampled token
            self._is_done = [False] * len(input_ids)
        rows = input_ids[:, max(self._start, input_ids.shape[1] - self._window) :].tolist()
        self._is_done = [
            done or self._template_stops.find_ending(row, self._stops).reason is not None
            for done, row in zip(self._is_done, rows, strict=True)
        ]
        return torch.tensor(self._is_done, device=input_ids.device)


class RolloutTransformersEngine(TransformersEngine):
    """ms-swift's engine for `--use_vllm false`, with stops that hold."""

    @cached_property
    def _template_stops(self) -> TemplateStops:
        return TemplateStops(self.template)

    def _batch_encode(self, infer_requests: Sequence[Any], strict: bool) -> Any:
        batched_inputs, errors = super()._batch_encode(infer_requests, False)
        if strict and errors:
            number, error = errors[0]
            raise RowError(
                infer_requests[number], encoding_fault(infer_requests[number], error)
            ) from error
        return batched_inputs, errors

    def _infer(
        self,
        infer_requests: Sequence[RolloutInferRequest],
        request_config: RequestConfig,
        *,
        pre_infer_hook: Hook | None = None,
        **kwargs: Any,
    ) -> Any:
        # The flags of a run are in the metadata of each of its requests.
        metadata = wire.read_metadata(wire.data_dict_of(infer_requests[0]))

        def attach(kwargs: dict[str, Any]) -> dict[str, Any]:
            """Add `stops` to the arguments of `_infer_full`."""
            kwargs = pre_infer_hook(kwargs) if pre_infer_hook else kwargs
            if metadata is None:
                return kwargs
            config = kwargs["generation_config"]
            stops = self._template_stops.stops(
                config.stop_words,
                metadata.stop_token_ids or (),
                include=metadata.include_stop_str_in_output,
            )
            ends = config.eos_token_id
            ends = ends if isinstance(ends, list) else [ends]
            tokens = {**{i: i for i in ends if i is not None}, **stops.tokens}
            return {**kwargs, "stops": replace(stops, tokens=tokens)}

        upstream = TransformersEngine._infer
        if isinstance(self.model, FSDPModule):
            # FSDP2 keeps the tensors that it gathers weights into: made in inference mode, they
            # could not be written to by the training passes.
            upstream = torch.no_grad()(inspect.unwrap(upstream))
        return upstream(self, infer_requests, request_config, pre_infer_hook=attach, **kwargs)

    def _infer_full(
        self, inputs: dict[str, Any], *, stops: Stops | None = None, **kwargs: Any
    ) -> list[ChatCompletionResponse]:
        if stops is None:
            return super()._infer_full(inputs, **kwargs)
        top_logprobs = kwargs["request_config"].top_logprobs
        given = {"generation_config": kwargs["generation_config"], **inputs}
        given = self.template.prepare_generate_kwargs(given, model=self.model)
        if Version(transformers.__version__) < Version("5"):
            # Qwen-VL's `generate` does not go on from given positions, and makes the same itself.
            given.pop("position_ids", None)
        # In the place of `StopWordsCriteria`, the only one that ms-swift's templates give.
        criterion = StopsCriterion(self._template_stops, stops)
        given["stopping_criteria"] = StoppingCriteriaList([criterion])
        if isinstance(self.model, FSDPModule):
            # transformers 5.19 does not know models that accelerate has sharded with FSDP2: a rank
            # whose rows end early would leave the others waiting for its part of the weights.
            given["synced_gpus"] = dist.get_world_size() > 1
        output = self.template.generate(self.model, **given)
        num_prompt = self._get_num_tokens(inputs)
        # [rows, tokens], padded behind the rows' ends
        ids_BT = self.template.get_generate_ids(output["sequences"], num_prompt)
        logprobs = self.preprocess_logits(output.get("logits"), ids_BT, top_logprobs)
        responses = []
        # ms-swift's requests are for one sample each.
        rows = zip(ids_BT.tolist(), kwargs["template_inputs"], strict=True)
        for i, (token_ids, row_inputs) in enumerate(rows):
            ending = self._template_stops.find_ending(token_ids, stops)
            text = self._template_stops.text(token_ids, ending, row_inputs)
            token_ids = token_ids[: ending.num_tokens]
            own_logprobs = logprobs and logprobs[i][: ending.num_tokens]
            calls = tool_calls(self.template, text, row_inputs.tools)
            choice = StoppedChoice(
                index=0,
                message=ChatMessage(role="assistant", content=text, tool_calls=calls),
                # Nothing but a stop ends a row before all of them, and then it is known.
                finish_reason="length" if ending.reason is None else "stop",
                stop_reason=ending.reason,
                logprobs=self._get_logprobs(own_logprobs, token_ids, top_logprobs),
                token_ids=token_ids,
            )
            is_prompt_T = inputs["attention_mask"][i].bool()  # ms-swift would go by the padding id
            embedded = "input_ids" not in inputs  # some templates put media into `inputs_embeds`
            responses.append(
                ChatCompletionResponse(
                    model=self.model_name,
                    choices=[choice],
                    usage=self._get_usage_info(int(is_prompt_T.sum()), len(token_ids)),
                    prompt_token_ids=(
                        None if embedded else inputs["input_ids"][i][is_prompt_T].tolist()
                    ),
                )
            )
        return responses
