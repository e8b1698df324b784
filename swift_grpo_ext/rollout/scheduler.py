"""Users' multi-turn schedulers, watched: what fails or does not end in one has its name.

`watch` puts a subclass of the user's scheduler into ms-swift's registry, from which the training
and `swift rollout` take theirs. It calls the same hooks with the same arguments, and

- names scheduler, hook, sample and turn where a hook raises, returns no request, or takes longer
  than `--tool_timeout`;
- ends a conversation that has no room for another turn with what it holds, as a completion ends
  that reaches its length: ms-swift would end the run, or go on asking;
- leads each conversation of a server in a thread of its own (served.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from swift.infer_engine.protocol import RolloutInferRequest
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.utils import get_logger

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.conversation import BETWEEN, BetweenTurns, between_turns
from swift_grpo_ext.rollout.dispatch import RequestError
from swift_grpo_ext.rollout.served import ServedConversation, give_up
from swift_grpo_ext.upstream.contract import verify_overrides
from swift_grpo_ext.upstream.rows import COLUMNS
from swift_grpo_ext.upstream.threads import in_thread

if TYPE_CHECKING:
    from swift.infer_engine.protocol import (
        ChatCompletionResponseChoice,
        RequestConfig,
        RolloutOutput,
    )

logger = get_logger()

T = TypeVar("T")
Result = dict[str, Any]
"""Return value of a hook."""


class SchedulerError(RequestError):
    """A scheduler has failed; names it, its hook, the sample and the turn."""


def watch(name: str | None, timeout: float) -> None:
    """Let ms-swift make a watched scheduler where it makes the one registered as `name`.

    Args:
        timeout: `--tool_timeout`, in seconds.
    """
    scheduler = multi_turns.get(name)
    if scheduler is None:
        return  # none is asked for, or ms-swift says that there is none of this name
    if issubclass(scheduler, WatchedScheduler):  # an earlier training's in this process
        [scheduler] = scheduler.__bases__[1:]
    members = {"tool_timeout": timeout, "__module__": scheduler.__module__}
    multi_turns[name] = type(scheduler.__name__, (WatchedScheduler, scheduler), members)


def is_context_overflow(choice: ChatCompletionResponseChoice) -> bool:
    """Return whether an answer stands for none: its prompt left no room for one (engine.py)."""
    return choice.finish_reason == "length" and not choice.token_ids


class WatchedScheduler(MultiTurnScheduler):
    """Stands before a user's class in the order of bases."""

    tool_timeout: float

    _num_led = 0
    """Conversations that a server's scheduler has begun."""

    # --- on a server ---

    async def async_infer(self, infer_requests: list[Any], *args: Any, **kwargs: Any) -> Any:
        num_led = self._num_led
        try:
            outputs = await super().async_infer(infer_requests, *args, **kwargs)
            num_led = self._num_led - num_led
            if num_led < len(infer_requests):
                raise SchedulerError(
                    f"--multi_turn_scheduler: {type(self).__name__}.async_infer called `run` "
                    f"{num_led} times for {len(infer_requests)} requests. Expected: once for each, "
                    "since `run` gives seeds and stops to what a conversation asks for."
                )
        except Exception as e:
            give_up()  # the outputs of the call's other conversations have no reader
            return self.infer_engine.failure(e)
        return outputs

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> Any:
        self._num_led += 1
        conversation = ServedConversation(infer_request)
        return await conversation.lead(super().run(infer_request, request_config, **kwargs))

    # --- hooks, in the order in which ms-swift calls them ---

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        work = super().on_trajectory_start(requests)
        await self._await("on_trajectory_start", requests[0] if requests else None, 1, work)

    async def on_turn_end(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> Result:
        if is_context_overflow(response_choice):
            # Nothing will answer what has come since the last answer: it is taken away again.
            between = between_turns(infer_request)
            del infer_request.messages[between.num_messages :]
            for name, values in between.media.items():
                setattr(infer_request, name, values)
            infos = {name: between.media[name] for name in between.told}
            return {"done": True, "rollout_infos": infos}
        media = {name: list(getattr(infer_request, name, None) or ()) for name in COLUMNS}
        between = BetweenTurns(num_messages=len(infer_request.messages), media=media)
        setattr(infer_request, BETWEEN, between)
        work = super().on_turn_end(infer_request, response_choice, current_turn)
        return await self._await("on_turn_end", infer_request, current_turn, work) or {}

    def check_finished(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> bool:
        if is_context_overflow(response_choice):
            return True
        call, check = (infer_request, response_choice, current_turn), super().check_finished
        if self.infer_engine is not None:
            return self._call("check_finished", check, *call)
        # The training's main thread, where signals work: `math_verify` has timeouts by them.
        with self._named("check_finished", infer_request, current_turn):
            return check(*call)

    def get_response_token_data(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        if is_context_overflow(response_choice):
            return [], []
        return super().get_response_token_data(infer_request, response_choice, *args, **kwargs)

    def step(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> Result:
        return self._call("step", self._checked_step, infer_request, response_choice, current_turn)

    def _checked_step(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> Result:
        answer = infer_request.messages[-1]
        text = answer.get("content")
        result = super().step(infer_request, response_choice, current_turn)
        request = result.get("infer_request") if isinstance(result, Mapping) else None
        if not isinstance(request, RolloutInferRequest):
            raise TypeError(
                f"it returned {result!r:.200}; expected a dictionary whose `infer_request` is the "
                "request of the next turn"
            )
        if answer.get("content") != text and not result.get("response_token_ids"):
            logger.warning_once(
                f"--multi_turn_scheduler: {type(self).__name__}.step writes another text into an "
                "answer, which nothing reads: later prompts and the training have the tokens that "
                "were sampled. Return `response_token_ids` and `response_loss_mask` of the other "
                "text, or leave the answer as it is.",
                hash_id="rewritten_answer",
            )
        between = between_turns(infer_request)
        between.told = frozenset(COLUMNS) & (result.get("rollout_infos") or {}).keys()
        setattr(request, BETWEEN, between)
        return dict(result)

    # --- a hook, named and bounded ---

    @contextmanager
    def _named(self, hook: str, request: RolloutInferRequest | None, turn: int) -> Iterator[None]:
        """Count the seconds of a hook; raise what it raises with its name.

        Raises:
            SchedulerError: the hook raised, or did not end in time.
        """
        began = time.monotonic()
        try:
            yield
        except Exception as e:
            data_dict = request and request.data_dict
            metadata = wire.read_metadata(data_dict)
            where = f"{replace(metadata.sample_id, turn=0)} in " if metadata else ""
            what = f"raised {type(e).__name__}: {e}"
            is_late = time.monotonic() - began >= self.tool_timeout
            if is_late and isinstance(e, (asyncio.TimeoutError, FutureTimeoutError)):
                what = f"has not returned for {self.tool_timeout:g} s (--tool_timeout)"
            name = f"--multi_turn_scheduler: {type(self).__name__}.{hook}"
            raise SchedulerError(f"{where}turn {turn}: {name} {what}") from e
        finally:
            if request is not None:
                between_turns(request).tool_seconds += time.monotonic() - began

    async def _await(
        self, hook: str, request: RolloutInferRequest | None, turn: int, work: Awaitable[T]
    ) -> T:
        with self._named(hook, request, turn):
            return await asyncio.wait_for(work, self.tool_timeout)

    def _call(
        self,
        hook: str,
        work: Callable[..., T],
        request: RolloutInferRequest,
        choice: ChatCompletionResponseChoice,
        turn: int,
    ) -> T:
        with self._named(hook, request, turn):
            return in_thread(partial(work, request, choice, turn)).result(self.tool_timeout)


verify_overrides(WatchedScheduler)


def warn_no_room(
    outputs: Sequence[RolloutOutput], max_length: int | None, room: int | None
) -> None:
    """Warn once of conversations that ended since the next prompt had no room.

    Args:
        max_length: the training's `--max_length`.
        room: the engines' limit of a prompt and its completion, in tokens.
    """
    count = sum(is_context_overflow(output.response.choices[0]) for output in outputs)
    if count:
        logger.warning_once(
            f'{count} of {len(outputs)} conversations of a round have ended as "length": the '
            f"prompt of their next turn is longer than --max_length ({max_length}) or the engine's "
            f"--vllm_max_model_len ({room}) leaves room for. They are trained on up to their last "
            "answer; what a tool said after it is left out.",
            hash_id="no_room",
        )
