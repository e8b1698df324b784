"""The trainer's side of `swift rollout`: any number of servers, each with its replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
from swift.utils import get_logger

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.new_tokens import check_served_tokens
from swift_grpo_ext.rollout.rank_group import RolloutError
from swift_grpo_ext.rollout.scheduler import balance, estimate_cost
from swift_grpo_ext.rollout.wire import Completion, RequestMetadata, WireError
from swift_grpo_ext.upstream.api_key import REMEDY
from swift_grpo_ext.weights.checksums import WeightChecksums

logger = get_logger()

CHECKSUMS_PATH = "swift_grpo_ext/weight_receipts/"
SECONDS_TO_CONNECT = 10.0

Answer = tuple[list[Completion], list[int]]
"""The samples of a request, and its prompt's token ids."""


class ServerError(RuntimeError):
    """A server gave no usable answer; names it and the cause."""


class ServerLostError(ServerError):
    """A server does not answer."""


class RolloutServers:
    """Sends requests to the servers of a connected `VLLMClient`, and reads their lean answers.

    What a server cannot answer, another is asked for: the tokens are the same (SPEC S2). A server
    that does not answer at all is let go.

    Args:
        client: ms-swift's client; its sessions and addresses are used.
        timeout: seconds that a server has for an answer.
        connect: makes the communicator of a client that knows one server; for weights.
        new_special_tokens: of the training; each server must have been given the same.

    Raises:
        WireError: a server has no swift-grpo-ext, or another version of it.
        ServerError: a server does not say what it is.
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
            for scheme in ("http://", "https://"):
                session.mount(scheme, _BoundedAdapter(timeout))
        self._new_special_tokens = new_special_tokens
        self._urls = list(client.base_urls)
        known = [self._identify(i) for i in range(len(client.base_urls))]
        self.replicas = [replicas for replicas, _ in known]
        for session, (_, instance) in zip(client.sessions, known, strict=True):
            session.headers[wire.INSTANCE_HEADER] = instance

    # --- rollouts ---

    def infer(
        self,
        requests: Sequence[RolloutInferRequest],
        metadatas: Sequence[RequestMetadata],
        config: RequestConfig,
    ) -> list[Answer]:
        """The samples of each request, in the order of the requests.

        Raises:
            RolloutError: no server is left that could answer; names them and the causes.
        """
        messages = [asdict(request) for request in requests]
        costs = [
            estimate_cost(message, metadata.count, config.max_tokens or 0)
            for message, metadata in zip(messages, metadatas, strict=True)
        ]
        answers: dict[int, Answer] = {}
        failures: dict[str, ServerError] = {}
        while len(answers) < len(messages):
            usable = [i for i, url in enumerate(self._client.base_urls) if url not in failures]
            if not usable:
                raise RolloutError("; ".join(map(str, failures.values())))
            left = [i for i in range(len(messages)) if i not in answers]
            shares = [
                [left[k] for k in share]
                for share in balance(
                    [costs[i] for i in left], [float(self.replicas[i]) for i in usable]
                )
            ]
            with ThreadPoolExecutor(max_workers=len(usable)) as pool:
                outcomes = list(
                    pool.map(
                        lambda server, share: self._try(
                            server,
                            [messages[i] for i in share],
                            [metadatas[i] for i in share],
                            config,
                        ),
                        usable,
                        shares,
                    )
                )
            urls = [self._client.base_urls[i] for i in usable]
            for url, share, outcome in zip(urls, shares, outcomes, strict=True):
                if isinstance(outcome, ServerError):
                    failures[url] = outcome
                    self._note_failure(url, outcome)
                else:
                    answers.update(zip(share, outcome, strict=True))
        return [answers[i] for i in range(len(messages))]

    def _try(
        self,
        server: int,
        messages: list[dict[str, Any]],
        metadatas: list[RequestMetadata],
        config: RequestConfig,
    ) -> list[Answer] | ServerError:
        try:
            return self._infer(server, messages, metadatas, config) if messages else []
        except ServerError as e:
            return e

    def _infer(
        self,
        server: int,
        messages: list[dict[str, Any]],
        metadatas: list[RequestMetadata],
        config: RequestConfig,
    ) -> list[Answer]:
        name = self._name(server)
        body = {"infer_requests": messages, "request_config": asdict(config)}
        answers = self._ask(server, "post", "infer/", json=body)
        if not isinstance(answers, list) or len(answers) != len(messages):
            count = len(answers) if isinstance(answers, list) else "no list of"
            raise ServerError(f"{name} gave {count} answers to {len(messages)} requests.")
        try:
            return [
                wire.unpack_answer(answer["rollout_infos"][wire.KEY], metadata, name)
                for answer, metadata in zip(answers, metadatas, strict=True)
            ]
        except (WireError, KeyError, TypeError) as e:
            raise ServerError(f"{name} gave an answer that makes no sense: {e}") from e

    def _note_failure(self, url: str, error: ServerError) -> None:
        logger.warning(f"{error} Others are asked for its groups, if there are any.")
        if isinstance(error, ServerLostError) and len(self._client.base_urls) > 1:
            self._let_go(self._client.base_urls.index(url))

    def _let_go(self, server: int) -> None:
        """Ask a server no more, and send it no weights."""
        client = self._client
        for values in (
            client.base_urls,
            client.hosts,
            client.sessions,
            client.group_ports,
            client.pynccl_comms,
            self.replicas,
        ):
            del values[server]
        client.num_servers -= 1

    # --- weights ---

    def reconnect(self) -> None:
        """Before weights are sent: let go of servers that are lost, and reach those that were
        started anew, or whose replicas are no longer the same.

        Raises:
            RolloutError: no server is left.
        """
        for server in reversed(range(len(self._client.base_urls))):
            try:
                replicas, instance = self._identify(server)
                if replicas == 0:
                    raise ServerLostError(f"{self._name(server)} has no replica left.")
            except ServerLostError as e:
                if len(self._client.base_urls) == 1:
                    raise RolloutError(str(e)) from e
                self._note_failure(self._client.base_urls[server], e)
                continue
            headers = self._client.sessions[server].headers
            if instance != headers[wire.INSTANCE_HEADER]:
                logger.warning(f"{self._name(server)} was started anew; it is given the weights.")
            elif replicas != self.replicas[server]:
                logger.warning(
                    f"{self._name(server)} has {replicas} of {self.replicas[server]} replicas "
                    "left; weights go to these."
                )
            else:
                continue
            headers[wire.INSTANCE_HEADER] = instance
            self._reconnect(server, replicas)

    def _reconnect(self, server: int, replicas: int) -> None:
        client = self._client
        alone = copy.copy(client)
        alone.num_servers = 1
        for name in ("base_urls", "hosts", "sessions", "group_ports"):
            setattr(alone, name, [getattr(client, name)[server]])
        self._ask(server, "post", "close_communicator/")
        client.pynccl_comms[server] = None  # it holds on to the store of the group that was
        assert self._connect is not None
        self._connect(alone)
        client.pynccl_comms[server] = alone.pynccl_comms[0]
        self.replicas[server] = replicas

    def loaded_checksums(self) -> list[tuple[str, WeightChecksums]]:
        """Of each worker of each server since this was last asked, with the server's name.

        Raises:
            ServerError: a server does not tell.
        """
        return [
            (f"worker {number} of {self._name(server)}", weight_checksums)
            for server in range(len(self._client.base_urls))
            for number, weight_checksums in enumerate(self._ask(server, "get", CHECKSUMS_PATH))
        ]

    # --- one server ---

    def _identify(self, server: int) -> tuple[int, str]:
        """How many replicas it has, and which start of the server it is."""
        ours = self._ask(server, "post", "get_engine_type/").get(wire.KEY)
        if ours is None:
            raise WireError(
                f"{self._name(server)} runs without swift-grpo-ext: start it with the plugin file "
                "that this training uses (swift rollout --external_plugins ... ), or train with "
                "--rollout_seed_mode engine --rollout_group_requests false."
            )
        wire.check_version(ours, self._name(server))
        check_served_tokens(
            self._new_special_tokens, ours.get("new_special_tokens", []), self._name(server)
        )
        return int(ours["replicas"]), str(ours["instance"])

    def _ask(self, server: int, method: str, path: str, **kwargs: Any) -> Any:
        url = f"{self._client.base_urls[server]}/{path}"
        try:
            response = getattr(self._client.sessions[server], method)(url, **kwargs)
        except requests.RequestException as e:
            raise ServerLostError(
                f"{self._name(server)} does not answer ({type(e).__name__}: {e})."
            ) from e
        if response.status_code != 200:
            text = response.text[:2000]
            if response.status_code == 401 and REMEDY not in text:
                text += f" {REMEDY}."
            raise ServerError(f"{self._name(server)} answered {response.status_code}: {text}")
        try:
            return response.json()
        except ValueError as e:
            raise ServerError(f"{self._name(server)} answered with no JSON ({e}).") from e

    def _name(self, server: int) -> str:
        url = self._client.base_urls[server]
        return f"server {self._urls.index(url)} ({url})"


class _BoundedAdapter(HTTPAdapter):
    """Waits for an answer, but not for ever; ms-swift's client sets no limit."""

    def __init__(self, timeout: float) -> None:
        self._timeout = (SECONDS_TO_CONNECT, timeout)
        super().__init__()

    def send(self, request: Any, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs["timeout"] = kwargs.get("timeout") or self._timeout
        return super().send(request, *args, **kwargs)
