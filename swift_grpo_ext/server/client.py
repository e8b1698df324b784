"""The trainer's side of `swift rollout`: any number of servers, each with its replicas."""

from __future__ import annotations

import atexit
import copy
import json
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, TypeVar

import requests
from requests.adapters import HTTPAdapter
from swift.arguments import RLHFArguments
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest, RolloutOutput
from swift.rlhf_trainers import vllm_client
from swift.rlhf_trainers.vllm_client import VLLMClient, VLLMInferClient
from swift.utils import get_current_device, get_logger
from typing_extensions import Self
from urllib3.exceptions import ReadTimeoutError
from urllib3.util import Retry

from swift_grpo_ext.ranks import RolloutError
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.conversation import name_server
from swift_grpo_ext.rollout.dispatch import (
    NoWorkerError,
    RequestError,
    WorkerError,
    WorkerLostError,
    dispatch,
    estimate_cost,
)
from swift_grpo_ext.rollout.wire import Answer, RequestMetadata, WeightReport, WireError
from swift_grpo_ext.server.lease import Leaseholder
from swift_grpo_ext.timing.stalls import waiting
from swift_grpo_ext.upstream.weight_sync import bounded_broadcasts, bounded_rendezvous

logger = get_logger()

T = TypeVar("T")

REPORTS_PATH = "swift_grpo_ext/weight_reports/"
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_LOOK = 2.0  # for the answer of a lost server to a request for its health
SECONDS_BETWEEN_LOOKS = 0.5  # between requests about replicas that are being started


class _Tries(Retry):
    """Tries again if no connection was made (16 seconds in all), or a server is busy."""

    def increment(self, *args: Any, **kwargs: Any) -> Self:
        # A late answer has used up the request's time. A 503 with a `Retry-After` is tried again.
        if isinstance(error := kwargs.get("error"), ReadTimeoutError):
            raise error
        return super().increment(*args, **kwargs)


