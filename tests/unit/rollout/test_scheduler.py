"""Users' schedulers in ms-swift's own loops, of the training and of a server, with given answers of
the engine."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
)
from swift.rollout import agent_loop
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

from swift_grpo_ext.rollout import scheduler, wire
from swift_grpo_ext.rollout.conversation import between_turns
from swift_grpo_ext.rollout.scheduler import SchedulerError, warn_context_overflow, watch
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId

SIDES = ("training", "server")

Step = dict[str, Any] | None


class Crop(MultiTurnScheduler):
    """Asks again with a crop, up to `max_turns`."""

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Step:
        infer_request.messages.append({"role": "tool", "content": f"<image>crop {current_turn}"})
        infer_request.images = [*infer_request.images, f"crop{current_turn}.png"]
        infos = {"images": infer_request.images}
        return {"infer_request": infer_request, "rollout_infos": infos}


def made(cls: type[MultiTurnScheduler], side: str, answers: Any, **settings: Any) -> Any:
    """Return a scheduler from ms-swift's registry, made as that side makes it."""
    multi_turns["one"] = cls
    watch("one", settings.pop("timeout", 30.0))
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "".join(f"<{i}>" for i in ids))
    values: dict[str, Any] = {"max_turns": 3, "tokenizer": tokenizer, **settings}
    if side == "server":
        engine = SimpleNamespace(infer_async=answers, engine=None, tokenizer=tokenizer)
        values["infer_engine"] = engine
    return multi_turns["one"](**values)


def request(index: int = 0) -> RolloutInferRequest:
    sample_id = SampleId(phase="train", step=3, number=0, group=1, index=index)
    metadata = RequestMetadata(sample_id=sample_id, count=1, run_seed=42, as_arrays=False)
    data_dict: dict[str, Any] = {}
    wire.write_metadata(data_dict, metadata)
    return RolloutInferRequest(
        messages=[{"role": "user", "content": "<image>?"}],
        images=["http://a/whole.png"],
        data_dict=data_dict,
        uuid=f"{index}",
    )


def answer(*token_ids: int, finish_reason: str = "stop") -> ChatCompletionResponse:
    message = ChatMessage(role="assistant", content="".join(f"<{i}>" for i in token_ids))
    content = {"content": [{"logprob": -0.5}] * len(token_ids)}
    choice = ChatCompletionResponseChoice(0, message, finish_reason, content, list(token_ids))
    return ChatCompletionResponse("", [choice], UsageInfo(1, 1, 2), prompt_token_ids=[1])


NO_ROOM = answer(finish_reason="length")


def lead(
    cls: type[MultiTurnScheduler],
    side: str,
    answers: Sequence[ChatCompletionResponse],
    *,
    num: int = 1,
    **settings: Any,
) -> list[RolloutOutput]:
    """Run conversations in ms-swift's loop of that side; each gets the answers in turn."""
    requests = [request(index) for index in range(num)]
    config = RequestConfig(n=1)
    if side == "training":
        given = [iter(answers) for _ in requests]

        def rollout(asked: list[Any], _: RequestConfig) -> list[RolloutOutput]:
            return [RolloutOutput(response=next(given[int(one.uuid)])) for one in asked]

        return agent_loop.run_multi_turn(
            requests=requests,
            first_turn_outputs=rollout(requests, config),
            scheduler=made(cls, side, None, **settings),
            rollout_fn=rollout,
            request_config=config,
            max_turns=settings.get("max_turns", 3),
        )
    turns: dict[str, int] = {}

    async def infer_async(asked: Any, _: RequestConfig) -> ChatCompletionResponse:
        turn = turns[asked.uuid] = turns.get(asked.uuid, -1) + 1
        return answers[turn]

    one = made(cls, side, infer_async, **settings)

    async def run_all() -> list[Any]:
        return list(await asyncio.gather(*[one.run(asked, config) for asked in requests]))

    return asyncio.run(run_all())


# --- what is as without us ---


