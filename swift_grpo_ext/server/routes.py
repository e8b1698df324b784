"""`swift rollout` with us: the way of a request into the server, and what each route does.

Requests take turns, since they share the pipes to the replicas (docs/promises.md, F2). A request's
body is read before its turn, within a time, and its answer is sent after it: no client can hold up
another. `/health` answers at once, whoever asks. Groups go over the replicas whole, by cost.

ms-swift 4.6 (pipelines/infer/rollout.py) cuts a batch into slices of equally many requests, and
blocks its event loop, and with it `/health`, while replicas work. It says nothing of its plugin, of
replicas that have ended, or of their weights.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ConfigDict, FailFast, Field
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from swift.arguments import RolloutArguments
from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import InitCommunicatorRequest, SwiftRolloutDeploy
from swift.utils import get_logger
from typing_extensions import Required, TypedDict

from swift_grpo_ext.media.paths import check_media
from swift_grpo_ext.rollout import conversation, engine, wire
from swift_grpo_ext.rollout.dispatch import NoWorkerError, RequestError, estimate_cost
from swift_grpo_ext.rollout.scheduler import watch
from swift_grpo_ext.server import api_key, bodies, replicas
from swift_grpo_ext.server.lease import Lease
from swift_grpo_ext.server.other_clients import OtherClients
from swift_grpo_ext.server.record import ServerRecord
from swift_grpo_ext.server.updates import Updates
from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import verify
from swift_grpo_ext.upstream.determinism import batches_follow_arrival
from swift_grpo_ext.upstream.patches import Moment, patch, repair

logger = get_logger()

REPORTS_PATH = "/swift_grpo_ext/weight_reports/"

INSTANCE = uuid.uuid4().hex
"""This start of the server: one that was restarted has other weights, and no trainer."""

RESETS = ("reset_prefix_cache", "reset_encoder_cache", "reset_mm_cache")

# Beginnings of routes that rest on weights, or on the group that brings them; and of those after
# which replicas hold a trainer's weights.
NEED_WEIGHTS = ("/infer", "/update_", "/process_weights_after_loading")
BRING_WEIGHTS = ("/process_weights_after_loading", "/update_adapter")

SECONDS_BETWEEN_BLANKS = 0.25


@dataclass(frozen=True)
class Caller:
    """Who waits for an answer."""

    timeout: float  # seconds that a replica has for each call
    may_change: bool  # it has the lease, or nobody has
    came_in_at: str  # this machine's address that it reached; "" where a proxy brought it
    is_ours: bool  # a training with the plugin, which compares weights and samples by itself
    num_bytes: int  # of the body


CALLER: ContextVar[Caller] = ContextVar("CALLER")


class Message(TypedDict):
    """A message of a request, as far as a server looks into it."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: str


