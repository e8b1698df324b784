"""`swift rollout` with the plugin: how a request gets its answer, and what each route does."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ConfigDict, FailFast, Field
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from swift.arguments import RolloutArguments
from swift.infer_engine.protocol import RequestConfig, RolloutOutput
from swift.pipelines.infer import rollout
from swift.pipelines.infer.rollout import InitCommunicatorRequest, SwiftRolloutDeploy
from typing_extensions import Required, TypedDict

from swift_grpo_ext.media.paths import check_media
from swift_grpo_ext.rollout import conversation, engine, wire
from swift_grpo_ext.rollout.dispatch import NoWorkerError, RequestError, WorkerError, estimate_cost
from swift_grpo_ext.rollout.scheduler import watch
from swift_grpo_ext.server import api_key, bodies, lease, replicas
from swift_grpo_ext.server.other_clients import OtherClients, Updates
from swift_grpo_ext.server.record import ServerRecord
from swift_grpo_ext.server.replicas import ReplicaConnection, rpc
from swift_grpo_ext.timing.stalls import StallReports
from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import verify
from swift_grpo_ext.upstream.determinism import batches_follow_arrival
from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair

REPORTS_PATH = "/swift_grpo_ext/weight_reports/"
INSTANCE = uuid.uuid4().hex  # names this start of the server
SECONDS_BETWEEN_BLANKS = 0.25

# Prefixes of routes that need weights or their group, and of routes that complete weights.
NEED_WEIGHTS = ("/infer", "/update_", "/process_weights_after_loading")
BRING_WEIGHTS = ("/process_weights_after_loading", "/update_adapter")

Handler = Callable[[Request], Awaitable[Response]]  # FastAPI's, of one route


class InferMessage(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    role: str


class InferRequest(TypedDict, total=False):
    """A request as JSON. A class of ms-swift's or pydantic's would copy every image."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    messages: Required[Annotated[list[InferMessage], Field(min_length=1)]]
    images: list[Any] | str | None
    videos: list[Any] | str | None
    audios: list[Any] | str | None
    data_dict: dict[str, Any] | None


@repair(PatchPhase.SERVER)
def add_routes() -> None:
    """Symptom: a server splits groups over replicas, waits without a bound, takes a late answer of
    a replica for the next one's, and takes weights that it does not verify.
    Upstream: ms-swift 4.6, pipelines/infer/rollout.py (`SwiftRolloutDeploy`) takes no routes of a
    plugin, numbers no messages, and names its engine before plugins are imported. Can go when a
    plugin can give a server routes and an engine.
    """
    verify(pins.SERVER)
    patch(rollout, GRPOVllmEngine=engine.RolloutEngine)
    patch(rollout, get_rollout_engine_type=get_rollout_engine_type)
    patch(
        SwiftRolloutDeploy,
        health=health,
        infer=infer,
        get_engine_type=get_engine_type,
        get_world_size=get_world_size,
        get_model_state_keys=get_model_state_keys,
        init_communicator=init_communicator,
        close_communicator=close_communicator,
        process_weights_after_loading=process_weights_after_loading,
        _register_rl_rollout_app=_register_rl_rollout_app,
        _start_data_parallel_workers=replicas.start_replicas,
        _require_api_key=lambda self: lambda: None,  # `Turns` checks the key
        reset_prefix_cache=_reset("reset_prefix_cache"),
        reset_encoder_cache=_reset("reset_encoder_cache"),
        reset_mm_cache=_reset("reset_mm_cache"),
    )


_upstream_rollout_engine_type = rollout.get_rollout_engine_type
_upstream_engine_type = SwiftRolloutDeploy.get_engine_type
_upstream_register = SwiftRolloutDeploy._register_rl_rollout_app


def get_rollout_engine_type(args: RolloutArguments, engine: Any) -> Any:
    """Watch the scheduler that ms-swift makes in the process of a replica."""
    watch(args.multi_turn_scheduler, args.tool_timeout)
    return _upstream_rollout_engine_type(args, engine)


def _register_rl_rollout_app(self: SwiftRolloutDeploy) -> None:
    self.updates, self.num_updates = Updates(self.args.watches_weights), 0
    self.other_clients = OtherClients(gives_seeds=self.args.rollout_seed_mode == "sample")
    self.record = None if self.args.sample_log == "none" else ServerRecord(self.args)
    self.app.state.turns = turns = Turns(self, api_key.key_of(self.args))
    self.app.router.routes.clear()  # FastAPI's pages need no key
    self.app.router.route_class = Route
    _upstream_register(self)
    self.app.get(REPORTS_PATH)(partial(_weight_reports, self))
    self.app.api_route(lease.PATH, methods=["POST", "DELETE"])(turns.owner)
    StallReports().__enter__()  # until the process ends


