"""The lease of a rollout server: it serves one training at a time (docs/promises.md, F6).

In ms-swift 4.6 (pipelines/infer/rollout.py), a second training that connects to a server ends the
weights' group of the first, and both fail with "Broken pipe". Here a training names itself in its
requests and in heartbeats. While heartbeats come, the server works for that training alone.
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
from uuid import uuid4

import requests
from fastapi import HTTPException, Request

OWNER_HEADER = "X-Swift-Grpo-Ext-Owner"  # name, semicolon, secret; the name is public
PATH = "/swift_grpo_ext/lease/"
LEASE_SECONDS = 15.0
HEARTBEAT_SECONDS = 3.0

# Prefixes of routes.
CONNECTING = ("/close_communicator", "/init_communicator")
FREE = ("/get_engine_type", "/get_world_size")  # clients without a name may ask at any time


class Lease:
    """The server's side of the lease."""

    def __init__(self) -> None:
        self._header, self._until = "", 0.0

    async def check(self, request: Request) -> None:
        """Refuse requests that only the owner may send (409); renew the lease for the owner's."""
        path, header = request.scope["path"], request.headers.get(OWNER_HEADER, "")
        # A training that connects waits until the lease of a dead one ends.
        deadline = monotonic() + (LEASE_SECONDS if path.startswith(CONNECTING) else 0.0)
        # Two trainings that connect in the same moment, before the first has a name, look like one.
        while self.is_of_another(request) and (header or not path.startswith((PATH, *FREE))):
            if monotonic() >= deadline:
                raise HTTPException(
                    409,
                    f"this server belongs to another training: {self.owner}. Give this one "
                    "its own server (--vllm_server_base_url), or end the other; a dead training "
                    f"loses its server after {LEASE_SECONDS:g} s.",
                )
            await asyncio.sleep(0.1)
        # `/close_communicator` is the last request of a training: it renews nothing.
        if header and not path.startswith("/close_"):
            gives_up = request.method == "DELETE"
            self._header = "" if gives_up else header
            self._until = 0.0 if gives_up else monotonic() + LEASE_SECONDS

    @property
    def owner(self) -> str:
        return unquote(self._header.partition(";")[0])

    def is_of_another(self, request: Request) -> bool:
        """Return whether a training has the lease, and another client sent the request."""
        return monotonic() < self._until and request.headers.get(OWNER_HEADER) != self._header


class Leaseholder:
    """The trainer's side of the lease: names the training `run` in its client's requests."""

    def __init__(self, client: Any, run: str) -> None:
        self.owner = f"{run} (process {os.getpid()} of {socket.gethostname()})"
        self.headers = {OWNER_HEADER: f"{quote(self.owner, safe=' /():.,-_')};{uuid4().hex}"}
        for session in client.sessions:
            session.headers.update(self.headers)
        self._client = client
        self._has_ended = threading.Event()

    def keep(self) -> None:
        """Send heartbeats until this process ends."""
        threading.Thread(target=self._beat, name="lease", daemon=True).start()
        atexit.register(self.end)

    def _beat(self) -> None:
        self._send("POST")
        while not self._has_ended.wait(HEARTBEAT_SECONDS):
            self._send("POST")

    def end(self) -> None:
        """Give up the lease of all servers."""
        self._has_ended.set()
        self._send("DELETE")

    def _send(self, method: str) -> None:
        for url in list(self._client.base_urls):
            with suppress(requests.RequestException):  # rounds and updates notice a dead server
                requests.request(method, f"{url}{PATH}", headers=self.headers, timeout=2.0)
