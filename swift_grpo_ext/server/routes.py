"""`swift rollout`: whole requests over replicas by cost, one request at a time, bounded in time.

Symptom: the server cuts a batch into contiguous slices of equally many requests, whatever they
cost. It blocks its event loop (and with it `/health`) while replicas work, without a bound. It says
nothing of its plugin, of replicas that have ended, or of what they have loaded.
Upstream: ms-swift 4.6, swift/pipelines/infer/rollout.py, methods of `SwiftRolloutDeploy`, which are
registered as routes by name when the server is made.
Can go when ms-swift has a hook for dispatching, and for what a server says of itself.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from types import NoneType
from typing import Any

from fastapi import HTTPException, Request
from swift.infer_engine.protocol import RequestConfig

from swift_grpo_ext.media.paths import check_media
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.dispatch import NoWorkerError, RequestError, estimate_cost
from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.server import api_key, replicas
from swift_grpo_ext.server.turns import CALLER, Turns
from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import verify
from swift_grpo_ext.upstream.patches import patch

CHECKSUMS_PATH = "/swift_grpo_ext/weight_receipts/"

INSTANCE = uuid.uuid4().hex
"""This start of the server: one that was started anew has other weights, and no trainer."""

MEDIA = ((list, str, NoneType), "a list of media")
FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "messages": ((list,), "a list of messages"),
    **dict.fromkeys(("images", "videos", "audios"), MEDIA),
    "data_dict": ((dict, NoneType), "an object"),
}
"""Types of a request's fields, and their names in errors."""

RESETS = ("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache")


def install_where_served() -> None:
    """Put our engine and routes into `swift rollout`, where its module is loaded.

    That module names its engine when it loads, which is before plugins are imported.

    Raises:
        UnsupportedUpstreamError: ms-swift or vLLM does not have the hooks that we extend.
    """
    served: Any = sys.modules.get("swift.pipelines.infer.rollout")
    if served is None:
        return
    from swift_grpo_ext.rollout import engine

    engine.install()
    if served.GRPOVllmEngine is not engine.RolloutEngine:
        verify(pins.SERVER)
        patch(served, GRPOVllmEngine=engine.RolloutEngine)
        install()


