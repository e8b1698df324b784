"""Conversations that a scheduler of `swift rollout` leads, each in a thread of its own.

Symptom: while one conversation's tool works, all others wait, and the engine too.
Upstream: ms-swift 4.6, rollout/multi_turn.py (`async_infer`) leads all conversations in the
engine's event loop, and calls `step` and `check_finished` there.
Adaptation: each `run` has a thread with an event loop. The engine answers in its own event loop,
and each answer is noted here as a turn.
Can go when ms-swift calls these hooks beside the engine's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import AnsweredResponse, infos_of
from swift_grpo_ext.rollout.conversation import Conversation, Turn, write_turns
from swift_grpo_ext.rollout.dispatch import RequestError
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.stops.templates import STOP_REASON

if TYPE_CHECKING:
    from swift.infer_engine.protocol import (
        ChatCompletionResponse,
        RequestConfig,
        RolloutInferRequest,
    )

MAX_THREADS = 2**10  # conversations of a replica that run side by side; others wait


def _allow_files() -> None:
    # An event loop takes three open files. Many systems allow 1,024 by default.
    from vllm.utils.system_utils import set_ulimit

    set_ulimit(8 * MAX_THREADS)


_threads = ThreadPoolExecutor(MAX_THREADS, "conversation", initializer=_allow_files)
_under_way: set[ServedConversation] = set()

# The conversation that the running code belongs to.
leading: ContextVar[ServedConversation | None] = ContextVar("leading", default=None)


class ServedConversation:
    """One conversation of a server, from its request to the scheduler's outputs."""

    last_answer = 0.0  # time of the engine's last answer to any conversation of this process

    def __init__(self, request: RolloutInferRequest) -> None:
        # The turns are counted here: a scheduler may ask with requests of its own, which have no
        # metadata, and with copies of one request side by side.
        self._first = self._next = wire.read_metadata(request.data_dict)
        self._conversation = Conversation()
        self._responses: list[ChatCompletionResponse] = []
        self._answered = time.monotonic()
        self._engine_failure: Exception | None = None
        self.asked: set[Future[ChatCompletionResponse]] = set()  # requests in the engine
        self.engine_loop, self.waiting = asyncio.get_running_loop(), asyncio.current_task()

    # --- in the engine's event loop ---

    async def lead(self, run: Coroutine[Any, Any, Any]) -> Any:
        """Await a scheduler's `run` in a thread, and return its outputs with their turns."""
        _under_way.add(self)
        try:
            made = await self.engine_loop.run_in_executor(_threads, self._run, run)
        except asyncio.CancelledError as e:
            for asked in list(self.asked):
                asked.cancel()
            # `CancelledError` would end the worker, which catches `Exception` alone (ms-swift 4.6,
            # pipelines/infer/rollout.py, `async_llm_worker`).
            raise RequestError("the training that asked for the conversations has left") from e
        except Exception as e:
            is_named = isinstance(e, RequestError) or e is self._engine_failure
            if is_named or self._first is None:
                raise
            name, turn = replace(self._first.sample_id, turn=0), len(self._responses) + 1
            raise RuntimeError(
                f"{name} in turn {turn}: the server's --multi_turn_scheduler failed, "
                f"{type(e).__name__}: {e}"
            ) from e
        finally:
            _under_way.discard(self)
        outputs = made if isinstance(made, list) else [made]
        noted = [*zip(self._conversation.turns, self._responses, strict=True)]
        for output in outputs:
            # Where a scheduler made several outputs, each brings its own turns along.
            turns = [t for t, r in noted if len(outputs) == 1 or r is output.response]
            if turns:
                write_turns(output, turns)
                last = turns[-1].completion
                # A training names seed and replica itself (`attach_turns`).
                is_others = self._first is not None and self._first.is_other_clients
                infos = infos_of(last) if is_others else {STOP_REASON: last.stop_reason}
                output.rollout_infos |= infos
        return made

    # --- in the conversation's thread ---

    def _run(self, run: Coroutine[Any, Any, Any]) -> Any:
        leading.set(self)  # for the tasks of this thread
        # `asyncio.run` would wait at its end for threads of tools that never return.
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(run)
        finally:
            loop.close()

    async def ask(
        self,
        request: RolloutInferRequest,
        config: RequestConfig | None,
        infer: Callable[[wire.RequestMetadata | None], Coroutine[Any, Any, ChatCompletionResponse]],
    ) -> ChatCompletionResponse:
        """Return the engine's answer to the next turn, and note it. `infer` gets the turn's
        metadata; its coroutine runs in the engine's event loop."""
        metadata = self._next
        # Before the first `await`: requests side by side are turns of their own.
        self._next = metadata and metadata.next_turn()
        is_ours = metadata is not None and not metadata.is_other_clients
        if is_ours and config is not None and (config.n or 1) > 1:
            raise RequestError(
                f"--multi_turn_scheduler: its `run` asked for n={config.n} completions in one "
                "request: their seeds would be those of other samples. Expected: one request "
                "each, with n=1; requests side by side are served together."
            )
        if self not in _under_way:
            raise RequestError("the conversation has ended")
        began = time.monotonic()
        asked = asyncio.run_coroutine_threadsafe(infer(metadata), self.engine_loop)
        self.asked.add(asked)
        try:
            response = await asyncio.wrap_future(asked)
        except Exception as e:
            self._engine_failure = e
            raise
        finally:
            self.asked.discard(asked)
            ServedConversation.last_answer = time.monotonic()
        if metadata is not None and isinstance(response, AnsweredResponse):
            completions, prompt = response.answer
            if len(completions) > 1:  # another client's scheduler may ask for several
                return response
            now = time.monotonic()
            turn = Turn(metadata.sample_id, prompt, completions[0], prompt_hash(request))
            turn = replace(turn, engine_seconds=now - began, tool_seconds=began - self._answered)
            self._conversation.note(request, turn)
            self._responses.append(response)
            self._answered = now
        return response


def go_on(since: float) -> bool:
    """Return whether conversations go on: the engine has answered since then, or has no request,
    since the tools of all of them work."""
    is_asked = any(conversation.asked for conversation in list(_under_way))
    return bool(_under_way) and (not is_asked or ServedConversation.last_answer >= since)


def give_up() -> None:
    """End all conversations, from any thread. A tool at work goes on; its result has no reader."""
    for conversation in list(_under_way):
        assert conversation.waiting is not None
        conversation.engine_loop.call_soon_threadsafe(conversation.waiting.cancel)
