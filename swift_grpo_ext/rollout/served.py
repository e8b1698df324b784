"""Runs each conversation of a `swift rollout` scheduler in a thread of its own.

Symptom: while one conversation's tool works, all other conversations and the engine wait.
Upstream: ms-swift 4.6, rollout/multi_turn.py (`async_infer`) runs all conversations in the engine's
event loop, and calls `step` and `check_finished` there.
Adaptation: each `run` has a thread with its own event loop. The engine stays in its event loop, and
each of its answers is recorded here as a turn.
Can go when ms-swift calls these hooks outside of the engine's event loop.
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

MAX_THREADS = 2**10  # concurrent conversations of a replica; others wait


def _allow_files() -> None:
    # An event loop needs three open files; many systems allow 1,024 by default.
    from vllm.utils.system_utils import set_ulimit

    set_ulimit(8 * MAX_THREADS)


_threads = ThreadPoolExecutor(MAX_THREADS, "conversation", initializer=_allow_files)
_running: set[ServedConversation] = set()

# The conversation that the current task belongs to.
current_conversation: ContextVar[ServedConversation | None] = ContextVar("current", default=None)


class ServedConversation:
    """One conversation of a server, from its request to the scheduler's outputs."""

    last_answer = 0.0  # time of the engine's last answer to any conversation in this process

    def __init__(self, request: RolloutInferRequest) -> None:
        # Turns are counted here: a scheduler's own requests have no metadata, and it may send
        # copies of one request concurrently.
        self._first = self._next = wire.read_metadata(request.data_dict)
        self._conversation = Conversation()
        self._responses: list[ChatCompletionResponse] = []
        self._answered = time.monotonic()
        self._engine_failure: Exception | None = None
        self.pending: set[Future[ChatCompletionResponse]] = set()  # requests in the engine
        self.engine_loop, self.waiting = asyncio.get_running_loop(), asyncio.current_task()

    # --- in the engine's event loop ---

    async def run(self, run: Coroutine[Any, Any, Any]) -> Any:
        """Run a scheduler's `run` in a thread, and return its outputs with their turns."""
        _running.add(self)
        try:
            made = await self.engine_loop.run_in_executor(_threads, self._run, run)
        except asyncio.CancelledError as e:
            for future in list(self.pending):
                future.cancel()
            # `CancelledError` would end the worker, which only catches `Exception` (ms-swift 4.6,
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
            _running.discard(self)
        outputs = made if isinstance(made, list) else [made]
        recorded = [*zip(self._conversation.turns, self._responses, strict=True)]
        for output in outputs:
            # If a scheduler returns several outputs, each gets the turns of its own response.
            turns = [t for t, r in recorded if len(outputs) == 1 or r is output.response]
            if turns:
                write_turns(output, turns)
                infos = infos_of(turns[-1].completion)
                if self._first is None or not self._first.from_other_client:
                    infos = {STOP_REASON: infos[STOP_REASON]}  # `attach_turns` adds the others
                output.rollout_infos |= infos
        return made

    # --- in the conversation's thread ---

    def _run(self, run: Coroutine[Any, Any, Any]) -> Any:
        current_conversation.set(self)  # for the tasks of this thread
        # `asyncio.run` would wait for the threads of tools that never return.
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(run)
        finally:
            loop.close()

    async def infer_turn(
        self,
        request: RolloutInferRequest,
        config: RequestConfig | None,
        infer: Callable[[wire.RequestMetadata | None], Coroutine[Any, Any, ChatCompletionResponse]],
    ) -> ChatCompletionResponse:
        """Return the engine's answer to the next turn, and record it. `infer` takes the turn's
        metadata; its coroutine runs in the engine's event loop."""
        metadata = self._next
        # Before the first `await`, so that concurrent requests get different turns.
        self._next = metadata and metadata.next_turn()
        is_ours = metadata is not None and not metadata.from_other_client
        if is_ours and config is not None and (config.n or 1) > 1:
            raise RequestError(
                f"--multi_turn_scheduler: its `run` asked for n={config.n} completions in one "
                "request; expected n=1, and several requests: they are served side by side."
            )
        if self not in _running:
            raise RequestError("the conversation has ended")
        began = time.monotonic()
        future = asyncio.run_coroutine_threadsafe(infer(metadata), self.engine_loop)
        self.pending.add(future)
        try:
            response = await asyncio.wrap_future(future)
        except Exception as e:
            self._engine_failure = e
            raise
        finally:
            self.pending.discard(future)
            ServedConversation.last_answer = time.monotonic()
        if metadata is not None and isinstance(response, AnsweredResponse):
            completions, prompt = response.answer
            if len(completions) > 1:  # another client's scheduler may ask for several
                return response
            now = time.monotonic()
            turn = Turn(metadata.sample_id, prompt, completions[0], prompt_hash(request))
            turn = replace(turn, engine_seconds=now - began, tool_seconds=began - self._answered)
            self._conversation.record(request, turn)
            self._responses.append(response)
            self._answered = now
        return response


def go_on(since: float) -> bool:
    """Return whether conversations make progress: the engine has answered after `since`, or all of
    them are busy with tools."""
    has_pending = any(conversation.pending for conversation in list(_running))
    return bool(_running) and (not has_pending or ServedConversation.last_answer >= since)


def give_up() -> None:
    """End all conversations, from any thread. Running tools go on; their results are ignored."""
    for conversation in list(_running):
        assert conversation.waiting is not None
        conversation.engine_loop.call_soon_threadsafe(conversation.waiting.cancel)
