"""Weight updates: verified on every engine, and failing on every rank if they fail on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from swift.utils import get_current_device

from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.rollout.servers import RolloutServers
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.weights.checksums import (
    WeightChecksums,
    WeightUpdateError,
    compare,
    compare_tensors,
    recorded_loads,
    weight_checksums_in_background,
)

StateDict = dict[str, torch.Tensor]
Load = Callable[[StateDict], None]
"""ms-swift's own way of giving tensors to its engine, or engines."""


class WeightUpdates:
    """Verifies the updates of one training (SPEC M4).

    Args:
        ranks: all training ranks.
        servers: on the rank that sends to them; None on others, and with colocated engines.
    """

    def __init__(self, ranks: RankGroup, servers: RolloutServers | None) -> None:
        self._ranks = ranks
        self._servers = servers
        self._sent: WeightChecksums = {}

    def update(self, move: Callable[[], None]) -> None:
        """One update, on every rank.

        Args:
            move: ms-swift's update, which calls `load_colocated` or `send` for what it gathers.

        Raises:
            WeightUpdateError: on every rank, where it failed on one.
        """
        failure: Exception | None = None
        self._sent = {}
        try:
            if self._servers is not None:
                self._servers.reconnect()
            move()
            if self._servers is not None and self._sent:
                # Adapters that stay apart (`--vllm_enable_lora`) have no names to compare.
                for name, loaded in self._servers.loaded_checksums():
                    compare(self._sent, loaded, name)
        except Exception as e:
            failure = e  # not raised yet: the other ranks would wait
        failures = self._ranks.all_gather(failure and f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, text in enumerate(failures):
            if text:
                raise WeightUpdateError(f"The weight update failed on rank {rank}: {text}")

    def load_colocated(self, state_dict: StateDict, engine: Any, load: Load) -> None:
        """Give tensors to this process's engine, and compare what it has taken."""
        if has_accelerator():
            with recorded_loads(engine.inner_model) as taken:
                load(state_dict)
        else:
            taken = engine.reload_weights(state_dict.items())
        name = f"The colocated engine of rank {self._ranks.rank}"
        compare_tensors(state_dict, dict(taken), name)

    def send(self, state_dict: StateDict, load: Load) -> None:
        """Send tensors to the servers, and take their checksums beside it."""
        if self._ranks.rank > 0:
            load(state_dict)  # takes part in what rank 0 sends
            return
        sent = weight_checksums_in_background(list(state_dict.items()))
        load(state_dict)
        self._sent.update(sent())


def connect_servers(client: Any, args: Any) -> RolloutServers:
    """The servers of ms-swift's connected `VLLMClient`, each with the plugin."""
    return RolloutServers(client, args.rollout_timeout, _connect, args.new_special_tokens)


def _connect(client: Any) -> None:
    """Make the communicator of a client that knows one server."""
    client.init_communicator(device=get_current_device())
    if not has_accelerator():
        from swift_grpo_ext.upstream.weight_sync import connect_client

        connect_client(client)
