"""`swift rollout` with our dispatching: whole requests, over replicas, by cost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from multiprocessing import Pipe
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from fastapi import HTTPException
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    RequestConfig,
    RolloutOutput,
    UsageInfo,
)
from swift.pipelines.infer.rollout import SwiftRolloutDeploy

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.upstream import replicas, server
from swift_grpo_ext.upstream.replicas import FAILURE

CONFIG = RequestConfig(max_tokens=16)


def request(group: int, words: int = 1) -> dict[str, Any]:
    sample_id = SampleId(phase="train", step=0, number=0, group=group, index=0)
    metadata = RequestMetadata(sample_id=sample_id, count=4, run_seed=42, packed=True)
    message = {"role": "user", "content": "word " * words}
    return {"messages": [message], "data_dict": {wire.KEY: metadata.to_wire()}}


Fault = Literal["raises", "answers nothing", "answers half", "ends", "hangs"]


class Replica:
    """A worker at the end of a pipe: answers each request with its group, or fails in its way."""

    def __init__(self, fault: Fault | None = None) -> None:
        self.connection, self._worker = Pipe()
        self.groups: list[int] = []
        self.exitcode = -9
        self._fault = fault
        self._alive = True
        self._ending = Lock()
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(EOFError, OSError):
            self._answer_until_killed()

    def _answer_until_killed(self) -> None:
        while self._alive:
            requests = self._worker.recv()["kwargs"]["infer_requests"]
            self.groups += [r["data_dict"][wire.KEY]["place"]["group"] for r in requests]
            if self._fault == "ends":
                self.kill()
            elif self._fault != "hangs":
                self._worker.send(self._answers(requests))

    def _answers(self, requests: list[dict[str, Any]]) -> Any:
        if self._fault == "raises":
            return {FAILURE: "ValueError: no such image"}
        answers = [self._answer(r) for r in requests]
        if self._fault == "answers nothing":
            return None
        return answers[:-1] if self._fault == "answers half" else answers

    # What is asked of its process:

    def is_alive(self) -> bool:
        return self._alive

    def kill(self) -> None:
        with self._ending:  # both sides may want it at the same moment
            self._alive = False
            self._worker.close()

    def join(self) -> None:
        pass

    @staticmethod
    def _answer(asked: dict[str, Any]) -> RolloutOutput:
        group = asked["data_dict"][wire.KEY]["place"]["group"]
        response = ChatCompletionResponse("m", [], UsageInfo(1, 1, 2))
        return RolloutOutput(response=response, rollout_infos={"group": group})


def deploy(replicas: list[Replica], timeout: float = 60.0) -> Any:
    server.install()
    return SimpleNamespace(
        connections=[replica.connection for replica in replicas],
        processes=list(replicas),
        use_async_engine=False,
        args=SimpleNamespace(rollout_timeout=timeout, vllm_tensor_parallel_size=2),
    )


def infer(
    replicas: list[Replica], requests: list[dict[str, Any]], timeout: float = 60.0
) -> list[dict[str, Any]]:
    deployed = deploy(replicas, timeout)
    return list(asyncio.run(SwiftRolloutDeploy.infer(deployed, requests, CONFIG)))


def test_answers_come_in_the_order_of_requests() -> None:
    three = [Replica(), Replica(), Replica()]
    answers = infer(three, [request(group) for group in range(8)])
    assert [answer["rollout_infos"]["group"] for answer in answers] == list(range(8))
    assert sorted(g for replica in three for g in replica.groups) == list(range(8))
    assert {len(replica.groups) for replica in three} == {2, 3}


def test_a_costly_prompt_is_a_replicas_only_one() -> None:
    two = [Replica(), Replica()]
    infer(two, [request(0, words=4000), *(request(group) for group in range(1, 6))])
    assert sorted(len(replica.groups) for replica in two) == [1, 5]


def test_an_idle_replica_gets_no_placeholder() -> None:
    two = [Replica(), Replica()]
    infer(two, [request(0)])
    assert sorted(len(replica.groups) for replica in two) == [0, 1]


FAULTS: dict[Fault, str] = {
    "raises": "a replica failed: ValueError: no such image",
    "answers nothing": "a replica gave no answer to 4 requests",
    "answers half": "a replica gave 3 answers to 4 requests",
    "ends": r"a replica has ended \(EOFError\)",
    "hangs": r"a replica has not answered for 0\.5 s \(--rollout_timeout\)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_one_replica_cannot_answer_another_does(fault: Fault) -> None:
    failing, healthy = Replica(fault), Replica()
    deployed = deploy([failing, healthy], timeout=5.0 if fault == "hangs" else 60.0)
    asked = [request(group) for group in range(8)]
    answers = asyncio.run(SwiftRolloutDeploy.infer(deployed, asked, CONFIG))
    assert [answer["rollout_infos"]["group"] for answer in answers] == list(range(8))
    assert sorted(healthy.groups) == list(range(8))
    is_lost = fault in ("ends", "hangs")
    assert deployed.connections == [healthy.connection] or not is_lost
    assert failing.is_alive() != is_lost
    world = asyncio.run(SwiftRolloutDeploy.get_world_size(deployed))
    assert world == {"world_size": 2 if is_lost else 4}


@pytest.mark.parametrize("fault", FAULTS)
def test_with_no_replica_left_the_cause_is_named(fault: Fault) -> None:
    timeout = 0.5 if fault == "hangs" else 60.0
    with pytest.raises(HTTPException, match=FAULTS[fault]) as failed:
        infer([Replica(fault)], [request(group) for group in range(4)], timeout)
    assert failed.value.status_code == 500
    with pytest.raises(HTTPException, match="it has no replica left"):
        infer([], [request(0)])


def test_a_replica_that_has_ended_is_let_go() -> None:
    ended, healthy = Replica(), Replica()
    deployed = deploy([ended, healthy])
    ended.kill()
    replicas.prune(deployed)
    assert deployed.processes == [healthy]
    assert deployed.connections == [healthy.connection]


def test_a_request_of_another_version_is_refused() -> None:
    other = request(0)
    other["data_dict"][wire.KEY]["version"] = 99
    with pytest.raises(HTTPException, match="speaks version 99") as refused:
        infer([Replica()], [other])
    assert refused.value.status_code == 400
