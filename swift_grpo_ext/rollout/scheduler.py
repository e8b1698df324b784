"""Wraps users' multi-turn schedulers, so that errors name scheduler, hook, sample and turn.

`watch` registers a subclass of the user's scheduler with ms-swift. The subclass calls the same
hooks, and it

- raises `SchedulerError` if a hook raises, returns no request, or exceeds `--tool_timeout`;
- ends a conversation without room for another turn after its last answer, as "length": ms-swift
  would end the run, or keep asking;
- runs each conversation of a server in a thread of its own (served.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

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
    from swift.infer_engine.protocol import ChatCompletionResponseChoice as Choice
    from swift.infer_engine.protocol import RequestConfig, RolloutOutput

logger = get_logger()


class SchedulerError(RequestError):
    """A scheduler failed; the message names it, its hook, the sample and the turn."""


def watch(name: str | None, timeout: float) -> None:
    """Replace the scheduler registered as `name` by a watched subclass. `timeout` is
    `--tool_timeout`, in seconds."""
    scheduler = multi_turns.get(name)
    if scheduler is None:
        return  # the run has none, or ms-swift rejects the name
    if issubclass(scheduler, WatchedScheduler):  # an earlier training in this process registered it
        [scheduler] = scheduler.__bases__[1:]
    members = {"tool_timeout": timeout, "__module__": scheduler.__module__}
    multi_turns[name] = type(scheduler.__name__, (WatchedScheduler, scheduler), members)


def is_context_overflow(choice: Choice) -> bool:
    """Return whether the answer is empty because its prompt left no room (engine.py)."""
    return choice.finish_reason == "length" and not choice.token_ids


class WatchedScheduler(MultiTurnScheduler):
    """Mixin for a user's scheduler; it precedes the scheduler's class in the bases."""

    tool_timeout: float
    _num_started = 0  # conversations that a server's scheduler has started

    # --- on a server ---

    async def async_infer(self, infer_requests: list[Any], *args: Any, **kwargs: Any) -> Any:
        num_before = self._num_started
        try:
            outputs = await super().async_infer(infer_requests, *args, **kwargs)
            if self._num_started < num_before + len(infer_requests):
                raise SchedulerError(
                    f"--multi_turn_scheduler: {type(self).__name__}.async_infer has not called "
                    "`run` for each request: `run` sets the seeds and stops of a conversation."
                )
        except Exception as e:
            give_up()  # nothing will read the outputs of the other conversations
            return self.infer_engine.failure(e)
        return outputs

    async def run(
        self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any
    ) -> Any:
        self._num_started += 1
        conversation = ServedConversation(infer_request)
        return await conversation.run(super().run(infer_request, request_config, **kwargs))

    # --- hooks, in the order in which ms-swift calls them ---

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        work = super().on_trajectory_start(requests)
        with self._named("on_trajectory_start", requests[0] if requests else None, 1):
            await asyncio.wait_for(work, self.tool_timeout)

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int
    ) -> dict[str, Any]:
        if is_context_overflow(response_choice):
            # Drop the messages and media added since the last answer: no answer follows them.
            between = between_turns(infer_request)
            del infer_request.messages[between.num_messages :]
            for name, values in between.media.items():
                setattr(infer_request, name, values)
            infos = {name: between.media[name] for name in between.reported}
            return {"done": True, "rollout_infos": infos}
        media = {name: list(getattr(infer_request, name, None) or ()) for name in COLUMNS}
        between = BetweenTurns(num_messages=len(infer_request.messages), media=media)
        setattr(infer_request, BETWEEN, between)
        work = super().on_turn_end(infer_request, response_choice, current_turn)
        with self._named("on_turn_end", infer_request, current_turn):
            return await asyncio.wait_for(work, self.tool_timeout) or {}

    def check_finished(
        self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int
    ) -> bool:
        if is_context_overflow(response_choice):
            return True
        check = partial(super().check_finished, infer_request, response_choice, current_turn)
        with self._named("check_finished", infer_request, current_turn):
            if self.infer_engine is not None:
                return in_thread(check).result(self.tool_timeout)
            # In the trainer's main thread: the timeouts of `math_verify` use signals.
            return check()

    def get_response_token_data(
        self, infer_request: RolloutInferRequest, response_choice: Choice, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        if is_context_overflow(response_choice):
            return [], []
        return super().get_response_token_data(infer_request, response_choice, *args, **kwargs)

    def step(
        self, infer_request: RolloutInferRequest, response_choice: Choice, current_turn: int
    ) -> dict[str, Any]:
        step = partial(super().step, infer_request, response_choice, current_turn)
        with self._named("step", infer_request, current_turn):
            result = in_thread(step).result(self.tool_timeout)
            request = result.get("infer_request") if isinstance(result, Mapping) else None
            if not isinstance(request, RolloutInferRequest):
                raise TypeError(
                    f"it returned {result!r:.200}; expected a dictionary with `infer_request`, "
                    "the request of the next turn"
                )
        between = between_turns(infer_request)
        between.reported = frozenset(COLUMNS) & (result.get("rollout_infos") or {}).keys()
        setattr(request, BETWEEN, between)
        return dict(result)

    @contextmanager
    def _named(self, hook: str, request: RolloutInferRequest | None, turn: int) -> Iterator[None]:
        """Time a hook, and turn its error or timeout into a `SchedulerError` that names it."""
        began = time.monotonic()
        try:
            yield
        except Exception as e:
            metadata = wire.read_metadata(request and request.data_dict)
            where = f"{replace(metadata.sample_id, turn=0)} in " if metadata else ""
            problem = f"raised {type(e).__name__}: {e}"
            is_late = time.monotonic() - began >= self.tool_timeout
            if is_late and isinstance(e, (asyncio.TimeoutError, FutureTimeoutError)):
                problem = f"has not returned for {self.tool_timeout:g} s (--tool_timeout)"
            name = f"--multi_turn_scheduler: {type(self).__name__}.{hook}"
            raise SchedulerError(f"{where}turn {turn}: {name} {problem}") from e
        finally:
            if request is not None:
                between_turns(request).tool_seconds += time.monotonic() - began


verify_overrides(WatchedScheduler)


def warn_context_overflow(
    outputs: Sequence[RolloutOutput], max_length: int | None, room: int | None
) -> None:
    """Warn once about conversations that ended because their next prompt exceeded `--max_length` or
    the engines' length `room`, in tokens."""
    count = sum(is_context_overflow(output.response.choices[0]) for output in outputs)
    if count:
        logger.warning_once(
            f'{count} of {len(outputs)} conversations of a round have ended as "length": the '
            f"prompt of their next turn exceeds --max_length ({max_length}) or the engine's "
            f"--vllm_max_model_len ({room}). They are trained on up to their last answer, without "
            "the tool's messages after it.",
            hash_id="no_room",
        )
