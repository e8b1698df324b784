"""Users' multi-turn schedulers, watched: what fails or does not end in one has its name.

`watch` puts a subclass of the user's scheduler into ms-swift's registry, from which the training
and `swift rollout` take theirs. It calls the same hooks with the same arguments, and

- names scheduler, hook, sample and turn where a hook raises, returns no request, or takes longer
  than `--tool_timeout`;
- ends a conversation that has no room for another turn with what it holds, as a completion ends
  that reaches its length: ms-swift would end the run, or go on asking;
- lets a server's other conversations go on while `step` works. ms-swift calls it in the event loop
  of all (4.6, rollout/multi_turn.py, `run`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from swift.infer_engine.protocol import RolloutInferRequest
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns
from swift.utils import get_logger

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.dispatch import RequestError
from swift_grpo_ext.upstream.rows import COLUMNS
from swift_grpo_ext.upstream.threads import in_thread

if TYPE_CHECKING:
    from swift.infer_engine.protocol import ChatCompletionResponseChoice, RolloutOutput

logger = get_logger()

T = TypeVar("T")
Result = dict[str, Any]
"""Is what a hook returns."""

_tools = ThreadPoolExecutor(256, thread_name_prefix="tool")
"""A server's threads for what `step` does, one for each conversation that is at it. None is started
before it is needed."""

OWN = "swift_grpo_ext_between_turns"
"""An attribute of requests."""


class SchedulerError(RequestError):
    """A scheduler has failed; names it, its hook, the sample and the turn."""


@dataclass
class BetweenTurns:
    """Holds what is known of a conversation since its last answer."""

    num_messages: int = 0
    """With the answer."""

    media: dict[str, list[Any]] = field(default_factory=dict)
    """The media that the engine saw."""

    tool_seconds: float = 0.0
    """In the scheduler."""

    is_finished: bool | None = None
    """What `check_finished` returned, until ms-swift asks for it."""

    step: Result | None = None
    """What `step` returned, until ms-swift asks for it."""

    told: frozenset[str] = frozenset()
    """The columns of media that `step` put into `rollout_infos`."""


def between_turns(request: RolloutInferRequest) -> BetweenTurns:
    # An attribute of the request, which ms-swift hands to each hook.
    if not hasattr(request, OWN):
        setattr(request, OWN, BetweenTurns())
    between: BetweenTurns = getattr(request, OWN)
    return between


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


def has_no_room(choice: ChatCompletionResponseChoice) -> bool:
    """Return whether an answer stands for none: its prompt left no room for one (engine.py)."""
    return choice.finish_reason == "length" and not choice.token_ids


class WatchedScheduler(MultiTurnScheduler):
    """Stands before a user's class in the order of bases."""

    tool_timeout: float

    # --- hooks, in the order in which ms-swift calls them ---

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        work = super().on_trajectory_start(requests)
        await self._await("on_trajectory_start", requests[0] if requests else None, 1, work)

    def snapshot_and_materialize_assistant_messages(
        self, infer_request: RolloutInferRequest
    ) -> list[tuple[dict[str, Any], Any]]:
        snapshots = super().snapshot_and_materialize_assistant_messages(infer_request)
        setattr(infer_request, f"{OWN}_snapshots", snapshots)
        return snapshots

    async def on_turn_end(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> Result:
        if has_no_room(response_choice):
            # Nothing will answer what has come since the last answer: it is taken away again.
            between = between_turns(infer_request)
            del infer_request.messages[between.num_messages :]
            for name, values in between.media.items():
                setattr(infer_request, name, values)
            infos = {name: between.media[name] for name in between.told}
            return {"done": True, "rollout_infos": infos}
        media = {name: list(getattr(infer_request, name, None) or ()) for name in COLUMNS}
        between = BetweenTurns(num_messages=len(infer_request.messages), media=media)
        setattr(infer_request, OWN, between)
        call = (infer_request, response_choice, current_turn)
        work = super().on_turn_end(*call)
        result = await self._await("on_turn_end", infer_request, current_turn, work) or {}
        if self.infer_engine is None:
            return result  # in the training, which has no other conversation to go on with
        # ms-swift awaits this hook, but calls the next two in the event loop. Both are done here
        # beside it, and their results kept until it asks.
        is_finished = await self._beside("check_finished", super().check_finished, call)
        between.is_finished = bool(is_finished)
        is_last = self.max_turns and current_turn >= self.max_turns
        if not (result.get("done", is_finished) or is_last):
            # `step` sees the token ids of earlier answers, which ms-swift has made text for the
            # hooks before it.
            if snapshots := getattr(infer_request, f"{OWN}_snapshots", None):
                self.restore_assistant_message_snapshots(snapshots)
                snapshots.clear()  # ms-swift would restore them over what `step` writes
            between.step = await self._beside("step", self._checked_step, call)
        return result

    def check_finished(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> bool:
        between = between_turns(infer_request)
        if between.is_finished is not None or has_no_room(response_choice):
            is_finished, between.is_finished = between.is_finished, None
            return is_finished is not False  # None: there is no room, and it has ended
        with self._named("check_finished", infer_request, current_turn):
            return super().check_finished(infer_request, response_choice, current_turn)

    def get_response_token_data(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        if has_no_room(response_choice):
            return [], []
        return super().get_response_token_data(infer_request, response_choice, *args, **kwargs)

    def step(
        self,
        infer_request: RolloutInferRequest,
        response_choice: ChatCompletionResponseChoice,
        current_turn: int,
    ) -> Result:
        between = between_turns(infer_request)
        result, between.step = between.step, None
        if result is not None:
            return result
        work = partial(self._checked_step, infer_request, response_choice, current_turn)
        with self._named("step", infer_request, current_turn):
            # On a server, only a scheduler with a `run` of its own calls this, in the event loop,
            # which would wait for a thread, too.
            if self.infer_engine is not None:
                return work()
            return in_thread(work).result(self.tool_timeout)

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
                "text, or leave the answer as it is. (Said once.)",
                hash_id="rewritten_answer",
            )
        between = between_turns(infer_request)
        between.told = frozenset(COLUMNS) & (result.get("rollout_infos") or {}).keys()
        setattr(request, OWN, between)
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

    async def _beside(self, hook: str, work: Callable[..., T], call: tuple[Any, ...]) -> T:
        """Do what may take long beside the event loop."""
        working = asyncio.get_running_loop().run_in_executor(_tools, work, *call)
        return await self._await(hook, call[0], call[2], working)


def tell_no_room(
    outputs: Sequence[RolloutOutput], max_length: int | None, room: int | None
) -> None:
    """Warn once of conversations that ended since the next prompt had no room.

    Args:
        max_length: the training's `--max_length`.
        room: tokens that an engine holds for a prompt and its completion.
    """
    count = sum(has_no_room(output.response.choices[0]) for output in outputs)
    if count:
        logger.warning_once(
            f'{count} of {len(outputs)} conversations of a round have ended as "length": the '
            f"prompt of their next turn is longer than --max_length ({max_length}) or the engine's "
            f"--vllm_max_model_len ({room}) leaves room for. They are trained on up to their last "
            "answer; what a tool said after it is left out. (Said once.)",
            hash_id="no_room",
        )
