"""Converts an engine's answer to ms-swift's classes, for trainers and schedulers, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from swift.infer_engine.infer_engine import InferEngine
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutOutput,
    UsageInfo,
    deserialize_ndarray,
)

from swift_grpo_ext.rollout.wire import Answer, Completion, Numbers, Prompt
from swift_grpo_ext.stops.templates import STOP_REASON

if TYPE_CHECKING:
    from swift.template import Template


@dataclass
class AnsweredResponse(ChatCompletionResponse):
    """ms-swift's response, with the engine's complete answer."""

    answer: Answer = field(kw_only=True)


def infos_of(completion: Completion) -> dict[str, Any]:
    """Return the `rollout_infos` that reward functions get for a sample."""
    seed, replica = completion.seed, completion.replica
    return {"seed": seed, "replica": replica, STOP_REASON: completion.stop_reason}


def answer_of(output: RolloutOutput) -> Answer:
    """Return an output's answer; for a conversation, that of the last turn."""
    response, infos = output.response, output.rollout_infos
    if isinstance(response, AnsweredResponse):
        return response.answer
    completions = []
    for choice in response.choices:
        token_ids = list(choice.token_ids or ())
        logprobs = [token["logprob"] for token in (choice.logprobs or {}).get("content") or ()]
        seed, text = infos.get("seed"), choice.message.content
        completions.append(
            Completion(
                text=text if isinstance(text, str) else "",
                token_ids=token_ids,
                logprobs=logprobs if logprobs and len(logprobs) == len(token_ids) else None,
                finish_reason=choice.finish_reason,
                stop_reason=infos.get(STOP_REASON),
                seed=None if seed is None else seed + choice.index,
                replica=str(infos.get("replica", "")),
            )
        )
    return Answer(completions, Prompt(list(response.prompt_token_ids or ())))


def response_to(
    answer: Answer, model: str = "", request_id: str = "", *, has_choices: bool = True
) -> AnsweredResponse:
    completions, prompt = answer
    choices = [
        ChatCompletionResponseChoice(
            index=k,
            message=ChatMessage(role="assistant", content=completion.text),
            finish_reason=completion.finish_reason,
            token_ids=_as_list(completion.token_ids),
            routed_experts=deserialize_ndarray(completion.routed_experts),
        )
        for k, completion in enumerate(completions if has_choices else ())
    ]
    num_prompt = len(prompt.token_ids)
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return AnsweredResponse(
        model=model,
        choices=choices,
        usage=UsageInfo(num_prompt, num_tokens, num_prompt + num_tokens),
        id=request_id,
        prompt_token_ids=prompt.token_ids,
        answer=answer,
    )


def to_rollout_output(answer: Answer) -> RolloutOutput:
    [completion] = answer.completions
    return RolloutOutput(
        response=response_to(answer),
        rollout_logprobs=[logprobs] if (logprobs := _as_list(completion.logprobs)) else [],
        rollout_infos=infos_of(completion),
    )


def fill_scheduler_fields(response: ChatCompletionResponse, template: Template, tools: Any) -> None:
    """Add the log-probabilities and tool calls that ms-swift's schedulers read."""
    if not isinstance(response, AnsweredResponse):
        return  # ms-swift has added them
    decode = template.tokenizer.decode
    # `_get_toolcall` reads only these attributes.
    engine, inputs = SimpleNamespace(template=template), SimpleNamespace(tools=tools)
    for choice, completion in zip(response.choices, response.answer.completions, strict=False):
        if completion.logprobs is not None:
            pairs = zip(choice.token_ids or (), _as_list(completion.logprobs), strict=True)
            choice.logprobs = {"content": [{"token": decode([i]), "logprob": p} for i, p in pairs]}
        calls = InferEngine._get_toolcall(engine, completion.text, template_inputs=inputs)
        choice.message.tool_calls = calls


def _as_list(numbers: Numbers | None) -> list[Any]:
    # ms-swift tests the truth value of token ids (rl_core/data.py), which raises for arrays.
    return numbers if isinstance(numbers, list) else [] if numbers is None else numbers.tolist()
