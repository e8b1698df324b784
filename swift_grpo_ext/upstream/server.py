"""`swift rollout`: requests spread over replicas by cost, and a server that says what it speaks.

Symptom: the server cuts a batch into contiguous slices of equally many requests, whatever they
cost; blocks its event loop (and with it `/health`) while replicas work; says nothing of its plugin,
of replicas that have ended, or of what they have loaded.
Upstream: ms-swift 4.6, swift/pipelines/infer/rollout.py, methods of `SwiftRolloutDeploy`, which are
registered as routes by name when the server is made.
Can go when ms-swift has a hook for dispatching, and for what a server tells of itself.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from swift.infer_engine.protocol import RequestConfig

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.scheduler import estimate_cost
from swift_grpo_ext.upstream import api_key, replicas
from swift_grpo_ext.upstream.media_paths import check_media

CHECKSUMS_PATH = "/swift_grpo_ext/weight_receipts/"

NEED_WEIGHTS = ("/infer", "/update_", "/process_weights_after_loading")
"""Beginnings of the routes that rest on weights, or on the group that brings them."""

INSTANCE = uuid.uuid4().hex
"""This start of the server: one that was started anew has other weights, and no trainer."""


@cache
def install() -> None:
    """Let `swift rollout` dispatch as SPEC G5 says. Call before a server is made."""
    api_key.install()
    from swift.pipelines.infer.rollout import InitCommunicatorRequest, SwiftRolloutDeploy

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
            for request in infer_requests:
                check_media(request)
            metadatas = [wire.read_metadata(request.get("data_dict")) for request in infer_requests]
        except ValueError as e:
            raise HTTPException(status_code=400, detail=str(e)) from e
        if not all(metadata and metadata.packed for metadata in metadatas):
            return await upstream_infer(self, infer_requests, request_config, use_tqdm=use_tqdm)
        max_tokens = (request_config and request_config.max_tokens) or 0
        costs = [
            estimate_cost(request, metadata.count, max_tokens)
            for request, metadata in zip(infer_requests, metadatas, strict=True)
            if metadata
        ]
        timeout = self.args.rollout_timeout
        try:
            outputs = await replicas.infer(self, infer_requests, request_config, costs, timeout)
        except replicas.NoReplicaError as e:
            raise HTTPException(status_code=500, detail=str(e)) from e
        return [_plain(output) for output in outputs]

    async def get_engine_type(self: Any) -> dict[str, Any]:
        ours = {
            "version": wire.VERSION,
            "instance": INSTANCE,
            "replicas": _count_replicas(self),
            "new_special_tokens": self.args.new_special_tokens,
        }
        return {**await upstream_engine_type(self), wire.KEY: ours}

    async def get_world_size(self: Any) -> dict[str, int]:
        return {"world_size": _count_replicas(self) * self.args.vllm_tensor_parallel_size}

    async def init_communicator(self: Any, request: Any) -> dict[str, str]:
        host = _store_host(request.host, self.args.host)
        for number, connection in enumerate(self.connections):
            replica = None if self.use_async_engine else number
            args = (host, request.port, request.world_size, replica)
            _tell(connection, "init_communicator", args)
        return {"message": "The replicas are connecting."}

    async def weight_checksums_route(self: Any) -> list[dict[str, str]]:
        """Of each worker of each replica."""
        command = _command("call", "take_weight_checksums", ())
        timeout = self.args.rollout_timeout
        try:
            of_replicas = [replicas.call(c, command, timeout) for c in self.connections]
        except replicas.ReplicaLostError as e:
            raise HTTPException(status_code=500, detail=str(e)) from e
        return [weight_checksums for workers in of_replicas for weight_checksums in workers or [{}]]

    init_communicator.__annotations__["request"] = InitCommunicatorRequest  # FastAPI reads it
    SwiftRolloutDeploy._register_rl_rollout_app = _extended(
        SwiftRolloutDeploy._register_rl_rollout_app, weight_checksums_route
    )
    SwiftRolloutDeploy.infer = infer
    SwiftRolloutDeploy.get_engine_type = get_engine_type
    SwiftRolloutDeploy.get_world_size = get_world_size
    SwiftRolloutDeploy.init_communicator = init_communicator


def _count_replicas(server: Any) -> int:
    """Of the engine replicas that live; the async engine's are one worker's affair."""
    if server.use_async_engine:
        return int(server.args.vllm_data_parallel_size) * len(server.connections)
    return len(server.connections)


def _command(kind: str, method: str, args: tuple[Any, ...]) -> dict[str, Any]:
    kwargs = {"method": method, "args": args}
    return {"type": kind, "method": "collective_rpc", "kwargs": kwargs}


def _tell(connection: Any, method: str, args: tuple[Any, ...]) -> None:
    connection.send(_command("fire_and_forget", method, args))


def _extended(
    register: Callable[[Any], None], weight_checksums_route: Callable[..., Any]
) -> Callable[[Any], None]:
    """Routes of ours beside ms-swift's, and an order among all: requests wait for one another, as
    they did while each blocked the event loop, since they share the pipes to the workers. Only
    `/health` answers at once."""

    def _register_rl_rollout_app(self: Any) -> None:
        register(self)
        check_key = api_key.require_api_key(self)

        async def loaded_checksums() -> list[dict[str, str]]:
            return await weight_checksums_route(self)

        self.app.get(CHECKSUMS_PATH)(loaded_checksums)
        lock = asyncio.Lock()

        @self.app.middleware("http")
        async def wait_for_turn(request: Any, call_next: Callable[[Any], Any]) -> Any:
            if request.url.path.rstrip("/") == "/health":
                return await call_next(request) if self.connections else _no_replica()
            try:
                await check_key(request)  # before it takes a turn, or its body is read
            except HTTPException as e:
                return JSONResponse({"detail": e.detail}, e.status_code, e.headers)
            meant = request.headers.get(wire.INSTANCE_HEADER, INSTANCE)
            if meant != INSTANCE and request.url.path.startswith(NEED_WEIGHTS):
                return _another_instance()
            async with lock:
                replicas.prune(self)
                return await call_next(request)

    return _register_rl_rollout_app


def _store_host(asked: str, host: str) -> str:
    """Where the store of the weights' group listens: at `--host`, where that names one address,
    else at `asked`, by which ms-swift's client means all of the machine's. The store asks nobody
    for a key, and vLLM unpickles what it holds. (vLLM opens it for IPv4 only.)"""
    return asked if host in ("", "0.0.0.0") or ":" in host else host


def _another_instance() -> JSONResponse:
    detail = "the server was started anew, and has the base model's weights"
    return JSONResponse({"detail": detail}, status_code=409)


def _no_replica() -> JSONResponse:
    return JSONResponse({"detail": "no replica is left"}, status_code=503)


def _plain(output: Any) -> dict[str, Any]:
    """A rollout output as plain values, which FastAPI need not look into any further."""
    return {"response": asdict(output.response), "rollout_infos": output.rollout_infos}
