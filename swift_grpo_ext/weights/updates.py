"""Weight updates at the trainer's end: sent, verified on every engine, failing on every rank.

Each engine (`receiver.py`, or the colocated one) loads the tensors; their checksums
(`checksums.py`) must be the trainer's. A failure on one rank is logged there at once, and raised
where all ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.utils import get_current_device, get_logger

from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.server.claims import Claim
from swift_grpo_ext.server.client import RolloutServers
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.weights.adapters import recorded_adapter
from swift_grpo_ext.weights.checksums import (
    UNFILLED,
    WeightChecksums,
    WeightUpdateError,
    compare,
    compare_tensors,
    plain_name,
    recorded_loads,
    unfilled,
    weight_checksums_in_background,
)

logger = get_logger()

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
        self._failure: Exception | None = None
        self._name = f"The colocated engine of rank {ranks.rank}"
        self._filled: set[str] | None = set()
        self._unfilled: Callable[[], list[str]] = list
        """A colocated engine's parameters that the update has left as they were."""

        self._made_anew = False

    def update(self, move: Callable[[bool], None]) -> None:
        """One update, on every rank. One that cannot be sent is made once more, with those replicas
        that are left: it brings all weights, so that what has arrived does no harm.

        Args:
            move: ms-swift's update, which calls `load_colocated` or `send` for what it gathers;
                told whether replicas may have nothing yet.

        Raises:
            WeightUpdateError: on every rank, where it failed on one.
        """
        for is_last in (False, True):
            self._sent, self._failure, self._made_anew = {}, None, False
            self._filled, self._unfilled = set(), list
            if self._servers is not None:
                self._attempt(partial(self._reconnect, again=is_last))
            # Before the first rank gathers weights: the others would wait there for one that
            # failed.
            made_anew = self._meet()
            try:
                move(made_anew)
            except Exception as e:
                self._note(e)
            self._attempt(self._verify)
            if is_last or not self._was_not_sent():
                break
        self._meet()

    def _reconnect(self, again: bool) -> None:
        assert self._servers is not None
        self._made_anew = self._servers.reconnect(again=again)

    def _was_not_sent(self) -> bool:
        """Whether servers did not take the update, though all ranks made it; on every rank."""
        failure = self._failure
        can_repeat = self._servers is not None and not isinstance(failure, WeightUpdateError)
        kinds = self._ranks.all_gather(failure and ("servers" if can_repeat else "rank"))
        if set(kinds) - {None} != {"servers"}:
            return False
        if failure is not None:
            logger.warning("The weight update is made once more.")
        return True

    def _verify(self) -> None:
        if left := self._unfilled():
            compare({}, {UNFILLED: " ".join(left)}, self._name)
        if self._servers is not None and self._sent:
            for worker, loaded in self._servers.loaded_checksums():
                compare(self._sent, loaded, worker)

    def _attempt(self, step: Callable[[], None]) -> None:
        """Do a step, unless one has failed; a failure is raised where all ranks meet."""
        if self._failure is None:
            try:
                step()
            except Exception as e:
                self._note(e)

    def _note(self, failure: Exception) -> None:
        """Log a failure where it happened, at once: the launcher may end this rank first."""
        if self._failure is None:
            self._failure = failure
            logger.error(f"The weight update failed on rank {self._ranks.rank}: {_text(failure)}")

    def _meet(self) -> bool:
        """Whether a server was connected anew, on every rank; a failure of one is raised on all."""
        failure = self._failure
        of_ranks = self._ranks.all_gather((failure and _text(failure), self._made_anew))
        if failure is not None:
            raise failure
        for rank, (text, _) in enumerate(of_ranks):
            if text:
                raise WeightUpdateError(f"The weight update failed on rank {rank}: {text}")
        return any(made_anew for _, made_anew in of_ranks)

    def load_colocated(self, state_dict: StateDict, engine: Any, load: Load) -> None:
        """Give tensors to this process's engine, and compare what it loaded."""
        with recorded_loads(engine.inner_model) as loads:
            if has_accelerator():
                load(state_dict)
            else:
                engine.reload_weights((plain_name(n), t) for n, t in state_dict.items())
        compare_tensors(state_dict, dict(loads), self._name)
        filled = self._filled
        self._filled = None if filled is None or loads.filled is None else filled | loads.filled
        config = engine.engine.model_config
        self._unfilled = lambda: unfilled(engine.inner_model, self._filled, config)

    def send(self, state_dict: StateDict, load: Load) -> None:
        """Send tensors to the servers, and take their checksums beside it. After a failure rank 0
        still gathers with the others, and sends nothing."""
        if self._ranks.rank > 0:
            load(state_dict)  # takes part in what rank 0 sends
        else:
            self._attempt(lambda: self._send(state_dict, load))

    def load_adapter(self, engine: Any, move: Callable[[], None]) -> None:
        """Give an adapter to this process's engine, which has to draw with it.

        Args:
            move: ms-swift's own way, which gathers it before.
        """
        worker = engine.inner_model_executor.driver_worker.worker
        with recorded_adapter(worker.model_runner.lora_manager):
            move()

    def send_adapter(self, client: Any, move: Callable[[], None]) -> None:
        """Send an adapter to the servers as whole weights are sent.

        Args:
            client: ms-swift's, on the rank that sends.
            move: ms-swift's own way, which gathers the adapter and calls the client.
        """
        if self._ranks.rank > 0:
            move()  # takes part in what rank 0 gathers
            return
        send, send_parts = client.update_adapter_flattened_param, client.update_adapter_param

        def send_recorded(config: Any, metadatas: list[Any], flattened: torch.Tensor) -> None:
            bucket = FlattenedTensorBucket(flattened_tensor=flattened, metadata=metadatas)
            self.send(bucket.reconstruct_tensors(), lambda _: send(config, metadatas, flattened))

        def send_parts_recorded(config: Any, tensors: StateDict) -> None:
            self.send(tensors, partial(send_parts, config))

        client.update_adapter_flattened_param = send_recorded
        client.update_adapter_param = send_parts_recorded
        try:
            move()
        finally:
            del client.update_adapter_flattened_param, client.update_adapter_param

    def _send(self, state_dict: StateDict, load: Load) -> None:
        sent = weight_checksums_in_background(list(state_dict.items()))
        with self._servers.bounded() if self._servers else nullcontext():
            load(state_dict)
        self._sent.update(sent())


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"


def connect_servers(client: Any, args: Any) -> RolloutServers:
    """The servers of ms-swift's connected `VLLMClient`, each with the plugin."""
    timeout = args.rollout_timeout
    connect = partial(_connect, timeout=timeout)
    Claim(client, args.output_dir).keep()
    return RolloutServers(client, timeout, connect, args.new_special_tokens)


def _connect(client: Any, timeout: float) -> None:
    """Make the communicator of a client that knows one server; each wait has `timeout` seconds."""
    from swift.rlhf_trainers import vllm_client

    from swift_grpo_ext.upstream.weight_sync import bounded_rendezvous, connect_client

    with bounded_rendezvous(vllm_client, timeout):
        client.init_communicator(device=get_current_device())
    if not has_accelerator():
        connect_client(client, timeout)