@pytest.mark.parametrize("side", SIDES)
def test_a_conversation_is_led_as_without_us(side: str) -> None:
    answers = [answer(5, 6), answer(7), answer(8, 9)]
    [watched] = lead(Crop, side, answers)
    multi_turns["one"] = Crop

    def unwatched(*_: Any) -> None:
        pass

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{__name__}.watch", unwatched)
        [plain] = lead(Crop, side, answers)
    assert watched == plain
    assert watched.response_token_ids == [[5, 6], [7], [8, 9]]
    assert [m["role"] for m in watched.messages] == [
        "user",
        *["assistant", "tool"] * 2,
        "assistant",
    ]
    assert watched.rollout_infos["images"] == [*request().images, "crop1.png", "crop2.png"]


def test_a_second_training_of_a_process_watches_once() -> None:
    one, again = (made(Crop, "training", None, timeout=t) for t in (1.0, 2.0))
    assert type(again).__mro__[2:4] == type(one).__mro__[2:4]
    assert type(again).__mro__.count(scheduler.WatchedScheduler) == 1
    assert (one.tool_timeout, again.tool_timeout) == (1.0, 2.0)
    watch(None, 1.0)
    watch("none of this name", 1.0)  # ms-swift reports it


# --- conversations that have no room for another turn ---


@pytest.mark.parametrize("side", SIDES)
def test_a_conversation_without_room_ends_with_its_last_answer(side: str) -> None:
    """It ends as "length" with the messages and media of the answer before, whatever the scheduler
    returns."""

    class Endless(Crop):
        def check_finished(self, *_: Any) -> bool:
            return False

    [ended] = lead(Endless, side, [answer(5, 6), answer(7), NO_ROOM], max_turns=None)
    assert ended.response.choices[0].finish_reason == "length"
    assert ended.response_token_ids == [[5, 6], [7]]
    assert ended.rollout_logprobs == [[-0.5, -0.5], [-0.5]]
    assert [m["role"] for m in ended.messages] == ["user", "assistant", "tool", "assistant"]
    assert ended.rollout_infos["images"] == [*request().images, "crop1.png"]
    assert ended.rollout_infos["num_turns"] == 3


def test_conversations_without_room_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(scheduler.logger, "warning_once", lambda text, **_: told.append(text))
    warn_context_overflow([RolloutOutput(response=answer(5))], 256, 512)
    assert told == []
    warn_context_overflow([RolloutOutput(response=one) for one in (answer(5), NO_ROOM)], 256, 512)
    assert "1 of 2 conversations" in told[0]
    assert "--max_length (256) or the engine's --vllm_max_model_len (512)" in told[0]


# --- what fails has its name ---


class Raises(Crop):
    def step(self, *_: Any) -> Step:
        raise KeyError("box")


class Forgets(Crop):
    def step(self, *_: Any) -> Step:
        return None


class Invents(Crop):
    def step(self, *_: Any) -> Step:
        return {"infer_request": {"messages": []}}


class Judges(Crop):
    def check_finished(self, *_: Any) -> bool:
        raise ValueError("no digit")


class Hangs(Crop):
    def step(self, *_: Any) -> Step:
        time.sleep(3)
        return None


class HangsAtEnd(Crop):
    async def on_turn_end(self, *_: Any) -> dict[str, Any]:
        await asyncio.sleep(30)
        return {}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Raises, r"Raises\.step raised KeyError: 'box'"),
        (Forgets, r"Forgets\.step .*it returned None; expected a dictionary with `infer_request`"),
        (Invents, r"Invents\.step .*it returned {'infer_request': .*; expected a dictionary"),
        (Judges, r"Judges\.check_finished raised ValueError: no digit"),
        (Hangs, r"Hangs\.step has not returned for 0\.2 s \(--tool_timeout\)"),
        (HangsAtEnd, r"HangsAtEnd\.on_turn_end has not returned for 0\.2 s \(--tool_timeout\)"),
    ],
)
def test_a_hook_that_fails_is_named(cls: Any, message: str, side: str) -> None:
    where = r"train round 3\.0, group 1, sample 0 in turn 1: --multi_turn_scheduler: "
    with pytest.raises(SchedulerError, match=f"^{where}{message}"):
        lead(cls, side, [answer(5), answer(6)], timeout=0.2)


