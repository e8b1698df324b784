"""One weight update at the trainer's end: sent, and verified on every engine.

    WeightSync.update(move)             all ranks, together
        servers.reconnect()             rank 0 makes the group again where a replica has come back
        move(group_recreated)           ms-swift gathers weights, and calls with what it has
            load_colocated() or send()              whole weights, at once or in parts
            load_adapter() or send_adapter()        an adapter that lies apart from them
        check(engine_name, report)      of every engine, against what was sent

Each engine (`receiver.py`, or the colocated one) reports what it has loaded and what its watch has
found (`update.py`). The log-probability gap (`training/gap.py`) tests whether engines use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from peft import LoraConfig
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.utils import get_logger
from torch import Tensor

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.patches import replaced
from swift_grpo_ext.weights.layout import StateDict
from swift_grpo_ext.weights.update import (
    EngineWeights,
    Shapes,
    WeightUpdateError,
    compare,
    shapes_of,
)

if TYPE_CHECKING:
    from swift.infer_engine import GRPOVllmEngine
    from swift.rlhf_trainers.vllm_client import VLLMClient

    from swift_grpo_ext.server.client import RolloutServers

logger = get_logger()

REMEDY = (
    "Rollouts would come from another policy. Let the engine load the --model that is trained, "
    "with the same versions of ms-swift and transformers; --rollout_mismatch warn goes on."
)

Load = Callable[[StateDict], None]
"""ms-swift's own way of giving tensors to its engine, or engines."""


class WeightSync:
    """Makes and verifies the weight updates of one training (docs/promises.md, M4).

    `servers` is None on ranks that do not send, and with colocated engines. Training goes on where
    a watch finds a fault and `mismatch` (`--rollout_mismatch`) is "warn".
    """

    def __init__(
        self, ranks: RankGroup, servers: RolloutServers | None, mismatch: str = "stop"
    ) -> None:
        self._ranks = ranks
        self._servers = servers
        self._mismatch = mismatch
        self._engine: EngineWeights | None = None  # the colocated one's, from its first weights on
        self._sent: Shapes = {}
        self._failure: Exception | None = None  # this rank's first one in this update

    def update(self, move: Callable[[bool], None]) -> None:
        """Make one update, on every rank. An update that cannot be sent is made once more, with the
        replicas that are left.

        Args:
            move: ms-swift's update, which calls `load_colocated`, `send` or their counterparts for
                adapters. Its argument is true where replicas may have no weights yet.

        Raises:
            WeightUpdateError: an engine that this rank feeds holds other weights.
            RolloutError: the update failed on another rank.
        """
        for is_last in (False, True):
            self._sent, self._failure = {}, None
            recreated = False
            with self._noted():
                if self._servers is not None:  # on rank 0 alone
                    recreated = self._servers.reconnect(again=is_last)
            # To gather weights, the other ranks would wait for one that failed.
            recreated = any(self._ranks.all_gather_or_raise(recreated, self._failure))
            with self._noted():
                move(recreated)
                # A failure that `send` has kept says more than the tensors that it left out.
                if self._failure is None:
                    self._check_engines()
            if is_last:
                break
            can_repeat = self._servers is not None and not isinstance(
                self._failure, WeightUpdateError
            )
            kinds = self._ranks.all_gather(self._failure and ("sending" if can_repeat else "else"))
            if set(kinds) - {None} != {"sending"}:
                break
            if self._failure is not None:
                logger.warning("The weight update is made once more.")
        self._ranks.all_gather_or_raise(None, self._failure)

    def _check_engines(self) -> None:
        if self._engine is not None:
            if self._sent:
                self._engine.end(is_whole=True)
            name = f"The colocated engine of rank {self._ranks.rank}"
            self._check(name, self._engine.report())
        if self._servers is not None and self._sent:
            for name, report in self._servers.weight_reports():
                self._check(name, report)

    def _check(self, engine_name: str, report: WeightReport) -> None:
        compare(self._sent, report, engine_name)
        if report.faults:
            text = f"{engine_name}: the weight update has failed. {'; '.join(report.faults)}. "
            if self._mismatch == "stop":
                raise WeightUpdateError(f"{text}{REMEDY}")
            logger.warning(f"{text}Training goes on (--rollout_mismatch warn).")

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Keep a failure until all ranks meet, and log it: a launcher may end this rank before."""
        try:
            yield
        except Exception as e:
            self._failure = self._failure or e
            logger.error(
                f"The weight update failed on rank {self._ranks.rank}: {type(e).__name__}: {e}"
            )

    # --- what ms-swift's update calls ---

    def load_colocated(self, state_dict: StateDict, engine: GRPOVllmEngine, load: Load) -> None:
        """Give tensors to this process's engine."""
        self._sent |= shapes_of(state_dict.items())
        with self._weights_of(engine).loading():
            load(state_dict)

    def send(self, state_dict: StateDict, load: Load) -> None:
        """Send tensors to the servers, and note their shapes. After a failure rank 0 gathers with
        the others, and sends nothing."""
        if self._ranks.rank > 0:
            load(state_dict)  # rank 0 sends them
        elif self._failure is None:
            with self._noted(), self._servers.bounded() if self._servers else nullcontext():
                self._sent |= shapes_of(state_dict.items())
                load(state_dict)

    def load_adapter(self, engine: GRPOVllmEngine, move: Callable[[], None]) -> None:
        """Give an adapter to this process's engine by `move`, which gathers it before."""
        with self._weights_of(engine).adapter():
            move()

    def _weights_of(self, engine: GRPOVllmEngine) -> EngineWeights:
        if self._engine is None:
            worker = engine.inner_model_executor.driver_worker.worker
            self._engine = EngineWeights(worker.model_runner)
            if not has_accelerator():  # no GPU has run it for a colocated engine
                self._engine.begin_watch()
        return self._engine

    def send_adapter(self, client: VLLMClient, move: Callable[[], None]) -> None:
        """Send an adapter to the servers by `move`, which gathers it and calls ms-swift's client on
        rank 0."""
        if self._ranks.rank > 0:
            move()
            return
        send, send_parts = client.update_adapter_flattened_param, client.update_adapter_param

        def send_noted(config: LoraConfig, metadatas: list[Any], flattened: Tensor) -> None:
            bucket = FlattenedTensorBucket(flattened_tensor=flattened, metadata=metadatas)
            self.send(bucket.reconstruct_tensors(), lambda _: send(config, metadatas, flattened))

        def send_parts_noted(config: LoraConfig, tensors: StateDict) -> None:
            self.send(tensors, partial(send_parts, config))

        with (
            replaced(client, "update_adapter_flattened_param", send_noted),
            replaced(client, "update_adapter_param", send_parts_noted),
        ):
            move()