class _BoundedAdapter(HTTPAdapter):
    """Limits each wait of a request to `seconds`; ms-swift's client has no limit."""

    def __init__(self, seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        # The second bounds each wait for bytes: each blank of a slow answer starts it again.
        self._timeout = (min(SECONDS_TO_CONNECT, seconds), seconds)

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        return super().send(*args, **{**kwargs, "timeout": self._timeout})


TRIES = _Tries(6, read=False, backoff_factor=0.25, allowed_methods=None, raise_on_status=False)
# Prefixes of the paths of requests that may be sent twice: their answers are the same (S2).
REPEATABLE = ("infer/", "get_", "reset_", "close_communicator/", REPORTS_PATH)
CALLERS_FAULTS = (400, 413, 415, 422)  # statuses of requests that no server can answer
# Lists of ms-swift's client with an entry for each server.
LISTS = ("base_urls", "sessions", "hosts", "group_ports", "pynccl_comms")


@dataclass(eq=False)
class Server:
    name: str  # `server 0 (URL)`: the number does not change when other servers are lost
    url: str
    session: requests.Session
    client: Any  # a copy of ms-swift's client that has only this server
    replicas: int = 0
    members: list[str] = field(default_factory=list)  # starts of the server and of its replicas
    is_lost: bool = False


def connect_servers(client: VLLMClient, args: RLHFArguments) -> RolloutServers:
    """Return the servers of ms-swift's connected client, leased to this training."""
    Leaseholder(client, args.output_dir).keep()
    timeout, tokens, same = args.rollout_timeout, args.new_special_tokens, args.full_determinism
    return RolloutServers(client, timeout, tokens, wants_same_tokens=same)


def connect(client: VLLMClient, timeout: float) -> None:
    """Make the communicators of a client; each wait has `timeout` seconds."""
    with bounded_rendezvous(vllm_client, timeout):
        client.init_communicator(device=get_current_device())


class RolloutServers:
    """Sends requests to the servers of ms-swift's connected client, and reads their answers.

    A replica has `timeout` seconds for an answer. `wants_same_tokens` is `--full_determinism`.
    Raise `WireError` if a server has no swift-grpo-ext, or another version of it.
    """

    def __init__(
        self,
        client: VLLMInferClient,
        timeout: float,
        new_special_tokens: Sequence[str] = (),
        *,
        wants_same_tokens: bool = False,
    ) -> None:
        self._client: Any = client
        self._timeout = timeout
        self._wants_same_tokens = wants_same_tokens
        self._new_special_tokens = list(new_special_tokens)
        self._servers: list[Server] = []
        # The minima over all servers' engines.
        self.max_model_len: int | None = None
        self.number_bits: int | None = None
        bound = wire.TRAINER_TIMEOUTS * timeout
        for number, url in enumerate(client.base_urls):
            session, alone = client.sessions[number], copy.copy(client)
            alone.num_servers = 1
            for name in LISTS:  # a client that sends no weights has only three
                setattr(alone, name, getattr(client, name, [])[number : number + 1])
            server = Server(f"server {number} ({url})", url, session, alone)
            session.headers[wire.TIMEOUT_HEADER] = f"{timeout:g}"
            for path in ("", *REPEATABLE):
                tries = TRIES.new(read=1) if path else TRIES
                session.mount(f"{url}/{path}", _BoundedAdapter(bound, max_retries=tries))
            server.replicas, server.members, _ = self._identify(server)
            # From here on, a restarted server refuses requests that need weights.
            session.headers[wire.INSTANCE_HEADER] = server.members[0]
            self._servers.append(server)

    def infer(
        self,
        requests: Sequence[RolloutInferRequest],
        metadatas: Sequence[RequestMetadata],
        config: RequestConfig,
    ) -> list[Answer]:
        """Return the answer to each request, in their order. Raise `RolloutError` if a request
        is at fault, or no server is left."""

        def read(server: Server, share: list[int], answers: Any) -> list[Answer]:
            return [
                wire.read_answer(answer["rollout_infos"][wire.KEY], metadatas[i], server.name)
                for i, answer in zip(share, answers, strict=True)
            ]

        return self._dispatch(requests, metadatas, config, read)

    def converse(
        self, requests: Sequence[RolloutInferRequest], config: RequestConfig
    ) -> list[RolloutOutput]:
        """Return the outputs of the servers' schedulers in the order of the requests; a scheduler
        may make several outputs for a request. Errors are those of `infer`."""
        metadatas: list[Any] = [wire.read_metadata(request.data_dict) for request in requests]

        def read(server: Server, share: list[int], answers: Any) -> list[list[RolloutOutput]]:
            made: dict[str | None, list[RolloutOutput]] = {requests[i].uuid: [] for i in share}
            for answer in answers:
                output = RolloutOutput(**answer)
                name_server(output, server.name)
                made[output.response.id].append(output)
            if not all(made.values()):
                raise WorkerError(f"{server.name} has left out conversations.")
            return list(made.values())

        is_slow = {wire.STATUS_HEADER: "1"}
        return list(chain(*self._dispatch(requests, metadatas, config, read, **is_slow)))

    def _dispatch(
        self,
        requests: Sequence[RolloutInferRequest],
        metadatas: Sequence[RequestMetadata],
        config: RequestConfig,
        read: Callable[[Server, list[int], Any], Sequence[T]],
        **headers: str,
    ) -> list[T]:
        bodies, costs = [], []  # each server that is tried gets the same bytes
        for request, metadata in zip(requests, metadatas, strict=True):
            fields = asdict(request)
            wire.write_metadata(fields["data_dict"], metadata)
            try:
                bodies.append(json.dumps(fields, allow_nan=False).encode())
            except (TypeError, ValueError) as e:
                raise RolloutError(
                    f"{metadata.sample_id}: the row cannot be sent to a server ({e}); expected "
                    "text, finite numbers, lists and objects. Mend or drop the row."
                ) from e
            costs.append(estimate_cost(fields, metadata.count, config.max_tokens or 0))
        end = b'], "request_config": %b}' % json.dumps(asdict(config)).encode()

        def send(server: Server, share: list[int]) -> Sequence[T]:
            body = b'{"infer_requests": [' + b", ".join(bodies[i] for i in share) + end
            first = metadatas[share[0]].sample_id
            with waiting(f"{server.name}: {len(share)} requests, the first {first}"):
                answers = self._request(server, "post", "infer/", body, **headers)
            try:
                return read(server, share, answers)
            except (ValueError, LookupError, TypeError, AttributeError) as e:
                raise WorkerError(f"{server.name} gave an answer that makes no sense: {e}") from e

        def workers() -> dict[Server, float]:
            return {server: float(server.replicas) for server in self._used()}

        try:
            return dispatch(costs, workers, send, self._handle_failure)
        except (NoWorkerError, RequestError) as e:
            raise RolloutError(str(e)) from e

    def _handle_failure(self, server: Server, error: WorkerError) -> None:
        # Another server gives the same tokens (docs/promises.md, S2). A server that does not answer
        # at all is dropped, until it is healthy before a weight update (F4); the last one stays.
        logger.warning(f"{error} Retrying on the remaining servers.")
        if isinstance(error, WorkerLostError) and len(self._used()) > 1:
            server.is_lost = True
            self._fill_client()

    def _used(self) -> list[Server]:
        return [server for server in self._servers if not server.is_lost]

    def _fill_client(self) -> None:
        """Let ms-swift's client send weights to the servers that are used."""
        used = self._used()
        self._client.num_servers = len(used)
        for name in LISTS:
            items = [item for server in used for item in getattr(server.client, name)]
            setattr(self._client, name, items)

    def reconnect(self, *, again: bool = False) -> bool:
        """Use lost servers that are healthy again, and drop servers that do not answer. Return
        whether a group was made; with `again`, make all groups."""
        for server in self._servers:
            if server.is_lost:
                with suppress(requests.RequestException):
                    health = requests.get(f"{server.url}/health/", timeout=SECONDS_TO_LOOK)
                    server.is_lost = not health.ok
                if not server.is_lost:
                    logger.warning(f"{server.name} answers again.")
                    server.members = []  # its group is gone
        has_changed = False
        for server in self._used():
            try:
                has_changed |= self._reconnect_if_changed(server, again)
            except WorkerLostError as e:
                if len(self._used()) == 1:
                    raise RolloutError(str(e)) from e
                self._handle_failure(server, e)
        return has_changed

    def _reconnect_if_changed(self, server: Server, again: bool, num_tries: int = 3) -> bool:
        deadline = time.monotonic() + self._timeout
        while True:
            replicas, members, num_starting = self._identify(server)
            if replicas:
                break
            # `_identify` lets replicas join that are ready by now.
            if not num_starting or time.monotonic() >= deadline:
                raise WorkerLostError(f"{server.name} has no replica left.")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        # Restarted servers and replicas have other names, and are in no group.
        if members == server.members and not again:
            return False
        is_same = members[0] == server.session.headers.get(wire.INSTANCE_HEADER)
        change = "has reconnected" if is_same else "was restarted"
        logger.warning(f"{server.name} {change}; weights go to its {replicas} replicas.")
        server.session.headers[wire.INSTANCE_HEADER] = members[0]
        try:
            self._request(server, "post", "close_communicator/")
            # The old communicator holds the old group's store, and with it the port.
            server.client.pynccl_comms = [None]
            self._fill_client()
            connect(server.client, self._timeout)
        except RequestError:
            raise
        except Exception as e:  # ms-swift's errors are plain ones
            lost = f"{server.name}: the weights' group was not made ({e})."
            if num_tries == 1:
                raise WorkerLostError(lost) from e
            logger.warning(f"{lost} It is tried again.")
            return self._reconnect_if_changed(server, again=True, num_tries=num_tries - 1)
        # The exit of the whole client closes every group.
        atexit.unregister(server.client.close_communicator)
        self._fill_client()
        server.replicas, server.members = replicas, members
        return True

    def bounded(self) -> AbstractContextManager[None]:
        """Bound broadcasts to servers within the block."""
        return bounded_broadcasts(self._client.pynccl_comms, self._timeout)

    def weight_reports(self) -> list[tuple[str, WeightReport]]:
        """Return the name of each worker, and its report of the last update."""
        return [
            (f"worker {number} of {server.name}", WeightReport(**report))
            for server in self._used()
            for number, report in enumerate(self._request(server, "get", REPORTS_PATH))
        ]

    def _identify(self, server: Server) -> tuple[int, list[str], int]:
        """Return a server's number of replicas, its group's members, and the number starting."""
        reply = self._request(server, "post", "get_engine_type/").get(wire.KEY)
        if reply is None:
            raise WireError(
                f"{server.name} runs without swift-grpo-ext: start it with the plugin file that "
                "this training uses (swift rollout --external_plugins ...), or train with "
                "--rollout_seed_mode engine."
            )
        wire.check_version(reply, server.name)
        new_tokens = reply.get("new_special_tokens", [])
        if new_tokens != self._new_special_tokens:  # the order of the flag decides the ids
            given = [" ".join(each) or "(none)" for each in (new_tokens, self._new_special_tokens)]
            raise ValueError(
                f"{server.name} was started with --new_special_tokens {given[0]}, this training "
                f"with {given[1]}: the same ids would be other tokens. Give both the same, in the "
                "same order."
            )
        if self._wants_same_tokens and reply.get("batches_follow_arrival"):
            logger.warning_once(
                f"--full_determinism true: the tokens of {server.name} depend on when requests "
                "arrive. Start it with VLLM_BATCH_INVARIANT=1 in its environment, or without "
                "--vllm_use_async_engine with VLLM_ENABLE_V1_MULTIPROCESSING=0."
            )
        # Any server may get any request.
        for name in ("max_model_len", "number_bits"):
            known = filter(None, (getattr(self, name), reply.get(name)))
            setattr(self, name, min(known, default=None))
        return reply["replicas"], [reply["instance"], *reply["members"]], reply["starting"]

    def _request(
        self, server: Server, method: str, path: str, data: bytes | None = None, **headers: str
    ) -> Any:
        """Return a server's answer. Raise `WorkerLostError` if it does not answer or has no replica
        left, `RequestError` if it refuses the request itself (docs/promises.md, F5), and
        `WorkerError` if its answer is invalid."""
        name, number = server.name, uuid.uuid4().hex
        headers |= {wire.MESSAGE_HEADER: number, "Content-Type": "application/json"}
        url = f"{server.url}/{path}"
        try:
            response = server.session.request(method, url, headers=headers, data=data)
        except requests.RequestException as e:
            raise WorkerLostError(f"{name} does not answer ({type(e).__name__}: {e}).") from e
        # A proxy's error has no number, nor has an answer of a server without the plugin.
        if response.headers.get(wire.MESSAGE_HEADER) not in (None, number):
            raise WorkerLostError(f"{name} gave the answer to another request.")
        status, content = response.status_code, response.content
        if wire.STATUS_HEADER in response.headers:
            first, _, content = content.lstrip().partition(b"\n")
            status = int(first) if first.isdigit() else 503  # the answer has broken off
        text = content[:2000].decode(errors="replace") if status != 200 else ""
        if status in CALLERS_FAULTS:
            raise RequestError(f"{name} refused the request ({status}): {text}")
        if status != 200:
            kind = WorkerLostError if status == 503 else WorkerError  # 503: no replica is left
            raise kind(f"{name} answered {status}: {text}")
        try:
            return json.loads(content)
        except ValueError as e:
            raise WorkerError(f"{name} answered with no JSON ({e}).") from e
