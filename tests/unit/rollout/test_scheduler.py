"""Users' schedulers lead conversations as without the plugin, and hooks that fail or hang are named
(F2, R1). Each request that a server's scheduler makes is a turn of its sample, and what fails has
the name of its conversation (S2, F5)."""

import asyncio
import copy
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput
from swift.rollout.multi_turn import MultiTurnScheduler

from swift_grpo_ext.rollout.conversation import read_turns
from swift_grpo_ext.rollout.dispatch import FAILURE, REQUEST_FAULT, RequestError
from swift_grpo_ext.sampling.seeding import sample_seed
from tests.unit.rollout.recording_vllm import (
    ID,
    ROOM,
    RUN_SEED,
    RecordingVllm,
    config,
    ids_of,
    lead,
    metadata_of,
    request,
)

Step = dict[str, Any] | None
Lead = Callable[..., list[RolloutOutput]]


class Crop(MultiTurnScheduler):
    """Asks again about the image."""

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Step:
        infer_request.messages.append({"role": "tool", "content": f"<image>crop {current_turn}"})
        infer_request.images = [*infer_request.images, *infer_request.images[:1]]
        infos = {"images": infer_request.images}
        return {"infer_request": infer_request, "rollout_infos": infos}


@pytest.fixture(params=["training", "server"])
def side(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def conversations(side: str, make: Any, assets: Path) -> Lead:
    """Leads a conversation with a scheduler on that side, about an image; raises what a server
    replies."""
    digit = str(sorted((assets / "digits").rglob("*.png"))[0])

    def run(
        cls: type[MultiTurnScheduler], says: str | list[str], **settings: Any
    ) -> list[RolloutOutput]:
        engine = make(RecordingVllm(says), serves=side == "server", use_async=side == "server")
        asked = request(metadata_of(as_arrays=False), digit)
        asked.uuid = "0"
        outputs = lead(engine, cls, asked, **settings)
        if FAILURE in outputs:
            raise RequestError(outputs[FAILURE])
        return outputs

    return run


def test_a_conversation_is_led_as_without_us(conversations: Lead) -> None:
    """`step` sees the newest answer as text, earlier ones as token ids. Its changes stay."""
    seen: list[Any] = []

    class Looks(Crop):
        def step(self, infer_request: Any, *rest: Any) -> Step:
            answers = [m for m in infer_request.messages if m["role"] == "assistant"]
            seen.append([m["content"] for m in answers])
            if len(answers) > 1:
                answers[0]["content"] = [1]
            return super().step(infer_request, *rest)

    watched, plain = (
        conversations(Looks, ["ab", "c", "de"], timeout=timeout, max_turns=3)[0]
        for timeout in (30.0, None)
    )
    assert seen == [["ab"], [ids_of("ab"), "c"]] * 2
    assert watched.messages == plain.messages
    assert watched.messages[1]["content"] == [1]
    assert watched.response_token_ids == [ids_of("ab"), ids_of("c"), ids_of("de")]
    for name in ("response_token_ids", "response_loss_mask", "rollout_logprobs"):
        assert getattr(watched, name) == getattr(plain, name)
    assert len(watched.rollout_infos["images"]) == 3
    for name in ("images", "num_turns"):
        assert watched.rollout_infos[name] == plain.rollout_infos[name]


def test_a_conversation_without_room_ends_with_its_last_answer(conversations: Lead) -> None:
    """It ends as "length" with the messages and media of the answer before, whatever the scheduler
    returns."""

    class Endless(Crop):
        def check_finished(self, *_: Any) -> bool:
            return False

        def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Step:
            result = super().step(infer_request, response_choice, current_turn)
            if current_turn == 2:
                infer_request.messages[-1]["content"] += " very" * ROOM
            return result

    [ended] = conversations(Endless, ["ab", "c", "x"])
    assert ended.response.choices[0].finish_reason == "length"
    assert ended.response_token_ids == [ids_of("ab"), ids_of("c")]
    assert ended.rollout_logprobs == [[0.0, -1.0], [0.0]]
    assert [m["role"] for m in ended.messages] == ["user", "assistant", "tool", "assistant"]
    assert len(ended.rollout_infos["images"]) == 2
    assert ended.rollout_infos["num_turns"] == 3


async def has_its_own_timeout(*_: Any) -> None:
    raise asyncio.TimeoutError("the search engine")


LATE = r"has not returned for 0\.5 s \(--tool_timeout\)"


@pytest.mark.parametrize(
    ("hook", "work", "message"),
    [
        ("step", lambda *_: {"infer_request": {}}, ".*it returned {'infer_request': {}}; expected"),
        ("check_finished", lambda *_: {}["box"], "raised KeyError: 'box'"),
        ("step", lambda *_: time.sleep(3), LATE),
        ("on_turn_end", lambda *_: asyncio.sleep(30), LATE),
        ("on_turn_end", has_its_own_timeout, "raised TimeoutError: the search engine"),
    ],
)
def test_a_failing_hook_is_named(hook: str, work: Any, message: str, conversations: Lead) -> None:
    where = r"train round 0\.0, group 0, sample 0 in turn 1: --multi_turn_scheduler: "
    with pytest.raises(RequestError, match=rf"^{where}Mine\.{hook} {message}"):
        conversations(type("Mine", (Crop,), {hook: work}), "aa", timeout=0.5)


@pytest.mark.parametrize("side", ["server"])
def test_a_check_is_bounded_on_a_server(conversations: Lead) -> None:
    waits = type("Waits", (Crop,), {"check_finished": lambda *_: time.sleep(3)})
    with pytest.raises(RequestError, match=rf"Waits\.check_finished {LATE}"):
        conversations(waits, "a", timeout=0.5)


@pytest.mark.parametrize("side", ["training"])
def test_a_check_may_use_signals_in_the_training(conversations: Lead) -> None:
    def check(*_: Any) -> bool:  # it fails in any other thread than the main one
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return True

    [output] = conversations(type("Checks", (Crop,), {"check_finished": check}), "a")
    assert output.response_token_ids == [ids_of("a")]


def of_server(make: Any) -> tuple[Any, RecordingVllm]:
    vllm = RecordingVllm("abcdefgh")
    return make(vllm, serves=True, use_async=True), vllm


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
def test_what_a_servers_scheduler_asks_is_a_turn_of_its_sample(make: Any, stops: Any) -> None:
    """Its own requests have no metadata, and copies of a request share it; each gets a turn. The
    same holds for a client that sends no metadata."""
    engine, vllm = of_server(make)
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


class Fails(MultiTurnScheduler):
    async def run(self, infer_request: Any, request_config: Any, **_: Any) -> Any:
        await self.infer_engine.infer_async(infer_request, request_config)
        raise KeyError("box")


def test_a_scheduler_that_fails_or_would_lose_seeds_is_refused(make: Any) -> None:
    """Its samples would get vLLM's seeds, or share seeds with other samples of the group. Another
    client's scheduler has no groups, and may ask for several completions. Failures of the engine
    itself are not attributed to a conversation."""
    engine, vllm = of_server(make)
    for cls, message in (
        (Alone, "Alone.async_infer has not called `run` for each request"),
        (Several, "--multi_turn_scheduler: its `run` asked for n=2 completions"),
        (Fails, "RuntimeError: train round 0.0, group 0, sample 0 in turn 2: the server's"),
    ):
        reply = lead(engine, cls, of_scheduler())
        assert reply[REQUEST_FAULT] is (cls is not Fails)
        assert message in reply[FAILURE]
    vllm.params.clear()
    [response] = lead(engine, Several, of_scheduler(stop_token_ids=None))
    assert len(response.choices) == 2
    assert [params.seed for params in vllm.params] == [sample_seed(RUN_SEED, ID)]
    vllm.generate = lambda *_, **__: 1 / 0  # type: ignore[method-assign]
    reply = lead(engine, Fails, of_scheduler())
    assert reply[FAILURE].startswith("ZeroDivisionError")
    assert not reply[REQUEST_FAULT]
