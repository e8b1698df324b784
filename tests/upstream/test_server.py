"""`swift rollout` with our dispatching: whole requests, over replicas, by cost."""

from __future__ import annotations

import asyncio
from multiprocessing import Pipe
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    RequestConfig,
    RolloutOutput,
    UsageInfo,
)
from swift.pipelines.infer.rollout import SwiftRolloutDeploy

from swift_grpo_ext import wire
from swift_grpo_ext.seeding import Place
from swift_grpo_ext.upstream import server
from swift_grpo_ext.wire import Envelope

CONFIG = RequestConfig(max_tokens=16)


def request(group: int, words: int = 1) -> dict[str, Any]:
    place = Place(phase="train", step=0, number=0, group=group, index=0)
    envelope = Envelope(place=place, count=4, run_seed=42, lean=True)
    message = {"role": "user", "content": "word " * words}
    return {"messages": [message], "data_dict": {wire.KEY: envelope.to_wire()}}


class Replica:
    """A worker at the end of a pipe: answers each request with its group, or nothing at all."""

    def __init__(self, fails: bool = False) -> None:
        self.connection, self._worker = Pipe()
        self.groups: list[int] = []
        self._fails = fails
        Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            requests = self._worker.recv()["kwargs"]["infer_requests"]
            self.groups += [r["data_dict"][wire.KEY]["place"]["group"] for r in requests]
            self._worker.send(None if self._fails else [self._answer(r) for r in requests])

    @staticmethod
    def _answer(asked: dict[str, Any]) -> RolloutOutput:
        group = asked["data_dict"][wire.KEY]["place"]["group"]
        response = ChatCompletionResponse("m", [], UsageInfo(1, 1, 2))
        return RolloutOutput(response=response, rollout_infos={"group": group})


def infer(replicas: list[Replica], requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    server.install()
    deployed: Any = SimpleNamespace(
        connections=[replica.connection for replica in replicas], use_async_engine=False
    )
    return list(asyncio.run(SwiftRolloutDeploy.infer(deployed, requests, CONFIG)))


def test_answers_come_in_the_order_of_requests() -> None:
    replicas = [Replica(), Replica(), Replica()]
    answers = infer(replicas, [request(group) for group in range(8)])
    assert [answer["rollout_infos"]["group"] for answer in answers] == list(range(8))
    assert sorted(g for replica in replicas for g in replica.groups) == list(range(8))
    assert {len(replica.groups) for replica in replicas} == {2, 3}


def test_a_costly_prompt_is_a_replicas_only_one() -> None:
    replicas = [Replica(), Replica()]
    infer(replicas, [request(0, words=4000), *(request(group) for group in range(1, 6))])
    assert sorted(len(replica.groups) for replica in replicas) == [1, 5]


def test_an_idle_replica_gets_no_placeholder() -> None:
    replicas = [Replica(), Replica()]
    infer(replicas, [request(0)])
    assert sorted(len(replica.groups) for replica in replicas) == [0, 1]


def test_a_replica_that_fails_is_named() -> None:
    with pytest.raises(HTTPException, match="replica 0 gave no answer to 1 requests"):
        infer([Replica(fails=True)], [request(0)])


def test_a_request_of_another_version_is_refused() -> None:
    other = request(0)
    other["data_dict"][wire.KEY]["version"] = 99
    with pytest.raises(HTTPException, match="speaks version 99") as refused:
        infer([Replica()], [other])
    assert refused.value.status_code == 400
