"""Each request that a server's scheduler makes is a turn of its sample, and what fails has the name
of its conversation (S2, F5)."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
from swift.rollout.multi_turn import MultiTurnScheduler

from swift_grpo_ext.rollout import served as served_module
from swift_grpo_ext.rollout.conversation import read_turns
from swift_grpo_ext.rollout.dispatch import FAILURE, REQUEST_FAULT
from swift_grpo_ext.sampling.seeding import sample_seed
from tests.rig.recording_vllm import (
    ID,
    RUN_SEED,
    RecordingVllm,
    config,
    lead,
    metadata_of,
    request,
)


@pytest.fixture
def vllm() -> Any:
    return RecordingVllm("abcdefgh")


@pytest.fixture
def engine(make: Any, vllm: RecordingVllm) -> Any:
    return make(vllm, serves=True, use_async=True)


def of_scheduler(**fields: Any) -> RolloutInferRequest:
    return request(metadata_of(as_arrays=False, **fields))


class OwnRequests(MultiTurnScheduler):
    """Asks questions of its own before and after the sample's, two of them at once."""

    async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> RolloutOutput:
        async def ask(request: Any) -> Any:
            return await self.infer_engine.infer_async(request, request_config, **kwargs)

        await ask(RolloutInferRequest(messages=[{"role": "user", "content": "own"}]))
        response = await ask(infer_request)
        await asyncio.gather(ask(copy.deepcopy(infer_request)), ask(copy.deepcopy(infer_request)))
        return RolloutOutput(response=response)


@pytest.mark.parametrize("stops", [(7,), None])
def test_what_a_servers_scheduler_asks_by_itself_is_a_turn_of_its_sample(
    engine: Any, vllm: RecordingVllm, stops: Any
) -> None:
    """Its own requests have no metadata, and copies of a request share it; each gets a turn. The
    same holds for a client that sends no metadata."""
    first = metadata_of(as_arrays=False, stop_token_ids=stops)
    other = replace(ID, index=1)
    outputs = lead(engine, OwnRequests, request(first), request(replace(first, sample_id=other)))
    assert [len(read_turns(output, RUN_SEED)) for output in outputs] == [4, 4]
    expected = {sample_seed(RUN_SEED, replace(i, turn=t)) for i in (ID, other) for t in range(4)}
    assert len(vllm.params) == 8
    assert {params.seed for params in vllm.params} == expected
    assert all((7 in params.stop_token_ids) is bool(stops) for params in vllm.params)


class Alone(MultiTurnScheduler):
    async def async_infer(self, infer_requests: list[Any], *args: Any, **kw: Any) -> Any:
        tasks = [self.infer_engine.infer_async(row, config(n=1)) for row in infer_requests]
        return await self.infer_engine._batch_infer_stream(tasks, False, False, None)


class Several(MultiTurnScheduler):
    async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
        own = RolloutInferRequest(messages=infer_request.messages)
        return await self.infer_engine.infer_async(own, replace(request_config, n=2))


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        # Its samples would silently get vLLM's seeds.
        (Alone, "Alone.async_infer has not called `run` for each request"),
        # They would share seeds with other samples of the group.
        (Several, "--multi_turn_scheduler: its `run` asked for n=2 completions"),
    ],
)
def test_a_scheduler_that_would_lose_seeds_is_refused(
    engine: Any, scheduler: Any, message: str
) -> None:
    reply = lead(engine, scheduler, of_scheduler())
    assert reply[REQUEST_FAULT]
    assert message in reply[FAILURE]


def test_another_clients_scheduler_may_ask_for_several_completions(
    engine: Any, vllm: RecordingVllm
) -> None:
    """It has no groups."""
    [response] = lead(engine, Several, of_scheduler(stop_token_ids=None))
    assert [choice.message.content for choice in response.choices] == ["a", "b"]
    assert [params.seed for params in vllm.params] == [sample_seed(RUN_SEED, ID)]


class Fails(MultiTurnScheduler):
    async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
        await self.infer_engine.infer_async(infer_request, request_config)
        raise KeyError("box")


@pytest.mark.parametrize("is_engines", [True, False])
def test_a_conversation_that_fails_is_named(engine: Any, vllm: Any, is_engines: bool) -> None:
    """Failures of the engine itself are not attributed to a conversation."""
    if is_engines:
        vllm.generate = lambda *_, **__: 1 / 0
    reply = lead(engine, Fails, of_scheduler())
    where = "RuntimeError: train round 0.0, group 0, sample 0 in turn 2: the server's --multi_turn"
    assert reply[FAILURE].startswith("ZeroDivisionError" if is_engines else where)
    assert not reply[REQUEST_FAULT]


def test_conversations_that_are_given_up_end(engine: Any, vllm: Any) -> None:
    """A conversation whose tool works makes no more requests; one in the engine is aborted."""
    at_work, is_over, refused = threading.Event(), threading.Event(), list[str]()

    class Waits(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
            if infer_request.data_dict["tool"]:
                at_work.set()
                is_over.wait(20)
            try:
                await self.infer_engine.infer_async(infer_request, request_config)
            except BaseException as e:
                refused.append(type(e).__name__)
                raise

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        at_work.wait(20)
        assert not served_module.go_on(time.monotonic() + 1)  # the engine is silent
        served_module.give_up()
        await asyncio.sleep(20)
        yield

    vllm.generate = generate
    asked = [of_scheduler(), of_scheduler()]
    for number, one in enumerate(asked):
        one.data_dict["tool"] = number == 1
    reply = lead(engine, Waits, *asked)
    assert reply == {
        FAILURE: "the training that asked for the conversations has left",
        REQUEST_FAULT: True,
    }
    is_over.set()
    deadline = time.monotonic() + 20
    while len(refused) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert refused == ["CancelledError", "RequestError"]
    assert not served_module.go_on(0.0)
