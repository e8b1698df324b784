"""The trainer's side of `swift rollout`: any number of servers, each with its replicas."""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.utils import get_logger
from urllib3.exceptions import NewConnectionError

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.dispatch import (
    NoWorkerError,
    RequestError,
    WorkerError,
    WorkerLostError,
    dispatch,
    estimate_cost,
)
from swift_grpo_ext.rollout.rank_group import RolloutError
from swift_grpo_ext.rollout.wire import Completion, RequestMetadata, WireError
from swift_grpo_ext.server.api_key import REMEDY
from swift_grpo_ext.server.new_tokens import check_served_tokens
from swift_grpo_ext.upstream.weight_sync import bounded_broadcasts

logger = get_logger()

CHECKSUMS_PATH = "swift_grpo_ext/weight_receipts/"
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_LOOK = 2.0
"""For a server that was lost to say that it is healthy, before each weight update."""

SECONDS_BETWEEN_LOOKS = 0.5
"""At replicas that are being started."""

TRIES_TO_CONNECT = 3
BACKOFF = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each further try after a connection that failed."""

REPEATABLE = ("/infer/", "/get_", "/reset_", "/close_communicator/", CHECKSUMS_PATH)
"""In the paths of requests that may be sent twice: their answers are the same (SPEC S2)."""

CALLERS_FAULTS = (400, 413, 415, 422)
"""Statuses of requests that no server can answer."""

OF_SERVERS = ("base_urls", "hosts", "sessions", "group_ports")
"""Lists of ms-swift's client, with an entry for each server."""

Answer = tuple[list[Completion], list[int]]
"""The samples of a request, their numbers as arrays, and its prompt's token ids."""


