"""Bodies of requests: bounded in size, and read so that `/health` answers meanwhile (F2).

Symptom: a body of 400 MB, which is one round's images, holds `swift rollout`'s event loop for a
second and more. A larger one takes the memory of the machine, whoever sends it.
Upstream: FastAPI parses JSON in the event loop (starlette 1.10, requests.py, `json`), in one call
that lets no other thread run; neither knows a limit. A refusal of pydantic's holds the whole value
that it refuses, and as many of them as a request has rows.
Can go when FastAPI bounds bodies, and parses them in steps elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import Callable, Coroutine
from json.decoder import JSONArray, scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

from fastapi import HTTPException, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.responses import Response

from swift_grpo_ext.server import memory

# A body is in memory up to 6 times on its way to a replica: bytes, text, values, and pickled.
MAX_BYTES = memory.total_bytes() // 8
"""Bytes of one body, and of all bodies together whose requests are not answered."""

LONG = 2**16
"""Characters of a string that is worth a search of its own."""

LARGE = 2**24
"""Bytes of a body that takes json's decoder in C more than a tenth of a second, at 100 MB/s. The
one in Python takes 4 times as long for 10,000 rows of text, and less for images."""


class Bodies:
    """The bodies of a server's requests, from their arrival to the answer."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def receive(self, request: Request) -> None:
        """Read the body into the request, which hands it on; `forget` takes it away.

        Raises:
            HTTPException: 413 where it is too large, 503 where others leave it no room. All of it
                has been read: a client that is cut off while it sends would not read the answer.
        """
        parts: list[bytes] = []
        size, fits = 0, True
        try:
            async for part in request.stream():
                size += len(part)
                fits = fits and self._num_bytes + len(part) <= MAX_BYTES
                if fits:
                    parts.append(part)
                    self._num_bytes += len(part)
                else:
                    self._drop(parts)
            limit = f"expected at most {MAX_BYTES:,}, an eighth of the server's memory"
            advice = "Draw fewer samples in a round, shrink their images or videos, or add servers."
            if size > MAX_BYTES:
                raise HTTPException(413, f"a body of {size:,} bytes; {limit}. {advice}")
            if not fits:
                text = f"a body of {size:,} bytes beside those of other requests; {limit}, together"
                raise HTTPException(503, f"{text}. {advice}", {"Retry-After": "1"})
            request._body = await asyncio.to_thread(b"".join, parts)
        except BaseException:  # such as the end of the time for it
            self._drop(parts)
            raise

    def _drop(self, parts: list[bytes]) -> None:
        self._num_bytes -= sum(map(len, parts))
        parts.clear()

    def forget(self, request: Request) -> None:
        """Take the body from a request that is answered: its client may be slow to read."""
        self._drop([request._body])
        request._body = b""


class _StepwiseDecoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.parse_string, self.parse_array = _parse_string, _parse_array
        # json's own is C's, which reads a whole body in one call and asks neither of the two.
        self.scan_once = py_make_scanner(self)


_scan_at_once = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _parse_string(text: str, start: int, strict: bool) -> tuple[str, int]:
    end = text.find('"', start)
    # 10 times as fast as a look at each character, and in calls of their own.
    if end - start < LONG or text.find("\\", start, end) >= 0:
        return scanstring(text, start, strict)
    return text[start:end], end + 1


def _parse_array(at: tuple[str, int], scan: Callable[..., Any]) -> tuple[list[Any], int]:
    text, start = at
    if text[start : start + 1] in set("-0123456789"):  # numbers of tokens, by the thousand
        return _scan_at_once(text, start - 1)
    return JSONArray(at, scan)


def parse(body: bytes) -> Any:
    """Return what `json.loads` returns. Other threads run between the steps of a large body: no
    call of C's reads more than one string, or one list of numbers."""
    if len(body) < LARGE:
        return json.loads(body)
    return _StepwiseDecoder().decode(body.decode(json.detect_encoding(body), "surrogatepass"))


class _ParsedRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await asyncio.to_thread(parse, await self.body())
        return self._json


class Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            return await handle(_ParsedRequest(request.scope, request.receive))

        return handle_parsed


async def refuse_values(_: Request, error: Exception) -> JSONResponse:
    """Return FastAPI's own answer to a request of wrong fields, with the beginnings of values."""
    assert isinstance(error, RequestValidationError)
    faults = []
    for fault in error.errors():
        value = fault.get("input")
        is_short = value is None or isinstance(value, (bool, int, float)) or value in ("", [], {})
        faults.append({**fault, "input": value if is_short else reprlib.repr(value)})
    return JSONResponse(jsonable_encoder({"detail": faults}), 422)
