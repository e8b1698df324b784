"""The way of an HTTP request into a rollout server and back (docs/promises.md, F2).

Requests take turns, since they share the pipes to the replicas. A request's body is read before its
turn, within a time, and its answer is sent after it: no client can hold up another. `/health`
answers at once, whoever asks.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp
from swift.pipelines.infer.rollout import SwiftRolloutDeploy

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.server import replicas
from swift_grpo_ext.server.api_key import REMEDY, is_authorized
from swift_grpo_ext.server.lease import Lease

NEED_WEIGHTS = ("/infer", "/update_", "/process_weights_after_loading")
"""Beginnings of the routes that rest on weights, or on the group that brings them."""

BRING_WEIGHTS = ("/process_weights_after_loading", "/update_adapter")
"""Beginnings of the routes after which replicas hold a trainer's weights."""


@dataclass(frozen=True)
class Caller:
    """Who waits for an answer."""

    timeout: float
    """Seconds that a replica has for each call."""

    came_in_at: str = ""
    """This machine's address that the request reached; "" where a proxy brought it."""


CALLER: ContextVar[Caller] = ContextVar("CALLER")


class Turns(BaseHTTPMiddleware):
    """Middleware of `server`.

    Args:
        key: the API key that requests must have; None for none.
        instance: names this start of the server.
    """

    def __init__(
        self, app: ASGIApp, server: SwiftRolloutDeploy, key: str | None, instance: str
    ) -> None:
        super().__init__(app)
        self._server, self._key, self._instance = server, key, instance
        self._lock, self._lease = asyncio.Lock(), Lease()

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Answer a request under its own name (docs/promises.md, F1)."""
        # `request.url` holds the client's `Host`: only the scope's path can be trusted.
        path = request.scope["path"]
        if path.rstrip("/") == "/health":
            response: Response = self._health()
        else:
            response = (
                self._refusal(request, path)
                or await self._lease.refusal(request)
                or await self._answer(request, path, call_next)
            )
        name = request.headers.get(wire.MESSAGE_HEADER)
        if name is not None:
            response.headers[wire.MESSAGE_HEADER] = name
        return response

    def _health(self) -> JSONResponse:
        alive = sum(process.is_alive() for process in self._server.processes)
        ready = self._server.restarts.num_ready
        if not (alive or ready):
            return _refuse(503, "no replica is left")
        return JSONResponse({"status": "ok", "replicas": alive, "waiting_for_weights": ready})

    def _refusal(self, request: Request, path: str) -> JSONResponse | None:
        """Return the answer to a request without the key or the weights that it needs."""
        authorization = request.headers.get("Authorization", "")
        if self._key is not None and not is_authorized(authorization, self._key):
            what = "the API key is not this server's" if authorization else "the API key is missing"
            detail = f"401 Unauthorized: {what}. {REMEDY}."
            return _refuse(401, detail, {"WWW-Authenticate": "Bearer"})
        instance = request.headers.get(wire.INSTANCE_HEADER, self._instance)
        if instance != self._instance and path.startswith(NEED_WEIGHTS):
            return _refuse(409, "the server was started anew, and has the base model's weights")
        return None

    async def _answer(
        self, request: Request, path: str, call_next: RequestResponseEndpoint
    ) -> Response:
        """Read the body, wait for the turn, and return the whole answer that was made in it."""
        timeout = float(self._server.args.rollout_timeout)
        timeout = min(timeout, float(request.headers.get(wire.TIMEOUT_HEADER, timeout)))
        try:
            await asyncio.wait_for(request.body(), timeout)
        except asyncio.TimeoutError:
            return _refuse(408, "the body did not arrive in time")
        except ClientDisconnect:
            return _refuse(400, "the client has left")
        try:
            # A server answers within 2.5 timeouts: two are for replicas, the rest is the queue's.
            await asyncio.wait_for(self._lock.acquire(), (wire.SERVER_TIMEOUTS - 2.0) * timeout)
        except asyncio.TimeoutError:
            return _refuse(503, "the server is busy with another request", {"Retry-After": "1"})
        is_direct = "X-Forwarded-For" not in request.headers
        address = (request.scope.get("server") or ("",))[0]
        CALLER.set(Caller(timeout, address if is_direct else ""))
        try:
            await asyncio.to_thread(replicas.prune, self._server)
            response = await call_next(request)
            content = b"".join([part async for part in response.body_iterator])  # type: ignore[attr-defined]
            if path.startswith(BRING_WEIGHTS) and response.status_code == 200:
                replicas.note_weights(self._server)
        finally:
            self._server.restarts.start_lost()
            self._lock.release()
        return Response(content, response.status_code, dict(response.headers))


def _refuse(status: int, detail: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"detail": detail}, status, headers)