class RolloutServers:
    """Sends requests to the servers of a connected `VLLMClient`, and reads their packed answers.

    Another server answers what one cannot: the tokens are the same (SPEC S2). A server that does
    not answer at all is dropped, until it answers again before a weight update (SPEC F4).

    Args:
        client: ms-swift's client; its sessions and addresses are used.
        timeout: seconds that a replica has for an answer (`--rollout_timeout`).
        connect: makes the communicator of a client that knows one server; for weights.
        new_special_tokens: of the training; each server must have been given the same.

    Raises:
        WireError: a server has no swift-grpo-ext, or another version of it.
        WorkerError: a server does not say what it is.
    """

    def __init__(
        self,
        client: Any,
        timeout: float,
        connect: Callable[[Any], None] | None = None,
        new_special_tokens: Sequence[str] = (),
    ) -> None:
        self._client = client
        self._connect = connect
        for session in client.sessions:
            session.headers[wire.TIMEOUT_HEADER] = f"{timeout:g}"
            for scheme in ("http://", "https://"):
                session.mount(scheme, _BoundedAdapter(wire.TRAINER_TIMEOUTS * timeout))
        self._new_special_tokens = new_special_tokens
        self._timeout = timeout
        self._urls = list(client.base_urls)
        self._dropped: dict[str, tuple[Any, ...]] = {}
        """Servers that were lost: URL to host, session and group port."""

        known = [self._identify(url) for url in client.base_urls]
        self.replicas = [replicas for replicas, _ in known]
        self._members = [members for _, members in known]
        """Of each server, as the weights' group has them: names of its start and its replicas'."""

        for session, (_, members) in zip(client.sessions, known, strict=True):
            session.headers[wire.INSTANCE_HEADER] = members[0]

    # --- rollouts ---

    def infer(
        self,
        requests: Sequence[RolloutInferRequest],
        metadatas: Sequence[RequestMetadata],
        config: RequestConfig,
    ) -> list[Answer]:
        """The samples of each request, in the order of the requests.

        A request for one `replica` goes to the server that has it, which is told its own number.

        Raises:
            RolloutError: a request is at fault, or no server is left that could answer; names the
                sample or the servers, and the causes.
        """
        messages, costs, addresses = [], [], []
        counts = zip(self._client.base_urls, self.replicas, strict=True)
        replicas: dict[int | None, tuple[str | None, int | None]]
        replicas = dict(enumerate((url, k) for url, count in counts for k in range(count)))
        for request, metadata in zip(requests, metadatas, strict=True):
            fields = asdict(request)
            url, own_number = replicas.get(metadata.replica, (None, None))
            wire.write_metadata(fields["data_dict"], replace(metadata, replica=own_number))
            addresses.append(url)
            messages.append(_as_json(fields, metadata))
            costs.append(estimate_cost(fields, metadata.count, config.max_tokens or 0))

        def workers() -> dict[str, float]:
            return dict(zip(self._client.base_urls, map(float, self.replicas), strict=True))

        def send(url: str, share: list[int]) -> list[Answer]:
            own = [messages[i] for i in share]
            return self._infer(url, own, [metadatas[i] for i in share], config)

        try:
            return dispatch(costs, workers, send, self._note_failure, addresses)
        except (NoWorkerError, RequestError) as e:
            raise RolloutError(str(e)) from e

    def _infer(
        self,
        url: str,
        messages: list[bytes],
        metadatas: list[RequestMetadata],
        config: RequestConfig,
    ) -> list[Answer]:
        name = self._name(url)
        body = b'{"infer_requests": [%b], "request_config": %b}'
        body %= b", ".join(messages), json.dumps(asdict(config)).encode()
        answers = self._request(url, "post", "infer/", data=body)
        if not isinstance(answers, list) or len(answers) != len(messages):
            count = len(answers) if isinstance(answers, list) else "no list of"
            raise WorkerError(f"{name} gave {count} answers to {len(messages)} requests.")
        try:
            return [
                wire.unpack_answer(answer["rollout_infos"][wire.KEY], metadata, name)
                for answer, metadata in zip(answers, metadatas, strict=True)
            ]
        except (WireError, KeyError, TypeError) as e:
            raise WorkerError(f"{name} gave an answer that makes no sense: {e}") from e

    def _note_failure(self, url: str, error: WorkerError) -> None:
        logger.warning(f"{error} Others draw its groups, if there are any.")
        if isinstance(error, WorkerLostError) and len(self._client.base_urls) > 1:
            self._drop(self._client.base_urls.index(url))

    def _lists(self) -> tuple[list[Any], ...]:
        """What is held for each server."""
        c = self._client
        return (
            *(getattr(c, name) for name in OF_SERVERS),
            *(c.pynccl_comms, self.replicas, self._members),
        )

    def _drop(self, server: int) -> None:
        """Send a server neither requests nor weights, until it answers again."""
        host, session, port = (values[server] for values in self._lists()[1:4])
        self._dropped[self._client.base_urls[server]] = (host, session, port)
        for values in self._lists():
            del values[server]
        self._client.num_servers -= 1

    def _take_back(self) -> None:
        """Take servers back that were dropped, and are healthy again."""
        for url in list(self._dropped):
            try:
                is_healthy = requests.get(f"{url}/health/", timeout=SECONDS_TO_LOOK).ok
            except requests.RequestException:
                is_healthy = False
            if is_healthy:
                logger.warning(f"{self._name(url)} answers again.")
                new = (url, *self._dropped.pop(url), None, 0, [])
                for values, value in zip(self._lists(), new, strict=True):
                    values.append(value)
                self._client.num_servers += 1

    # --- weights ---

    def reconnect(self, *, again: bool = False) -> bool:
        """Before weights are sent: drop servers that are lost, and connect again to those that were
        started anew or have other replicas. Returns whether there were any.

        Args:
            again: connect to all, since an update has failed.

        Raises:
            RolloutError: no server is left.
        """
        self._take_back()
        before = list(self._client.pynccl_comms)
        for url in list(self._client.base_urls):
            try:
                self._reconnect_if_changed(url, again)
            except WorkerLostError as e:
                if len(self._client.base_urls) == 1:
                    raise RolloutError(str(e)) from e
                self._note_failure(url, e)
        return any(comm not in before for comm in self._client.pynccl_comms)

    def _reconnect_if_changed(self, url: str, again: bool) -> None:
        for tries_left in reversed(range(TRIES_TO_CONNECT)):
            replicas, members = self._identify(url, wait=True)
            if replicas == 0:
                raise WorkerLostError(f"{self._name(url)} has no replica left.")
            server = self._client.base_urls.index(url)
            if members == self._members[server] and not again:
                return
            self._tell_change(server, replicas, members)
            try:
                self._reconnect(server, replicas, members)
                return
            except (RequestError, WireError):
                raise
            except Exception as e:  # of a store, or ms-swift's own: it has no kinds of its own
                lost = f"{self._name(url)}: the weights' group was not made ({e})."
                if tries_left == 0:
                    raise WorkerLostError(lost) from e
                logger.warning(f"{lost} It is tried again.")
                again = True

    def _tell_change(self, server: int, replicas: int, members: list[str]) -> None:
        name, before = self._name(self._client.base_urls[server]), self.replicas[server]
        if members[0] != self._client.sessions[server].headers.get(wire.INSTANCE_HEADER):
            logger.warning(f"{name} was started anew; it is given the weights.")
        elif replicas < before:
            logger.warning(f"{name} has {replicas} of {before} replicas left; weights go to these.")
        else:
            logger.warning(f"{name} is connected anew; weights go to its {replicas} replicas.")

    def _reconnect(self, server: int, replicas: int, members: list[str]) -> None:
        client = self._client
        alone = copy.copy(client)
        alone.num_servers = 1
        for name in OF_SERVERS:
            setattr(alone, name, [getattr(client, name)[server]])
        client.sessions[server].headers[wire.INSTANCE_HEADER] = members[0]
        self._request(client.base_urls[server], "post", "close_communicator/")
        client.pynccl_comms[server] = None  # it holds on to the store of the group that was
        assert self._connect is not None
        self._connect(alone)
        client.pynccl_comms[server] = alone.pynccl_comms[0]
        self.replicas[server], self._members[server] = replicas, members

    def bounded(self) -> AbstractContextManager[None]:
        """Bounds what is broadcast to servers meanwhile."""
        return bounded_broadcasts(self._client.pynccl_comms, self._timeout)

    def loaded_checksums(self) -> list[tuple[str, dict[str, str]]]:
        """What each worker of each server loaded in the last update, with the worker's name.

        Raises:
            WorkerError: a server does not tell.
        """
        return [
            (f"worker {number} of {self._name(url)}", weight_checksums)
            for url in self._client.base_urls
            for number, weight_checksums in enumerate(self._request(url, "get", CHECKSUMS_PATH))
        ]

    # --- one server ---

    def _identify(self, url: str, *, wait: bool = False) -> tuple[int, list[str]]:
        """How many replicas it has, and the names of its start and of theirs.

        Args:
            wait: for replicas that are being started, where there is no other.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            ours = self._request(url, "post", "get_engine_type/").get(wire.KEY)
            if ours is None:
                raise WireError(
                    f"{self._name(url)} runs without swift-grpo-ext: start it with the plugin file "
                    "that this training uses (swift rollout --external_plugins ... ), or train "
                    "with --rollout_seed_mode engine."
                )
            wire.check_version(ours, self._name(url))
            tokens = ours.get("new_special_tokens", [])
            check_served_tokens(self._new_special_tokens, tokens, self._name(url))
            is_over = not (wait and ours.get("starting")) or time.monotonic() > deadline
            if int(ours["replicas"]) or is_over:
                return int(ours["replicas"]), [str(ours["instance"]), *ours.get("members", ())]
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _request(self, url: str, method: str, path: str, **kwargs: Any) -> Any:
        """A server's answer.

        Raises:
            WorkerLostError: it does not answer, or has no replica left.
            RequestError: it refuses the request itself (SPEC F5).
            WorkerError: it answers something else.
        """
        session = self._client.sessions[self._client.base_urls.index(url)]
        name, number = self._name(url), uuid.uuid4().hex
        headers = {wire.MESSAGE_HEADER: number}
        if "data" in kwargs:
            headers["Content-Type"] = "application/json"
        try:
            response = getattr(session, method)(f"{url}/{path}", headers=headers, **kwargs)
        except requests.RequestException as e:
            raise WorkerLostError(f"{name} does not answer ({type(e).__name__}: {e}).") from e
        if response.headers.get(wire.MESSAGE_HEADER, number) != number:
            raise WorkerLostError(f"{name} gave the answer to another request.")
        if response.status_code != 200:
            raise _refusal(name, response)
        try:
            return response.json()
        except ValueError as e:
            raise WorkerError(f"{name} answered with no JSON ({e}).") from e

    def _name(self, url: str) -> str:
        return f"server {self._urls.index(url)} ({url})"


def _as_json(fields: dict[str, Any], metadata: RequestMetadata) -> bytes:
    """A request's fields. Once, since images stand in it: every server that is tried gets it.

    Raises:
        RolloutError: the row holds a value that JSON has no word for, such as NaN; names it.
    """
    try:
        return json.dumps(fields, allow_nan=False).encode()
    except (TypeError, ValueError) as e:
        wrong = next(name for name, value in fields.items() if not _has_json(value))
        raise RolloutError(
            f"{metadata.sample_id}: the row's `{wrong}` cannot be sent to a server ({e}); "
            "expected text, finite numbers, lists and objects. Mend or drop the row."
        ) from e


def _has_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _refusal(name: str, response: requests.Response) -> Exception:
    status, text = response.status_code, response.text[:2000]
    if status in CALLERS_FAULTS:
        return RequestError(f"{name} refused the request ({status}): {text}")
    if status == 401 and REMEDY not in text:
        text += f" {REMEDY}."
    kind = WorkerLostError if status == 503 else WorkerError
    return kind(f"{name} answered {status}: {text}")


class _BoundedAdapter(HTTPAdapter):
    """Bounds each request, and sends it again where a connection fails; ms-swift's client sets no
    limit, and gives up at once.

    Args:
        timeout: seconds for a request, all tries included.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        super().__init__()

    def send(self, request: Any, *args: Any, **kwargs: Any) -> requests.Response:
        deadline, given = time.monotonic() + self._timeout, kwargs.get("timeout")
        for pause in (*BACKOFF, None):
            left = max(deadline - time.monotonic(), 0.001)
            kwargs["timeout"] = given or (min(SECONDS_TO_CONNECT, left), left)
            try:
                response = super().send(request, *args, **kwargs)
            except requests.ConnectionError as e:
                if pause is None or pause > left or not _may_repeat(request, e):
                    raise
            else:
                busy = response.status_code == 503 and "Retry-After" in response.headers
                if pause is None or pause > left or not busy:
                    return response
            time.sleep(pause)
        raise AssertionError("unreachable")


def _may_repeat(request: Any, error: requests.ConnectionError) -> bool:
    """Whether a request may be sent again: it never left, or its answer stays the same."""
    cause = getattr(error.args[0] if error.args else None, "reason", None)
    never_left = isinstance(error, requests.ConnectTimeout) or isinstance(cause, NewConnectionError)
    return never_left or any(part in request.path_url for part in REPEATABLE)