class InferRequest(TypedDict, total=False):
    """A request as JSON. A class of ms-swift's or pydantic's would copy every image."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    messages: Required[Annotated[list[Message], Field(min_length=1)]]
    images: list[Any] | str | None
    videos: list[Any] | str | None
    audios: list[Any] | str | None
    data_dict: dict[str, Any] | None


@repair(
    Moment.SERVER,
    symptom="A server splits groups over replicas, waits without a bound, and takes weights "
    "that it does not verify.",
    upstream="ms-swift 4.6, pipelines/infer/rollout.py (`SwiftRolloutDeploy`) takes no "
    "routes of a plugin, and names its engine when it loads, before plugins are imported.",
    until="a plugin can give a server routes and an engine",
)
def add_routes() -> None:
    """Give `swift rollout` our engine and routes."""
    verify(pins.SERVER)
    patch(
        rollout,
        GRPOVllmEngine=engine.RolloutEngine,
        get_rollout_engine_type=get_rollout_engine_type,
    )
    patch(
        SwiftRolloutDeploy,
        infer=infer,
        get_engine_type=get_engine_type,
        get_world_size=get_world_size,
        get_model_state_keys=get_model_state_keys,
        init_communicator=init_communicator,
        close_communicator=close_communicator,
        process_weights_after_loading=process_weights_after_loading,
        _register_rl_rollout_app=_register_rl_rollout_app,
        _require_api_key=lambda self: _passed,
        **{name: _reset(name) for name in RESETS},
    )


_upstream_rollout_engine_type = rollout.get_rollout_engine_type
_upstream_engine_type = SwiftRolloutDeploy.get_engine_type
_upstream_register = SwiftRolloutDeploy._register_rl_rollout_app


def get_rollout_engine_type(args: RolloutArguments, engine: Any) -> Any:
    """Let ms-swift make a scheduler that is watched, in the process of a replica."""
    watch(args.multi_turn_scheduler, args.tool_timeout)
    return _upstream_rollout_engine_type(args, engine)


def _register_rl_rollout_app(self: SwiftRolloutDeploy) -> None:
    self.updates = Updates(self)
    self.app.router.route_class = bodies.Route
    self.app.add_exception_handler(RequestValidationError, bodies.refuse_values)
    _upstream_register(self)
    own = self.args.rollout_seed_mode == "sample"
    self.other_clients = OtherClients(self.args.seed if own else None, INSTANCE)
    self.record = None if self.args.sample_log == "none" else ServerRecord(self.args)
    self.num_updates = 0
    self.app.get(REPORTS_PATH)(partial(_weight_reports, self))
    self.app.add_middleware(Turns, server=self, key=api_key.key_of(self.args))


async def _passed() -> None:
    """`Turns` has asked for the key."""


# --- the way of a request ---


class Turns(BaseHTTPMiddleware):
    """Middleware of `server`. `key` is the API key that requests must have; None for none."""

    def __init__(self, app: ASGIApp, server: SwiftRolloutDeploy, key: str | None) -> None:
        super().__init__(app)
        self._server, self._key = server, key
        self._lock, self._lease, self._bodies = asyncio.Lock(), Lease(), bodies.Bodies()

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Answer a request under its own name (docs/promises.md, F1)."""
        # `request.url` holds the client's `Host`: only the scope's path can be trusted.
        path = request.scope["path"]
        response: Response = (
            self._refusal(request, path)
            or await self._lease.refusal(request)
            or await self._begin(request, path, call_next)
        )
        name = request.headers.get(wire.MESSAGE_HEADER)
        if name is not None:
            response.headers[wire.MESSAGE_HEADER] = name
        return response

    def _refusal(self, request: Request, path: str) -> JSONResponse | None:
        """Return the answer about health, or to a request with a fault in its head."""
        if path.rstrip("/") == "/health":
            alive = sum(process.is_alive() for process in self._server.processes)
            ready = self._server.restarts.num_ready
            if not (alive or ready):
                return _refuse(503, "no replica is left")
            health = {"status": "ok", "replicas": alive, "waiting_for_weights": ready}
            updates = self._server.updates
            return JSONResponse({**health, "weights": updates.fault or updates.state})
        authorization = request.headers.get("Authorization", "")
        if self._key is not None and not api_key.is_authorized(authorization, self._key):
            what = "the API key is not this server's" if authorization else "the API key is missing"
            detail = f"401 Unauthorized: {what}. {api_key.REMEDY}."
            return _refuse(401, detail, {"WWW-Authenticate": "Bearer"})
        instance = request.headers.get(wire.INSTANCE_HEADER, INSTANCE)
        if instance != INSTANCE and path.startswith(NEED_WEIGHTS):
            return _refuse(409, "the server was restarted, and has the base model's weights")
        bound = request.headers.get(wire.TIMEOUT_HEADER)
        try:
            is_bound = bound is None or wire.MIN_TIMEOUT <= float(bound) < math.inf
        except ValueError:
            is_bound = False
        if bound is not None and not is_bound:
            detail = (
                f"{wire.TIMEOUT_HEADER}: {bound[:60]!r}; expected a number of seconds, at least "
                f"{wire.MIN_TIMEOUT:g} (the training's --rollout_timeout)"
            )
            return _refuse(400, detail)
        return None

    async def _begin(
        self, request: Request, path: str, call_next: RequestResponseEndpoint
    ) -> Response:
        """Read the body, and return the answer; one that is slow is made while it is sent."""
        timeout = float(self._server.args.rollout_timeout)
        if self._lease.is_owners(request):  # a stranger's bound would end a busy replica
            timeout = min(timeout, float(request.headers.get(wire.TIMEOUT_HEADER, timeout)))
        try:
            await asyncio.wait_for(self._bodies.receive(request), timeout)
        except HTTPException as e:
            return _refuse(e.status_code, e.detail, e.headers)
        except asyncio.TimeoutError:
            return _refuse(408, "the body did not arrive in time")
        except ClientDisconnect:
            return _refuse(400, "the client has left")

        async def answer() -> Response:
            try:
                return await self._answer(request, path, call_next, timeout)
            finally:
                self._bodies.forget(request)

        is_slow = wire.STATUS_HEADER in request.headers
        return SlowAnswer(answer(), request, self._give_up) if is_slow else await answer()

    def _give_up(self) -> None:
        for connection in self._server.connections:
            connection.send(replicas.GIVE_UP)

    async def _answer(
        self, request: Request, path: str, call_next: RequestResponseEndpoint, timeout: float
    ) -> Response:
        """Wait for the turn, and return the whole answer that was made in it."""
        try:
            # A server answers within 2.5 timeouts: two are for replicas, the rest is the queue's.
            await asyncio.wait_for(self._turn(path), (wire.SERVER_TIMEOUTS - 2.0) * timeout)
        except asyncio.TimeoutError:
            what = "the server is busy with another request"
            if self._server.updates.is_arriving:
                what = "a weight update is under way; /process_weights_after_loading/ ends it"
            return _refuse(503, what, {"Retry-After": "1"})
        is_direct = "X-Forwarded-For" not in request.headers
        came_in_at = request.scope["server"][0] if is_direct else ""
        is_ours = wire.INSTANCE_HEADER in request.headers
        may_change, num_bytes = not self._lease.is_others(request), len(await request.body())
        CALLER.set(Caller(timeout, may_change, came_in_at, is_ours, num_bytes))
        try:
            # In a thread: it waits for processes to end.
            await asyncio.to_thread(replicas.prune, self._server)
            response = await call_next(request)
            content = b"".join([part async for part in response.body_iterator])  # type: ignore[attr-defined]
            if path.startswith("/update_") and response.status_code == 200:
                updates = self._server.updates
                updates.is_due, updates.is_arriving = True, not path.startswith(BRING_WEIGHTS)
            if path.startswith(BRING_WEIGHTS) and response.status_code == 200:
                self._server.num_updates += 1
                for connection in self._server.connections:
                    connection.holds_weights = True
        finally:
            self._lock.release()  # to the next, once this coroutine waits or ends
            self._server.restarts.start_lost()  # in the event loop's thread (see `Restarts`)
        return Response(content, response.status_code, dict(response.headers))

    async def _turn(self, path: str) -> None:
        """Wait for the turn of a request; for samples also for the end of a weight update."""
        await self._lock.acquire()
        while path.startswith("/infer") and self._server.updates.is_arriving:
            self._lock.release()
            await asyncio.sleep(SECONDS_BETWEEN_BLANKS)
            await self._lock.acquire()