@pytest.mark.parametrize("side", SIDES)
def test_a_tools_own_timeout_is_not_ours(side: str) -> None:
    class Late(Crop):
        async def on_turn_end(self, *_: Any) -> dict[str, Any]:
            raise asyncio.TimeoutError("the search engine")

    with pytest.raises(SchedulerError, match=r"on_turn_end raised TimeoutError: the search engine"):
        lead(Late, side, [answer(5)])


def test_a_check_is_bounded_on_a_server_and_may_use_signals_in_the_training() -> None:
    class Checks(Crop):
        seconds = 0.0

        def check_finished(self, *_: Any) -> bool:
            if not self.seconds:  # fails in any other thread
                signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
            time.sleep(self.seconds)
            return True

    [output] = lead(Checks, "training", [answer(5)])
    assert output.response_token_ids == [[5]]
    Checks.seconds = 3.0
    late = r"Checks\.check_finished has not returned for 0\.2 s \(--tool_timeout\)"
    with pytest.raises(SchedulerError, match=late):
        lead(Checks, "server", [answer(5)], timeout=0.2)


# --- slow tools ---


@pytest.mark.parametrize("hook", ["step", "on_turn_end"])
def test_tools_of_a_servers_conversations_work_side_by_side(hook: str) -> None:
    """Also tools that block within a coroutine."""
    at_work = threading.Barrier(8, timeout=60)  # broken, unless all eight wait at once

    class Slow(Crop):
        def step(self, *call: Any) -> Step:
            if hook == "step":
                at_work.wait()
            return super().step(*call)

        async def on_turn_end(self, *call: Any) -> dict[str, Any]:
            if hook == "on_turn_end":
                at_work.wait()
            return await super().on_turn_end(*call)

    outputs = lead(Slow, "server", [answer(5), answer(6)], num=8, max_turns=2)
    assert [output.response_token_ids for output in outputs] == [[[5], [6]]] * 8


@pytest.mark.parametrize("side", SIDES)
def test_step_sees_earlier_answers_as_without_us(side: str) -> None:
    """It sees the newest answer as text, earlier ones as token ids. Its changes stay."""
    seen: list[Any] = []

    class Looks(Crop):
        def step(self, infer_request: Any, *rest: Any) -> Step:
            answers = [m for m in infer_request.messages if m["role"] == "assistant"]
            seen.append([m["content"] for m in answers])
            if len(answers) > 1:
                answers[0]["content"] = [1]
            return super().step(infer_request, *rest)

    [output] = lead(Looks, side, [answer(5), answer(6), answer(7)])
    assert seen == [["<5>"], [[5], "<6>"]]
    answers = [m["content"] for m in output.messages if m["role"] == "assistant"]
    assert answers[:2] == [[1], [6]]


def test_a_scheduler_with_a_run_of_its_own_calls_the_hooks_itself() -> None:
    class Own(Crop):
        async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
            response = await self.infer_engine.infer_async(infer_request, request_config)
            infer_request.messages.append({"role": "assistant", "content": "<5>"})
            return self.step(infer_request, response.choices[0], 1)

    [result] = lead(Own, "server", [answer(5)])
    assert result["infer_request"].messages[-1]["content"] == "<image>crop 1"


def test_seconds_of_hooks_are_counted() -> None:
    class Slow(Crop):
        def step(self, *call: Any) -> Step:
            time.sleep(0.1)
            return super().step(*call)

    one = made(Slow, "training", None)
    asked = request()
    asked.messages.append({"role": "assistant", "content": "<5>"})
    step = partial(one.step, asked, answer(5).choices[0], 1)
    assert step()["infer_request"] is asked
    assert between_turns(asked).tool_seconds >= 0.1
