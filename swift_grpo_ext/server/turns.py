"""The order of a rollout server's HTTP requests (SPEC F2).

Requests take turns, since they share the pipes to the replicas. A request's body is read before its
turn, within a time, and its answer is sent after it: no client can hold up another. `/health`
answers at once. A request whose client has left gives its place up; what a replica has begun, it
ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.server import replicas
from swift_grpo_ext.server.claims import Claims

NEED_WEIGHTS = ("/infer", "/update_", "/process_weights_after_loading")
"""Beginnings of the routes that rest on weights, or on the group that brings them."""

BRING_WEIGHTS = ("/process_weights_after_loading", "/update_adapter")
"""Beginnings of the routes after which replicas hold a trainer's weights."""

SECONDS_BETWEEN_PARTS = 30.0
"""Of a body: a client that is silent for longer has stalled."""


@dataclass(frozen=True)
class Caller:
    """Who waits for an answer."""

    timeout: float
    """Seconds that a replica has for each call."""

    came_in_at: str = ""
    """This machine's address that the request reached; "" where a proxy brought it."""

    is_gone: threading.Event = field(default_factory=threading.Event)
    """Set once the client has left."""


CALLER: ContextVar[Caller] = ContextVar("CALLER")


class ClientLeftError(Exception):
    """The client has closed its connection."""


class Turns:
    """ASGI middleware of `server`, ms-swift's `SwiftRolloutDeploy`.

    Args:
        check_key: raises `HTTPException` for a request without the server's API key.
        instance: names this start of the server.
    """

    def __init__(
        self, app: Any, server: Any, check_key: Callable[[Request], Awaitable[None]], instance: str
    ) -> None:
        self._app, self._server = app, server
        self._check_key, self._instance = check_key, instance
        self._lock, self._claims = asyncio.Lock(), Claims()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            refusal = await self._refusal(Request(scope))
            if refusal is not None:
                await refusal(scope, receive, send)
                return
            for message in await self._answer(scope, receive):
                await send(_named(message, Request(scope)))
        except ClientLeftError:
            pass

    async def _refusal(self, request: Request) -> JSONResponse | None:
        """The answer to a request that gets no turn. `request.url` holds the client's `Host`, so
        that only the scope's path can be trusted."""
        path = request.scope["path"]
        if path.rstrip("/") == "/health":
            alive = sum(p.is_alive() for p in self._server.processes)
            ready = self._server.restarts.num_ready
            if alive or ready:
                return JSONResponse(
                    {"status": "ok", "replicas": alive, "waiting_for_weights": ready}
                )
            return _refuse(503, "no replica is left")
        try:
            await self._check_key(request)
        except HTTPException as e:
            return JSONResponse({"detail": e.detail}, e.status_code, e.headers)
        refusal = await self._claims.refusal(request)
        if refusal is not None:
            return refusal
        instance = request.headers.get(wire.INSTANCE_HEADER, self._instance)
        if instance != self._instance and path.startswith(NEED_WEIGHTS):
            return _refuse(409, "the server was started anew, and has the base model's weights")
        try:
            self._timeout(request)
        except ValueError as e:
            return _refuse(400, str(e))
        return None

    def _timeout(self, request: Request) -> float:
        own = float(self._server.args.rollout_timeout)
        asked = request.headers.get(wire.TIMEOUT_HEADER, f"{own}")
        try:
            seconds = float(asked)
        except ValueError:
            seconds = 0.0
        if not seconds > 0:
            raise ValueError(f"{wire.TIMEOUT_HEADER}: {asked!r}; expected seconds above 0")
        return min(own, seconds)

    async def _answer(self, scope: Any, receive: Any) -> list[Any]:
        """The messages of the answer, made in this request's turn."""
        request = Request(scope)
        is_direct = "X-Forwarded-For" not in request.headers
        address = (scope.get("server") or ("",))[0] if is_direct else ""
        caller = Caller(self._timeout(request), address)
        body = await _read_body(receive, caller.timeout)
        if body is None:
            return await _messages_of(_refuse(408, "the body did not arrive in time"), scope)
        CALLER.set(caller)
        messages: list[Any] = []
        work = asyncio.create_task(self._take_turn(scope, body, messages, caller))
        leaving = asyncio.create_task(_wait_for_leaving(receive))
        try:
            await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                caller.is_gone.set()
        finally:
            leaving.cancel()
        await work
        if caller.is_gone.is_set():
            raise ClientLeftError
        return messages

    async def _take_turn(
        self, scope: Any, body: bytes, messages: list[Any], caller: Caller
    ) -> None:
        if not await self._wait_for_turn(caller):
            busy = _refuse(503, "the server is busy with another request", {"Retry-After": "1"})
            messages += await _messages_of(busy, scope)
            return
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def collect(message: Any) -> None:
            messages.append(message)

        try:
            await asyncio.to_thread(replicas.prune, self._server)
            await self._app(scope, receive, collect)
            if scope["path"].startswith(BRING_WEIGHTS) and messages[0]["status"] == 200:
                replicas.note_weights(self._server)
        finally:
            self._server.restarts.start_lost()
            self._lock.release()

    async def _wait_for_turn(self, caller: Caller) -> bool:
        """Whether the turn has come, within half a timeout and while the client is there."""
        waiting = asyncio.create_task(self._lock.acquire())
        left = asyncio.create_task(_is_set(caller.is_gone))
        share = wire.SERVER_TIMEOUTS - 2.0
        await asyncio.wait(
            {waiting, left},
            timeout=share * caller.timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        left.cancel()
        if waiting.done():
            return True
        waiting.cancel()
        await asyncio.wait({waiting})
        if not waiting.cancelled():  # it came at the last moment
            self._lock.release()
        return False


async def _is_set(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.05)


async def _read_body(receive: Any, timeout: float) -> bytes | None:
    """A request's body; None where it does not arrive in time."""
    try:
        return await asyncio.wait_for(_read_parts(receive), timeout)
    except asyncio.TimeoutError:
        return None


async def _read_parts(receive: Any) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await asyncio.wait_for(receive(), SECONDS_BETWEEN_PARTS)
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _wait_for_leaving(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _messages_of(response: JSONResponse, scope: Any) -> list[Any]:
    messages: list[Any] = []

    async def collect(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    await response(scope, receive, collect)
    return messages


def _named(message: Any, request: Request) -> Any:
    """A message of the answer to `request`, under the request's own name (SPEC F1)."""
    name = request.headers.get(wire.MESSAGE_HEADER)
    if message["type"] != "http.response.start" or name is None:
        return message
    header = (wire.MESSAGE_HEADER.lower().encode(), name.encode("latin-1"))
    return {**message, "headers": [*message.get("headers", ()), header]}


def _refuse(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers)