class SlowAnswer(Response):
    """Begins before `answer` is made (`wire.STATUS_HEADER`). Once its client has left, `give_up`
    ends what the replicas do for it."""

    def __init__(
        self, answer: Awaitable[Response], request: Request, give_up: Callable[[], None]
    ) -> None:
        super().__init__(headers={wire.STATUS_HEADER: "in the content"})
        del self.headers["Content-Length"]
        self._answer, self._request, self._give_up = answer, request, give_up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def part(body: bytes, *, more: bool = True) -> dict[str, Any]:
            return {"type": "http.response.body", "body": body, "more_body": more}

        making = asyncio.ensure_future(self._answer)
        # Not through `receive`, which would take the body from the route.
        leaving = asyncio.ensure_future(self._request.receive())
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        while not making.done() and not leaving.done():
            await send(part(b" "))
            both = {making, leaving}
            await asyncio.wait(both, timeout=SECONDS_BETWEEN_BLANKS, return_when="FIRST_COMPLETED")
        if not making.done():
            logger.warning("A client has left in the middle of its conversations: they are ended.")
        while not making.done():  # they may have been on their way to a replica
            self._give_up()
            await asyncio.wait({making}, timeout=SECONDS_BETWEEN_BLANKS)
        leaving.cancel()
        try:
            response = await making
            content = b"%d\n%b" % (response.status_code, bytes(response.body))
        except Exception as e:  # the head says that all is well, and cannot be taken back
            logger.exception("A request has failed.")
            content = b"500\n%b" % f"{type(e).__name__}: {e}".encode()
        await send(part(content, more=False))


