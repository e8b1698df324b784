"""`swift rollout`: requests spread over replicas by cost, and a server that says what it speaks.

Symptom: the server cuts a batch into contiguous slices of equally many requests, whatever they
cost; blocks its event loop (and with it `/health`) while replicas work; says nothing of its plugin.
Upstream: ms-swift 4.6, swift/pipelines/infer/rollout.py, `SwiftRolloutDeploy.infer` and
`get_engine_type`, which are registered as routes by name when the server is made.
Can go when ms-swift has a hook for dispatching, and for what a server tells of itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

from fastapi import HTTPException
from swift.infer_engine.protocol import RequestConfig

from swift_grpo_ext import wire
from swift_grpo_ext.scheduler import balance, estimate_cost, positions
from swift_grpo_ext.upstream.contract import Pin, verify

PINS = (
    Pin("swift.pipelines.infer.rollout", "SwiftRolloutDeploy.infer",
        ("self", "infer_requests", "request_config", "use_tqdm")),
    Pin("swift.pipelines.infer.rollout", "SwiftRolloutDeploy.get_engine_type", ("self",)),
    Pin("swift.pipelines.infer.rollout", "SwiftRolloutDeploy._register_rl_rollout_app", ("self",)),
)  # fmt: skip


@cache
def install() -> None:
    """Let `swift rollout` dispatch as SPEC G5 says. Call before a server is made."""
    verify(PINS)
    from swift.pipelines.infer.rollout import SwiftRolloutDeploy

    upstream_infer = SwiftRolloutDeploy.infer
    upstream_engine_type = SwiftRolloutDeploy.get_engine_type

    # Annotations are read by FastAPI. `list[dict]` keeps pydantic from copying every image twice
    # while it finds out whether a request is rather ms-swift's dataclass.
    async def infer(
        self: Any,
        infer_requests: list[dict[str, Any]],
        request_config: RequestConfig | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> Any:
        try:
            envelopes = [wire.read_envelope(request.get("data_dict")) for request in infer_requests]
        except wire.WireError as e:
            raise HTTPException(status_code=400, detail=str(e)) from e
        if not all(envelope and envelope.lean for envelope in envelopes):
            return await upstream_infer(self, infer_requests, request_config, use_tqdm=use_tqdm)
        max_tokens = (request_config and request_config.max_tokens) or 0
        costs = [
            estimate_cost(request, envelope.count, max_tokens)
            for request, envelope in zip(infer_requests, envelopes, strict=True)
            if envelope
        ]
        return await _dispatch(self, infer_requests, request_config, costs)

    async def get_engine_type(self: Any) -> dict[str, Any]:
        replicas = self.args.vllm_data_parallel_size
        ours = {"version": wire.VERSION, "replicas": replicas}
        return {**await upstream_engine_type(self), wire.KEY: ours}

    SwiftRolloutDeploy._register_rl_rollout_app = _one_at_a_time(
        SwiftRolloutDeploy._register_rl_rollout_app
    )
    SwiftRolloutDeploy.infer = infer
    SwiftRolloutDeploy.get_engine_type = get_engine_type


def _one_at_a_time(register: Callable[[Any], None]) -> Callable[[Any], None]:
    """Requests wait for one another, as they did while each blocked the event loop: they share the
    pipes to the workers. Only `/health` answers at once."""

    def _register_rl_rollout_app(self: Any) -> None:
        register(self)
        lock = asyncio.Lock()

        @self.app.middleware("http")
        async def wait_for_turn(request: Any, call_next: Callable[[Any], Any]) -> Any:
            if request.url.path.rstrip("/") == "/health":
                return await call_next(request)
            async with lock:
                return await call_next(request)

    return _register_rl_rollout_app


async def _dispatch(
    server: Any, requests: list[dict[str, Any]], request_config: Any, costs: list[float]
) -> list[Any]:
    """Answers to `requests`, in their order; idle replicas are left alone."""
    shares = balance(costs, [1.0] * len(server.connections))
    busy = [replica for replica, share in enumerate(shares) if share]
    for replica in busy:
        kwargs = {
            "infer_requests": [requests[i] for i in shares[replica]],
            "request_config": request_config,
            "use_tqdm": False,
        }
        method = "async_infer" if server.use_async_engine else "infer"
        server.connections[replica].send({"type": "call", "method": method, "kwargs": kwargs})
    loop = asyncio.get_running_loop()
    received = await asyncio.gather(
        *(loop.run_in_executor(None, server.connections[replica].recv) for replica in busy)
    )
    answers = dict(zip(busy, received, strict=True))
    for replica, answer in answers.items():
        if answer is None or len(answer) != len(shares[replica]):
            count = "no answer" if answer is None else f"{len(answer)} answers"
            raise HTTPException(
                status_code=500,
                detail=f"replica {replica} gave {count} to {len(shares[replica])} requests; its "
                "error stands in the log of `swift rollout`",
            )
    return [_plain(answers[replica][place]) for replica, place in positions(shares, len(requests))]


def _plain(output: Any) -> dict[str, Any]:
    """A rollout output as plain values, which FastAPI need not look into any further."""
    return {"response": asdict(output.response), "rollout_infos": output.rollout_infos}
