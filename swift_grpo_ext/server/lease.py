"""The lease of a rollout server: it serves one training at a time (docs/promises.md, F6).

In ms-swift 4.6 (pipelines/infer/rollout.py), a second training that connects to a server ends the
weight group of the first, and both fail with "Broken pipe". Here a training names itself in its
requests and in a heartbeat. While this comes, the server works for that training alone. The lease
of a training that has died ends by itself. Two trainings that connect in the same moment, before
the first has named itself, are not told apart.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote
from uuid import uuid4

import requests
from fastapi import Request
from fastapi.responses import JSONResponse

if TYPE_CHECKING:
    from swift.rlhf_trainers.vllm_client import VLLMClient

OWNER_HEADER = "X-Swift-Grpo-Ext-Owner"
"""The owner's name and, behind a semicolon, a secret: everybody may ask for names."""

PATH = "/swift_grpo_ext/lease/"
LEASE_SECONDS = 15.0
HEARTBEAT_SECONDS = 3.0

CONNECTING = ("/close_communicator", "/init_communicator")
"""ms-swift's client asks these first: the group that a dead training left has to go before its own
is made."""

FREE = ("/get_engine_type", "/get_world_size")
"""Beginnings of the routes that anyone without a name may ask. All others change a server, or take
its replicas' time."""


class Lease:
    """The server's end."""

    def __init__(self) -> None:
        self._owner, self._until = "", 0.0

    async def refusal(self, request: Request) -> JSONResponse | None:
        """Return the answer to a heartbeat, or the refusal of what only the owner may ask; None
        where the request may go on. A training that connects waits for the end of a dead one's
        lease."""
        path, owner = request.scope["path"], request.headers.get(OWNER_HEADER, "")
        deadline = monotonic() + (LEASE_SECONDS if path.startswith(CONNECTING) else 0.0)
        while self.is_others(request) and (owner or not path.startswith((PATH, *FREE))):
            if monotonic() >= deadline:
                detail = (
                    f"this server belongs to another training: {_name(self._owner)}. Give this one "
                    "a server of its own (--vllm_server_base_url), or end the other; a training "
                    f"that has died loses its server after {LEASE_SECONDS:g} s."
                )
                return JSONResponse({"detail": detail}, 409)
            await asyncio.sleep(0.1)
        if owner and not path.startswith("/close_"):  # the last that a training asks for
            gives_up = request.method == "DELETE" and path == PATH
            self._owner = "" if gives_up else owner
            self._until = monotonic() + LEASE_SECONDS
        return JSONResponse({"owner": _name(self._owner)}) if path == PATH else None

    def is_owners(self, request: Request) -> bool:
        return self._is_let() and request.headers.get(OWNER_HEADER) == self._owner

    def is_others(self, request: Request) -> bool:
        """Return whether a training has the server, and did not send this."""
        return self._is_let() and not self.is_owners(request)

    def _is_let(self) -> bool:
        return self._owner != "" and monotonic() < self._until


def _name(owner: str) -> str:
    return unquote(owner.partition(";")[0])


class Leaseholder:
    """The trainer's end: names the training in each request of ms-swift's client, and sends
    heartbeats. `run` names the training to people."""

    def __init__(self, client: VLLMClient, run: str) -> None:
        self.owner = f"{run} (process {os.getpid()} of {socket.gethostname()})"
        name = quote(self.owner, safe=" /():.,-_")
        self.headers = {OWNER_HEADER: f"{name};{uuid4().hex}"}
        for session in client.sessions:
            session.headers.update(self.headers)
        self._client = client
        self._has_ended = threading.Event()

    def keep(self) -> None:
        """Send heartbeats until this process ends."""
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        atexit.register(self.end)

    def _beat(self) -> None:
        while True:
            self._send("POST")
            if self._has_ended.wait(HEARTBEAT_SECONDS):
                return

    def end(self) -> None:
        """Leave the servers to others."""
        self._has_ended.set()
        self._send("DELETE")

    def _send(self, method: str) -> None:
        for url in list(self._client.base_urls):
            # Rounds and weight updates see whether a server lives.
            with suppress(requests.RequestException):
                requests.request(method, f"{url}{PATH}", headers=self.headers, timeout=2.0)