def _refuse(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers)


# --- what a server is ---


async def get_engine_type(self: SwiftRolloutDeploy) -> dict[str, Any]:
    # A training names the instance once it is connected. Before, it has been told how many replicas
    # there are, and makes its group of so many: none may join then.
    if CALLER.get().is_ours and CALLER.get().may_change:
        self.restarts.admit()
    replies: list[Any] = []
    try:
        # A replica that hangs is found here, and gets no weights.
        replies = await _call_all(self, _rpc("call", "read_number_bits"))
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
        "max_model_len": self.args.vllm_max_model_len or self.args.model_info.max_model_len,
        "number_bits": min((min(workers) for workers in replies if workers), default=None),
        "batches_follow_arrival": batches_follow_arrival(is_async=self.use_async_engine),
    }
    return {**await _upstream_engine_type(self), wire.KEY: ours}


async def get_world_size(self: SwiftRolloutDeploy) -> dict[str, int]:
    return {"world_size": _count_replicas(self) * self.args.vllm_tensor_parallel_size}


def _count_replicas(server: SwiftRolloutDeploy) -> int:
    """Return how many engine replicas live; one worker runs all of the async engine's."""
    if server.use_async_engine:
        return int(server.args.vllm_data_parallel_size) * len(server.connections)
    return len(server.connections)


async def get_model_state_keys(self: SwiftRolloutDeploy) -> dict[str, list[str]]:
    """Return the parameter names of the first worker that has any."""
    replies = await _call_all(self, _rpc("call", "get_state_keys"))
    keys = [workers for reply in replies for workers in reply or () if workers]
    return {"keys": keys[0] if keys else []}


# --- weights ---


async def init_communicator(
    self: SwiftRolloutDeploy, request: InitCommunicatorRequest
) -> dict[str, str]:
    caller = CALLER.get()
    host = _store_host(request.host, self.args.host, caller.came_in_at)
    timeout = wire.GROUP_TIMEOUTS * caller.timeout
    # A client that is no more may have brought weights.
    self.updates.is_due = self.updates.is_arriving = False
    if not caller.is_ours:
        await _in_thread(self.updates.begin, caller.timeout)
    for number, connection in enumerate(self.connections):
        # A replica's number among the living; ms-swift's is that of its start, which leaves a
        # hole where one has ended.
        replica = None if self.use_async_engine else number
        group = (host, request.port, request.world_size, replica, timeout)
        args = (*group, self.updates.watches)
        connection.send(_rpc("fire_and_forget", "join_group", args))
    return {"message": "The replicas are connecting."}


def _store_host(asked: str, host: str, came_in_at: str) -> str:
    """Return where the store of the weights' group listens: at `--host`, where that names one
    address, else at the one by which the training came, else at `asked`, which means all of the
    machine's. The store asks for no key, and vLLM unpickles its values. (It is IPv4 only.)"""
    if host not in ("", "0.0.0.0") and ":" not in host:
        return host
    return came_in_at if re.fullmatch(r"[0-9.]+", came_in_at) else asked


async def close_communicator(self: SwiftRolloutDeploy) -> dict[str, str]:
    # Answered once it is closed: a trainer must not reach the store of the group that was.
    await _call_all(self, _rpc("call", "close_communicator"))
    return {"message": "The group is closed."}


async def process_weights_after_loading(self: SwiftRolloutDeploy) -> dict[str, str]:
    replies = await _call_all(self, _rpc("call", "process_weights_after_loading"))
    if None in replies:
        self.updates.is_due = self.updates.is_arriving = False  # there is nothing to look at
        self.updates.fault = "A replica could not load its weights; this server's log tells why."
        raise HTTPException(status_code=500, detail=self.updates.fault)
    await _require_sound(self)
    return {"message": "The weights are loaded."}


async def _require_sound(server: SwiftRolloutDeploy) -> None:
    """Look at weights that have come; refuse them to a client that does not compare them itself."""
    is_ours, updates = CALLER.get().is_ours, server.updates
    if updates.is_due:
        await _in_thread(partial(updates.look, reads=not is_ours), CALLER.get().timeout)
    if updates.fault and not is_ours and server.args.rollout_mismatch == "stop":
        raise HTTPException(status_code=409, detail=updates.fault)


