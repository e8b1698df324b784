"""To which training a rollout server belongs (SPEC F6).

Symptom: a second training that connects to a server ends the weight group of the first, and both
fail with "Broken pipe".
Upstream: ms-swift 4.6, pipelines/infer/rollout.py: `init_communicator` and `close_communicator` ask
nobody.
Adaptation: a training names itself in its requests, and in a heartbeat beside them. While this
comes, the server leaves its weights and their group to that training. A training that has died is
silent, and its claim ends by itself.
Can go when ms-swift's server knows its trainer. Two trainings that connect in the same moment,
before the first has named itself, are not told apart.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import threading
from contextlib import suppress
from time import monotonic
from typing import Any
from urllib.parse import quote, unquote

import requests
from fastapi import Request
from fastapi.responses import JSONResponse

OWNER_HEADER = "X-Swift-Grpo-Ext-Owner"
PATH = "/swift_grpo_ext/claim/"
SECONDS_OF_CLAIM = 15.0
SECONDS_BETWEEN_BEATS = 3.0

CONNECTING = ("/close_communicator", "/init_communicator")
"""What ms-swift's client asks first: a group that a dead training left has to go before its own."""

OF_OWNER = (*CONNECTING, "/update_", "/process_weights_after_loading")
"""Beginnings of the routes that change weights, or the group that brings them."""


class Claims:
    """The server's end: whose it is, and for how long."""

    def __init__(self) -> None:
        self._owner, self._until = "", 0.0

    async def refusal(self, request: Request) -> JSONResponse | None:
        """The answer to a training's heartbeat, and to a request that only the owner may make; None
        where it may go on. A training that connects waits as long as a dead one's claim lasts."""
        path, owner = request.scope["path"], unquote(request.headers.get(OWNER_HEADER, ""))
        deadline = monotonic() + (SECONDS_OF_CLAIM if path.startswith(CONNECTING) else 0.0)
        while self._is_anothers(owner) and (owner or path.startswith(OF_OWNER)):
            if monotonic() >= deadline:
                return JSONResponse({"detail": self._words()}, 409)
            await asyncio.sleep(0.1)
        if owner and not path.startswith("/close_"):  # the last that a training asks for
            gives_up = request.method == "DELETE" and path == PATH
            self._owner = "" if gives_up else owner
            self._until = monotonic() + SECONDS_OF_CLAIM
        return JSONResponse({"owner": self._owner}) if path == PATH else None

    def _is_anothers(self, owner: str) -> bool:
        return self._owner not in ("", owner) and monotonic() < self._until

    def _words(self) -> str:
        return (
            f"this server belongs to another training: {self._owner}. Give this one a server of "
            f"its own (--vllm_server_base_url), or end the other; a training that has died loses "
            f"its server after {SECONDS_OF_CLAIM:g} s."
        )


class Claim:
    """The trainer's end: names it in each request of ms-swift's client, and sends heartbeats.

    Args:
        client: ms-swift's, connected.
        run: names the training to people; the process is added.
    """

    def __init__(self, client: Any, run: str) -> None:
        self.owner = f"{run} (process {os.getpid()} of {socket.gethostname()})"
        self._headers = {OWNER_HEADER: quote(self.owner, safe=" /():.,-_")}
        for session in client.sessions:
            session.headers.update(self._headers)
        self._client = client
        self._has_ended = threading.Event()

    def keep(self) -> None:
        """Send heartbeats until this process ends."""
        threading.Thread(target=self._beat, name="claim", daemon=True).start()
        atexit.register(self.end)

    def _beat(self) -> None:
        while True:
            self._send("POST")
            if self._has_ended.wait(SECONDS_BETWEEN_BEATS):
                return

    def end(self) -> None:
        """Leave the servers to others."""
        self._has_ended.set()
        self._send("DELETE")

    def _send(self, method: str) -> None:
        for url in list(self._client.base_urls):
            # Whether a server lives is seen elsewhere.
            with suppress(requests.RequestException):
                requests.request(method, f"{url}{PATH}", headers=self._headers, timeout=2.0)