@cache
def install() -> None:
    """Let `swift rollout` dispatch as SPEC G5 says. Call before a server is made."""
    api_key.install()
    replicas.install()
    from swift.pipelines.infer.rollout import InitCommunicatorRequest, SwiftRolloutDeploy

    upstream_engine_type = SwiftRolloutDeploy.get_engine_type
    register = SwiftRolloutDeploy._register_rl_rollout_app

    # Annotations are read by FastAPI. `list[dict]` keeps pydantic from copying every image twice
    # while it finds out whether a request is rather ms-swift's dataclass.
    async def infer(
        self: Any,
        infer_requests: list[dict[str, Any]],
        request_config: RequestConfig | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> Any:
        return await asyncio.to_thread(_infer, self, infer_requests, request_config)

    async def get_engine_type(self: Any, request: Request) -> dict[str, Any]:
        # One that is still connecting has made its group of those that it was told of before.
        if wire.INSTANCE_HEADER in request.headers:
            self.restarts.admit()
        try:
            await _call_all(self, replicas.PING)  # one that hangs must get no weights
        except HTTPException:
            if not self.restarts.num_awaited:
                raise
        ours = {
            "version": wire.VERSION,
            "instance": INSTANCE,
            "replicas": _count_replicas(self),
            "members": [connection.name for connection in self.connections],
            "starting": self.restarts.num_awaited,
            "new_special_tokens": self.args.new_special_tokens,
        }
        return {**await upstream_engine_type(self), wire.KEY: ours}

    async def get_world_size(self: Any) -> dict[str, int]:
        return {"world_size": _count_replicas(self) * self.args.vllm_tensor_parallel_size}

    async def get_model_state_keys(self: Any) -> dict[str, list[str]]:
        """Parameter names, of the first worker that has any."""
        of_replicas = await _call_all(self, _command("call", "get_state_keys"))
        keys = [workers for reply in of_replicas for workers in reply or () if workers]
        return {"keys": keys[0] if keys else []}

    async def init_communicator(self: Any, request: Any) -> dict[str, str]:
        caller = CALLER.get()
        host = _store_host(request.host, self.args.host, caller.came_in_at)
        timeout = wire.GROUP_TIMEOUTS * caller.timeout
        for number, connection in enumerate(self.connections):
            replica = None if self.use_async_engine else number
            args = (host, request.port, request.world_size, replica, timeout)
            connection.send(_command("fire_and_forget", "init_communicator", args))
        return {"message": "The replicas are connecting."}

    async def close_communicator(self: Any) -> dict[str, str]:
        """Returns once it is closed: a trainer must not reach the store of the group that was."""
        await _call_all(self, _command("call", "close_communicator"))
        return {"message": "The group is closed."}

    async def process_weights_after_loading(self: Any) -> dict[str, str]:
        replies = await _call_all(self, _command("call", "process_weights_after_loading"))
        if None in replies:
            detail = "a replica could not load its weights; the log of `swift rollout` tells why"
            raise HTTPException(status_code=500, detail=detail)
        return {"message": "The weights are loaded."}

    init_communicator.__annotations__["request"] = InitCommunicatorRequest  # FastAPI reads it
    for method in (
        *(infer, get_engine_type, get_world_size, get_model_state_keys, init_communicator),
        *(close_communicator, process_weights_after_loading, *map(_reset, RESETS)),
    ):
        patch(SwiftRolloutDeploy, **{method.__name__: method})

    def _register_rl_rollout_app(self: Any) -> None:
        register(self)

        async def loaded_checksums() -> list[dict[str, str]]:
            """Of each worker of each replica. One that refused an adapter draws no more: that was
            broadcast after the answer to the request which announced it."""
            of_replicas = await _call_all(self, _command("call", "read_weight_checksums"))
            for connection, workers in zip(self.connections, of_replicas, strict=True):
                if any(ADAPTER_FAULT in of_worker for of_worker in workers or ()):
                    connection.holds_weights = False
            return [of_worker for workers in of_replicas for of_worker in workers or [{}]]

        self.app.get(CHECKSUMS_PATH)(loaded_checksums)
        check_key = api_key.require_api_key(self)
        self.app.add_middleware(Turns, server=self, check_key=check_key, instance=INSTANCE)

    patch(SwiftRolloutDeploy, _register_rl_rollout_app=_register_rl_rollout_app)


def _reset(name: str) -> Callable[..., Any]:
    async def reset(self: Any) -> dict[str, str]:
        await _call_all(self, {"type": "call", "method": name})
        return {"message": f"{name} is done."}

    reset.__name__ = name
    return reset


async def _call_all(server: Any, command: Any) -> list[Any]:
    try:
        timeout = CALLER.get().timeout
        return await asyncio.to_thread(replicas.call_all, server, command, timeout)
    except NoWorkerError as e:
        raise HTTPException(status_code=503, detail=str(e)) from e


def _infer(
    server: Any, requests: list[dict[str, Any]], request_config: RequestConfig | None
) -> list[Any]:
    """The outputs of requests: packed ones over replicas by cost, others in contiguous slices (a
    server's scheduler may make several outputs of one request)."""
    caller = CALLER.get()
    try:
        metadatas = [_check(number, request) for number, request in enumerate(requests)]
        infer = partial(replicas.infer, server, is_abandoned=caller.is_gone)
        if all(metadata and metadata.packed for metadata in metadatas):
            max_tokens = (request_config and request_config.max_tokens) or 0
            costs = [
                estimate_cost(request, metadata.count, max_tokens)
                for request, metadata in zip(requests, metadatas, strict=True)
                if metadata
            ]
            batches = [[request] for request in requests]
            addresses = [metadata.replica for metadata in metadatas if metadata]
            outputs = infer(batches, request_config, costs, caller.timeout, addresses=addresses)
            return [_plain(output) for [output] in outputs]
        slices = _slices(requests, len(server.connections))
        sizes = [float(len(batch)) for batch in slices]
        outputs = infer(slices, request_config, sizes, caller.timeout, counted=False)
        return [output for of_slice in outputs for output in of_slice]
    except (ValueError, RequestError) as e:
        raise HTTPException(status_code=400, detail=str(e)) from e
    except NoWorkerError as e:
        status = 500 if server.connections else 503
        raise HTTPException(status_code=status, detail=str(e)) from e


def _check(number: int, request: dict[str, Any]) -> wire.RequestMetadata | None:
    """The metadata of a request, if it has some.

    Raises:
        ValueError: the request is malformed, or names a medium that it may not; names the field.
    """
    for name, (types, expected) in FIELDS.items():
        value = request.get(name)
        if not isinstance(value, types):
            shown = json.dumps(value)[:200]
            raise ValueError(f"infer_requests[{number}].{name}: {shown}; expected {expected}")
    for k, message in enumerate(request["messages"]):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"infer_requests[{number}].messages[{k}]: {json.dumps(message)[:200]}; expected an "
                "object with a role and content"
            )
    if not request["messages"]:
        raise ValueError(f"infer_requests[{number}].messages: []; expected at least one message")
    try:
        check_media(request)
    except ValueError as e:
        raise ValueError(f"infer_requests[{number}].{e}") from e
    return wire.read_metadata(request.get("data_dict"))


def _slices(values: Sequence[Any], count: int) -> list[list[Any]]:
    """At most `count` contiguous slices, as even as can be, none of them empty."""
    size, extra = divmod(len(values), max(count, 1))
    ends = [size * (k + 1) + min(k + 1, extra) for k in range(max(count, 1))]
    starts = [0, *ends]
    pairs = zip(starts, ends, strict=False)
    return [list(values[start:end]) for start, end in pairs if end > start]


def _count_replicas(server: Any) -> int:
    """Of the engine replicas that live; one worker runs all of the async engine's."""
    if server.use_async_engine:
        return int(server.args.vllm_data_parallel_size) * len(server.connections)
    return len(server.connections)


def _command(kind: str, method: str, args: tuple[Any, ...] = ()) -> dict[str, Any]:
    kwargs = {"method": method, "args": args}
    return {"type": kind, "method": "collective_rpc", "kwargs": kwargs}


def _store_host(asked: str, host: str, came_in_at: str) -> str:
    """Where the store of the weights' group listens: at `--host`, where that names one address,
    else at the one by which the training came; else at `asked`, by which ms-swift's client means
    all of the machine's. The store asks nobody for a key, and vLLM unpickles what it holds. (vLLM
    opens it for IPv4 only.)"""
    if host not in ("", "0.0.0.0") and ":" not in host:
        return host
    return came_in_at if re.fullmatch(r"[0-9.]+", came_in_at) else asked


def _plain(output: Any) -> dict[str, Any]:
    """A rollout output as plain values, which FastAPI need not look into any further."""
    return {"response": asdict(output.response), "rollout_infos": output.rollout_infos}