async def _weight_reports(server: SwiftRolloutDeploy) -> list[dict[str, Any]]:
    """Return the report of each worker of each replica (`WeightReport`). A replica that refused an
    adapter gets no more requests: the adapter came after the answer to its request."""
    replies = await _call_all(server, _rpc("call", "read_weight_report"))
    for connection, workers in zip(server.connections, replies, strict=True):
        if any(report["adapter_fault"] for report in workers or ()):
            connection.holds_weights = False
    return [report for workers in replies for report in workers or [{}]]


def _reset(name: str) -> Callable[..., Any]:
    async def reset(self: SwiftRolloutDeploy) -> dict[str, str]:
        await _call_all(self, {"type": "call", "method": name})
        if self.updates.is_due:  # clients do this behind every update, and once before all
            await _require_sound(self)
        return {"message": f"{name} is done."}

    return reset


def _rpc(kind: str, method: str, args: tuple[Any, ...] = ()) -> dict[str, Any]:
    kwargs = {"method": method, "args": args}
    return {"type": kind, "method": "collective_rpc", "kwargs": kwargs}


async def _call_all(server: SwiftRolloutDeploy, command: replicas.Command) -> list[Any]:
    return await _in_thread(partial(replicas.call_all, server, command), CALLER.get().timeout)


async def _in_thread(ask: Callable[[float], Any], timeout: float) -> Any:
    try:
        return await asyncio.to_thread(ask, timeout)
    except NoWorkerError as e:
        raise HTTPException(status_code=503, detail=str(e)) from e


# --- rollouts ---


async def infer(
    self: SwiftRolloutDeploy,
    infer_requests: Annotated[list[InferRequest], FailFast()],
    request_config: RequestConfig | None = None,
    *,
    use_tqdm: bool | None = None,
) -> Any:
    await _require_sound(self)
    return await asyncio.to_thread(_infer, self, infer_requests, request_config)


def _infer(
    server: SwiftRolloutDeploy, requests: list[InferRequest], config: RequestConfig | None
) -> list[Any]:
    """Return the outputs of requests: groups over replicas by cost, others in contiguous slices (a
    server's scheduler may make several outputs of one request)."""
    timeout = CALLER.get().timeout
    try:
        sent = [wire.read_metadata(request.get("data_dict")) for request in requests]
        for number, request in enumerate(requests):
            try:
                check_media(request)
            except ValueError as e:
                raise ValueError(f"infer_requests[{number}].{e}") from e
        # After all checks: a call that is refused is none.
        others = [r for r, metadata in zip(requests, sent, strict=True) if metadata is None]
        made = iter(server.other_clients.name(others, config) if others else ())
        metadatas = [metadata or next(made) for metadata in sent]
        num_updates = server.num_updates

        def noted(outputs: list[RolloutOutput]) -> list[RolloutOutput]:
            if server.record is not None:
                server.record.note(
                    *(requests, metadatas, outputs, config),
                    num_updates=num_updates,
                    num_bytes=CALLER.get().num_bytes,
                )
            return outputs

        if all(metadata.as_arrays for metadata in metadatas):
            max_tokens = (config and config.max_tokens) or 0
            costs = [
                estimate_cost(request, metadata.count, max_tokens)
                for request, metadata in zip(requests, metadatas, strict=True)
            ]
            outputs = noted(replicas.infer_groups(server, requests, config, costs, timeout))
            # Plain values, which FastAPI need not look into any further.
            return [
                {"response": asdict(output.response), "rollout_infos": output.rollout_infos}
                for output in outputs
            ]
        # Another client's, or conversations: ms-swift's own slices, with no count of outputs.
        parts = np.array_split(np.arange(len(requests)), max(len(server.connections), 1))
        slices = [[requests[i] for i in part] for part in parts if len(part)]
        answers = replicas.infer_slices(server, slices, config, timeout)
        outputs = noted([output for outputs in answers for output in outputs])
        if others:  # what only we read
            for output in outputs:
                output.rollout_infos.pop(conversation.KEY, None)
        return outputs
    except (ValueError, RequestError) as e:
        raise HTTPException(status_code=400, detail=str(e)) from e
    except NoWorkerError as e:
        status = 500 if server.connections else 503
        raise HTTPException(status_code=status, detail=str(e)) from e