class Route(APIRoute):
    """A route that answers through the `Turns` of its server."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def respond(request: Request) -> Response:
            """Answer a request under its own name (docs/promises.md, F1)."""
            turns: Turns = request.app.state.turns
            response = await turns.answer_or_refuse(turns.respond(request, handle))
            name = request.headers.get(wire.MESSAGE_HEADER)
            if name is not None:
                response.headers[wire.MESSAGE_HEADER] = name
            return response

        return respond


class Turns:
    """Answers the requests to `server` one after another. `key` is the API key that they must have;
    None if they need none."""

    def __init__(self, server: SwiftRolloutDeploy, key: str | None) -> None:
        self._server, self._key = server, key
        # Requests take turns, since they share the pipes to the replicas (docs/promises.md, F2).
        self._lock, self._lease, self._bodies = asyncio.Lock(), lease.Lease(), bodies.Bodies()

    async def owner(self) -> dict[str, str]:
        return {"owner": self._lease.owner}

    async def answer_or_refuse(self, answer: Awaitable[Response]) -> Response:
        try:
            return await answer
        except RequestValidationError as e:
            return bodies.refusal(e)
        except HTTPException as e:
            return JSONResponse({"detail": e.detail}, e.status_code, e.headers)
        except (RequestError, wire.WireError) as e:
            return JSONResponse({"detail": str(e)}, 400)
        except NoWorkerError as e:
            return JSONResponse({"detail": str(e)}, 500 if self._server.connections else 503)

    async def respond(self, request: Request, handle: Handler) -> Response:
        """Read the body, and return the answer; a slow answer is made while it is sent."""
        # The body is read before the turn, and the answer is sent after the turn: no client can
        # hold up another.
        # `request.url` holds the client's `Host`: only the scope's path can be trusted.
        path = request.scope["path"]
        # Without key and turn: a busy server is healthy, too.
        if path.startswith("/health"):
            return await handle(request)
        self._check_head(request, path)
        await self._lease.check(request)
        if path == lease.PATH:
            return await handle(request)
        timeout = float(self._server.args.rollout_timeout)
        try:
            bound = float(request.headers.get(wire.TIMEOUT_HEADER, timeout))
        except ValueError as e:
            raise HTTPException(400, f"{wire.TIMEOUT_HEADER}: {e}; expected seconds") from e
        if lease.OWNER_HEADER in request.headers:  # another client's bound could end a busy replica
            timeout = min(timeout, max(wire.MIN_TIMEOUT, bound))
        try:
            body = await asyncio.wait_for(self._bodies.receive(request), timeout)
        except asyncio.TimeoutError as e:
            raise HTTPException(408, "the body did not arrive in time") from e
        except ClientDisconnect as e:
            raise HTTPException(400, "the client has left") from e

        async def answer() -> Response:
            try:
                return await self.answer_or_refuse(self._answer(request, handle, timeout))
            finally:
                self._bodies.forget(body)

        if wire.STATUS_HEADER not in request.headers:
            return await answer()
        return self._answer_slowly(asyncio.ensure_future(answer()))

    def _check_head(self, request: Request, path: str) -> None:
        """Refuse a request with a fault in its headers."""
        authorization = request.headers.get("Authorization", "")
        if self._key is not None and not api_key.is_authorized(authorization, self._key):
            wrong, missing = "the API key is not this server's", "the API key is missing"
            fault = wrong if authorization else missing
            detail = f"401 Unauthorized: {fault}. {api_key.REMEDY}."
            raise HTTPException(401, detail, {"WWW-Authenticate": "Bearer"})
        instance = request.headers.get(wire.INSTANCE_HEADER, INSTANCE)
        if instance != INSTANCE and path.startswith(NEED_WEIGHTS):
            raise HTTPException(409, "the server was restarted, and has the base model's weights")

    def _answer_slowly(self, making: asyncio.Future[Response]) -> StreamingResponse:
        """Return a response that begins before the answer is made (`wire.STATUS_HEADER`)."""

        async def content() -> AsyncIterator[bytes]:
            while not making.done():
                # Each blank starts the client's wait for bytes again.
                yield b" "
                await asyncio.wait([making], timeout=SECONDS_BETWEEN_BLANKS)
            response = making.result()
            yield b"%d\n%b" % (response.status_code, bytes(response.body))

        async def give_up() -> None:
            """Once the client has left, end its conversations in the replicas."""
            while not making.done():  # repeated: requests may be on their way to a replica
                for connection in self._server.connections:
                    connection.send(replicas.GIVE_UP)
                await asyncio.wait([making], timeout=SECONDS_BETWEEN_BLANKS)

        headers = {wire.STATUS_HEADER: "in the content"}
        return StreamingResponse(content(), headers=headers, background=BackgroundTask(give_up))

    async def _answer(self, request: Request, handle: Handler, timeout: float) -> Response:
        """Wait for the turn, and return the answer that was made in it."""
        path, server, updates = request.scope["path"], self._server, self._server.updates
        try:
            # A server answers within 2.5 timeouts: replicas have two, the queue has the rest.
            await asyncio.wait_for(self._turn(path), (wire.SERVER_TIMEOUTS - 2.0) * timeout)
        except asyncio.TimeoutError as e:
            cause = "the server is busy with another request"
            if updates.is_arriving:
                cause = "a weight update is under way; /process_weights_after_loading/ ends it"
            raise HTTPException(503, cause, {"Retry-After": "1"}) from e
        server.timeout = timeout  # seconds that a replica has for each call of this turn
        # A training with the plugin compares weights and samples itself.
        server.is_used_by_plugin = wire.INSTANCE_HEADER in request.headers
        # The address at which the client reached this machine; behind a proxy, the server's own.
        is_forwarded = "X-Forwarded-For" in request.headers
        server.address = server.args.host if is_forwarded else request.scope["server"][0]
        try:
            # In a thread: it waits for processes to end.
            await asyncio.to_thread(replicas.prune, server)
            # A training names the instance once it is connected. Before that, it makes a group for
            # the replicas that it has counted, so none may join.
            may_admit = server.is_used_by_plugin and not self._lease.is_of_another(request)
            if path.startswith("/get_engine_type") and may_admit:
                server.restarts.admit()
            with suppress(Exception):  # FastAPI parses a faulty body once more, and refuses it
                request._json = await asyncio.to_thread(bodies.parse, await request.body())
            response = await handle(request)
            if path.startswith("/update_"):
                updates.is_due, updates.is_arriving = True, not path.startswith(BRING_WEIGHTS)
            if path.startswith(BRING_WEIGHTS):
                server.num_updates += 1
                for connection in server.connections:
                    connection.holds_weights = True
        finally:
            self._lock.release()  # the next request goes on once this coroutine waits or ends
            server.restarts.start_lost()  # in the event loop's thread (see `Restarts`)
        return response

    async def _turn(self, path: str) -> None:
        """Wait for the turn of a request, and for samples until no weights are arriving."""
        await self._lock.acquire()
        while path.startswith("/infer") and self._server.updates.is_arriving:
            self._lock.release()
            await asyncio.sleep(SECONDS_BETWEEN_BLANKS)
            await self._lock.acquire()


async def health(self: SwiftRolloutDeploy) -> dict[str, Any]:
    alive = sum(connection.process.is_alive() for connection in self.connections)
    ready = self.restarts.num_ready
    if not (alive or ready):
        raise HTTPException(503, "no replica is left")
    weights = self.updates.fault or self.updates.state
    return {"status": "ok", "replicas": alive, "waiting_for_weights": ready, "weights": weights}


async def get_engine_type(self: SwiftRolloutDeploy) -> dict[str, Any]:
    replies: list[Any] = []
    try:
        # A replica that hangs is found here, and gets no weights.
        replies = await _call_all(self, rpc("read_number_bits"))
    except NoWorkerError:
        if not self.restarts.num_awaited:
            raise
    about_plugin = {
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
    return {**await _upstream_engine_type(self), wire.KEY: about_plugin}


async def get_world_size(self: SwiftRolloutDeploy) -> dict[str, int]:
    return {"world_size": _count_replicas(self) * self.args.vllm_tensor_parallel_size}


def _count_replicas(server: SwiftRolloutDeploy) -> int:
    # One worker runs all replicas of the async engine.
    size = int(server.args.vllm_data_parallel_size) if server.use_async_engine else 1
    return size * len(server.connections)


async def get_model_state_keys(self: SwiftRolloutDeploy) -> dict[str, list[str]]:
    """Return the parameter names of the first worker that has any."""
    replies = await _call_all(self, rpc("get_state_keys"))
    return {"keys": next((keys for reply in replies for keys in reply or () if keys), [])}


async def init_communicator(
    self: SwiftRolloutDeploy, request: InitCommunicatorRequest
) -> dict[str, str]:
    # The store of the weights' group needs no key, and vLLM unpickles its values. So it listens at
    # one address: at this one if it is IPv4 (the store knows no other), else at the client's.
    host = self.address if re.fullmatch(r"[0-9.]+", self.address) else request.host
    timeout = wire.GROUP_TIMEOUTS * self.timeout
    # A client that has ended may have left an update unfinished.
    self.updates.is_due = self.updates.is_arriving = False
    for number, connection in enumerate(self.connections):
        # The number among living replicas: ms-swift's numbers have gaps where replicas have ended.
        replica = None if self.use_async_engine else number
        args = (host, request.port, request.world_size, replica, timeout, self.updates.watches)
        connection.send(rpc("join_group", args, kind="fire_and_forget"))
    return {"message": "The replicas are connecting."}


async def close_communicator(self: SwiftRolloutDeploy) -> dict[str, str]:
    # The answer comes after the end: a trainer must not reach the store of the old group.
    await _call_all(self, rpc("close_communicator"))
    return {"message": "The group is closed."}


async def process_weights_after_loading(self: SwiftRolloutDeploy) -> dict[str, str]:
    replies = await _call_all(self, rpc("process_weights_after_loading"))
    if None in replies:
        self.updates.is_due = self.updates.is_arriving = False  # there are no weights to check
        self.updates.fault = "A replica could not load its weights; this server's log tells why."
        raise HTTPException(500, self.updates.fault)
    await _require_sound(self)
    return {"message": "The weights are loaded."}


async def _require_sound(server: SwiftRolloutDeploy) -> None:
    """Check weights that have arrived; raise 409 if they are faulty."""
    updates = server.updates
    if updates.is_due:
        updates.is_due = updates.is_arriving = False
        if updates.watches:
            replies = await _call_all(server, rpc("read_weight_report"))
            updates.check_reports(server.connections, replies)
    # A training with the plugin compares weights itself: its faults are only logged and shown.
    may_stop = server.args.rollout_mismatch == "stop" and not server.is_used_by_plugin
    if updates.fault and may_stop:
        raise HTTPException(409, updates.fault)


async def _weight_reports(server: SwiftRolloutDeploy) -> list[dict[str, Any]]:
    """Return the report of each worker of each replica (`WeightReport`)."""
    replies = await _call_all(server, rpc("read_weight_report"))
    # A replica that refused an adapter has other weights: it gets no more requests.
    for connection, workers in zip(server.connections, replies, strict=True):
        if any(report["adapter_fault"] for report in workers or ()):
            connection.holds_weights = False
    return [report for workers in replies for report in workers or [{}]]


def _reset(name: str) -> Callable[..., Any]:
    async def reset(self: SwiftRolloutDeploy) -> dict[str, str]:
        await _call_all(self, {"type": "call", "method": name})
        if self.updates.is_due:  # clients reset after every update, and once before
            await _require_sound(self)
        return {"message": f"{name} is done."}

    return reset


async def _call_all(server: SwiftRolloutDeploy, command: replicas.Command) -> list[Any]:
    return await asyncio.to_thread(replicas.call_all, server, command)


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
    """Return the outputs of requests, in order."""
    metadatas: list[Any] = [wire.read_metadata(request.get("data_dict")) for request in requests]
    for number, request in enumerate(requests):
        try:
            check_media(request)
        except ValueError as e:
            raise RequestError(f"infer_requests[{number}].{e}") from e
    is_from_plugin = None not in metadatas
    if not is_from_plugin:  # after all checks: a refused call is not counted
        metadatas = server.other_clients.name(requests, config)
    # A request for arrays is a whole group: replicas get groups by their costs.
    as_arrays = all(metadata.as_arrays for metadata in metadatas)
    if as_arrays:
        max_tokens = (config and config.max_tokens) or 0
        pairs = zip(requests, metadatas, strict=True)
        costs = [estimate_cost(request, m.count, max_tokens) for request, m in pairs]
    else:  # a scheduler may make several outputs of a request
        num_slices = max(len(server.connections), 1)
        slices = [part for part in rollout.chunk_list(requests, num_slices) if part]
        costs = [float(len(part)) for part in slices]

    def send(replica: ReplicaConnection, share: list[int]) -> list[list[RolloutOutput]]:
        generate = partial(replicas.generate, server, config, replica)
        if not as_arrays:
            return [generate(slices[i]) for i in share]
        made = generate([requests[i] for i in share])
        if len(made) != len(share):
            raise WorkerError(f"a replica gave {len(made)} answers to {len(share)} requests")
        return [[output] for output in made]

    outputs = [output for made in replicas.spread(server, costs, send) for output in made]
    if server.record is not None:
        server.record.add(requests, metadatas, outputs, config, server.num_updates)
    if as_arrays:  # plain values, which FastAPI need not convert
        return [{"response": asdict(o.response), "rollout_infos": o.rollout_infos} for o in outputs]
    if not is_from_plugin:  # other clients do not read turns
        for output in outputs:
            output.rollout_infos.pop(conversation.KEY, None)
    return outputs
