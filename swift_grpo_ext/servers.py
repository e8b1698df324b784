"""The trainer's side of `swift rollout`: any number of servers, each with its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest

from swift_grpo_ext import wire
from swift_grpo_ext.scheduler import balance, estimate_cost, positions
from swift_grpo_ext.wire import Completion, Envelope, WireError


class RolloutServers:
    """Sends requests to the servers of a connected `VLLMClient`, and reads their lean answers.

    Args:
        client: ms-swift's client; its sessions and addresses are used.

    Raises:
        WireError: a server has no swift-grpo-ext, or another version of it.
    """

    def __init__(self, client: Any) -> None:
        self._sessions = client.sessions
        self._urls = client.base_urls
        self.replicas = [self._count_replicas(i) for i in range(len(self._urls))]

    def infer(
        self,
        requests: Sequence[RolloutInferRequest],
        envelopes: Sequence[Envelope],
        config: RequestConfig,
    ) -> list[tuple[list[Completion], list[int]]]:
        """The samples of each request, and its prompt's token ids, in the order of the requests.

        Raises:
            RuntimeError: a server does not answer, or with an error; names it and the cause.
        """
        messages = [asdict(request) for request in requests]
        costs = [
            estimate_cost(message, envelope.count, config.max_tokens or 0)
            for message, envelope in zip(messages, envelopes, strict=True)
        ]
        shares = balance(costs, [float(n) for n in self.replicas])

        def ask(server: int) -> list[tuple[list[Completion], list[int]]]:
            share = shares[server]
            answers = self._post(server, [messages[i] for i in share], config)
            return [
                wire.unpack_answer(answer, envelopes[i], self._name(server))
                for i, answer in zip(share, answers, strict=True)
            ]

        busy = [server for server, share in enumerate(shares) if share]
        with ThreadPoolExecutor(max_workers=max(len(busy), 1)) as pool:
            answers = dict(zip(busy, pool.map(ask, busy), strict=True))
        return [answers[server][place] for server, place in positions(shares, len(messages))]

    def _post(
        self, server: int, messages: list[dict[str, Any]], config: RequestConfig
    ) -> list[dict[str, Any]]:
        body = {"infer_requests": messages, "request_config": asdict(config)}
        response = self._sessions[server].post(f"{self._urls[server]}/infer/", json=body)
        if response.status_code != 200:
            raise RuntimeError(
                f"{self._name(server)} answered {response.status_code}: {response.text[:2000]}"
            )
        return [answer["rollout_infos"][wire.KEY] for answer in response.json()]

    def _count_replicas(self, server: int) -> int:
        url = f"{self._urls[server]}/get_engine_type/"
        response = self._sessions[server].post(url)
        ours = response.json().get(wire.KEY) if response.status_code == 200 else None
        if ours is None:
            raise WireError(
                f"{self._name(server)} runs without swift-grpo-ext: start it with the plugin file "
                "that this training uses (swift rollout --external_plugins ... ), or train with "
                "--rollout_seed_mode engine --rollout_group_requests false."
            )
        wire.check_version(ours, self._name(server))
        return int(ours["replicas"])

    def _name(self, server: int) -> str:
        return f"server {server} ({self._urls[server]})"
