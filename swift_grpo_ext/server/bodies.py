"""Bodies of requests: bounded in size, and parsed so that `/health` answers meanwhile (F2).

Symptom: a body of 400 MB (the images of one round) blocks the event loop of `swift rollout` for a
second. A larger one takes the machine's memory. A refusal repeats the refused values.
Upstream: FastAPI parses JSON in the event loop (starlette 1.10, requests.py, `json`), in one call
that lets no other thread run, and has no limit.
Can go when FastAPI bounds bodies, and parses them in steps in a thread.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections.abc import Callable
from contextlib import suppress
from json.decoder import JSONArray  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import psutil
from fastapi import HTTPException, Request
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Return the memory of this machine, or of the container if that has less."""
    limits = [int(psutil.virtual_memory().total)]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups 2 and 1
        with suppress(OSError, ValueError):  # no such file; "max"
            limits.append(int((CONTROL_GROUPS / name).read_text(encoding="utf-8")))
    return min(limits)


# The bound of one body, and of all bodies together that wait for an answer. A body is in memory up
# to 6 times on its way to a replica: as bytes, text, values, and pickled.
MAX_BYTES = memory_bytes() // 8

# From this size on, json's decoder in C would block all threads for a tenth of a second. The one in
# Python takes 4 times as long for 10,000 rows of text, and less for images.
LARGE = 2**24


class Bodies:
    """The bodies of a server's requests, from their arrival to the answer."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def receive(self, request: Request) -> bytes:
        """Read the body into the request, and return it; its size counts until `forget`. Refuse one
        that is too large (413), or does not fit beside others (503)."""
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
                    self.forget(*parts)
                    parts.clear()
        except BaseException:  # the time is over, or the client has left
            self.forget(*parts)
            raise
        # Only now: a client that is cut off while it sends would not read the answer.
        if not fits:
            is_alone = size > MAX_BYTES
            beside = "" if is_alone else " beside those of other requests"
            raise HTTPException(
                413 if is_alone else 503,
                f"a body of {size:,} bytes{beside}; expected at most {MAX_BYTES:,}, an eighth of "
                "the server's memory. Draw fewer samples in a round, shrink images or videos, or "
                "add servers.",
                None if is_alone else {"Retry-After": "1"},
            )
        request._body = await asyncio.to_thread(b"".join, parts)
        return request._body

    def forget(self, *parts: bytes) -> None:
        self._num_bytes -= sum(map(len, parts))


class _StepwiseDecoder(json.JSONDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.parse_array = _parse_array
        # The default, in C, reads a whole body in one call.
        self.scan_once = py_make_scanner(self)


_scan_at_once = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


def _parse_array(at: tuple[str, int], scan: Callable[..., Any]) -> tuple[list[Any], int]:
    text, start = at
    if text[start : start + 1] in set("-0123456789"):  # ids of tokens, by the thousand
        return _scan_at_once(text, start - 1)
    return JSONArray(at, scan)


def parse(body: bytes) -> Any:
    """Return the same as `json.loads`."""
    if len(body) < LARGE:
        return json.loads(body)
    # Other threads run between two strings or two lists of numbers.
    return _StepwiseDecoder().decode(body.decode(json.detect_encoding(body), "surrogatepass"))


def refusal(error: RequestValidationError) -> JSONResponse:
    """Return FastAPI's own answer to wrong fields, with the beginnings of their values."""
    faults = [{**fault, "input": reprlib.repr(fault.get("input"))} for fault in error.errors()]
    return JSONResponse(jsonable_encoder({"detail": faults}), 422)
