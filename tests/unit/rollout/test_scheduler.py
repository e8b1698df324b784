"""Users' schedulers lead conversations as without the plugin, and hooks that fail or hang are named
(F2, R1)."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swift.infer_engine.protocol import RolloutOutput
from swift.rollout.multi_turn import MultiTurnScheduler, multi_turns

from swift_grpo_ext.rollout import scheduler
from swift_grpo_ext.rollout.conversation import between_turns
from swift_grpo_ext.rollout.dispatch import FAILURE, RequestError
from swift_grpo_ext.rollout.scheduler import warn_context_overflow, watch
from tests.rig.recording_vllm import ROOM, RecordingVllm, ids_of, lead, metadata_of, request

Step = dict[str, Any] | None
Lead = Callable[..., list[RolloutOutput]]

on_a_server = pytest.mark.parametrize("side", ["server"])


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
    """Leads conversations with a scheduler on that side, about an image; raises what a server
    replies."""
    digit = str(sorted((assets / "digits").rglob("*.png"))[0])

    def run(
        cls: type[MultiTurnScheduler], says: str | list[str], num: int = 1, **settings: Any
    ) -> list[RolloutOutput]:
        is_server = side == "server"
        engine = make(RecordingVllm(says), serves=is_server, use_async=is_server)
        asked = [request(metadata_of(as_arrays=False), digit) for _ in range(num)]
        for number, one in enumerate(asked):
            one.uuid = str(number)
        outputs = lead(engine, cls, *asked, **settings)
        if FAILURE in outputs:
            raise RequestError(outputs[FAILURE])
        return outputs

    return run


# --- conversations ---


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


def test_a_conversation_without_room_ends_with_its_last_answer(
    conversations: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends as "length" with the messages and media of the answer before, whatever the scheduler
    returns. One warning counts such conversations."""

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
    warnings: list[str] = []
    monkeypatch.setattr(scheduler.logger, "warning_once", lambda text, **_: warnings.append(text))
    [sound] = conversations(Crop, "a", max_turns=1)
    warn_context_overflow([sound], 256, 512)
    assert warnings == []
    warn_context_overflow([sound, ended], 256, 512)
    assert "1 of 2 conversations" in warnings[0]
    assert "--max_length (256) or the engine's --vllm_max_model_len (512)" in warnings[0]


def test_a_second_training_of_a_process_watches_once() -> None:
    multi_turns["one"] = Crop
    watch("one", 1.0)
    watch("one", 2.0)
    assert multi_turns["one"].__mro__[1:3] == (scheduler.WatchedScheduler, Crop)
    assert multi_turns["one"].tool_timeout == 2.0
    watch(None, 1.0)
    watch("none of this name", 1.0)  # ms-swift reports it


# --- hooks that fail, or take long ---


def raises(*_: Any) -> Any:
    raise KeyError("box")


def hangs(*_: Any) -> None:
    time.sleep(3)


async def hangs_in_a_coroutine(*_: Any) -> None:
    await asyncio.sleep(30)


async def has_its_own_timeout(*_: Any) -> None:
    raise asyncio.TimeoutError("the search engine")


LATE = r"has not returned for 0\.5 s \(--tool_timeout\)"


@pytest.mark.parametrize(
    ("hook", "work", "message"),
    [
        ("step", raises, "raised KeyError: 'box'"),
        ("step", lambda *_: None, ".*it returned None; expected a dictionary with `infer_r"),
        ("step", lambda *_: {"infer_request": {}}, ".*it returned {'infer_request': {}}; expected"),
        ("check_finished", raises, "raised KeyError: 'box'"),
        ("step", hangs, LATE),
        ("on_turn_end", hangs_in_a_coroutine, LATE),
        ("on_turn_end", has_its_own_timeout, "raised TimeoutError: the search engine"),
    ],
)
def test_a_hook_that_fails_is_named(
    hook: str, work: Any, message: str, conversations: Lead
) -> None:
    where = r"train round 0\.0, group 0, sample 0 in turn 1: --multi_turn_scheduler: "
    with pytest.raises(RequestError, match=rf"^{where}Mine\.{hook} {message}"):
        conversations(type("Mine", (Crop,), {hook: work}), "aa", timeout=0.5)


@on_a_server
def test_a_check_is_bounded_on_a_server(conversations: Lead) -> None:
    with pytest.raises(RequestError, match=rf"Mine\.check_finished {LATE}"):
        conversations(type("Mine", (Crop,), {"check_finished": hangs}), "a", timeout=0.5)


@pytest.mark.parametrize("side", ["training"])
def test_a_check_may_use_signals_in_the_training(conversations: Lead) -> None:
    class Checks(Crop):
        def check_finished(self, *_: Any) -> bool:
            # It fails in any other thread than the main one.
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
            return True

    [output] = conversations(Checks, "a")
    assert output.response_token_ids == [ids_of("a")]


@on_a_server
@pytest.mark.parametrize("hook", ["step", "on_turn_end"])
def test_tools_of_a_servers_conversations_work_side_by_side(hook: str, conversations: Lead) -> None:
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

    outputs = conversations(Slow, "a" * 16, num=8, max_turns=2)
    assert [output.response_token_ids for output in outputs] == [[ids_of("a")] * 2] * 8


def test_seconds_of_hooks_are_counted() -> None:
    class Slow(Crop):
        def step(self, *call: Any) -> Step:
            time.sleep(0.1)
            return super().step(*call)

    multi_turns["one"] = Slow
    watch("one", 30.0)
    asked = request(metadata_of())
    assert multi_turns["one"]().step(asked, None, 1)["infer_request"] is asked
    assert between_turns(asked).tool_seconds >= 0.1
