"""Sends a weight update from the trainer, and verifies that every engine has it.

    WeightSync.update(move)             on all ranks
        servers.reconnect()             rank 0 recreates the group if a replica has restarted
        move(group_recreated)           ms-swift gathers weights, and then calls one of
            load_colocated() or send()              whole weights, at once or in parts
            load_adapter() or send_adapter()        an unmerged adapter
        _check(engine_name, report)     compares each engine's report with the sent tensors

Each engine (`receiver.py`, or the colocated one) reports its loaded tensors and the findings of its
watch (`update.py`). The log-prob gap (`training/gap.py`) tests whether engines use the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from peft import LoraConfig
from swift.rlhf_trainers.utils import FlattenedTensorBucket
from swift.utils import get_logger

from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.rollout.wire import WeightReport
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.patches import wrapped
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

Load = Callable[[StateDict], None]  # ms-swift's: loads into its engine, or sends to servers


class WeightSync:
    """Makes and verifies the weight updates of a training (docs/promises.md, M4).

    `servers` is None on ranks that do not send, and with colocated engines. If `mismatch`
    (`--rollout_mismatch`) is "warn", training goes on after a watch has found a fault.
    """

    def __init__(
        self, ranks: RankGroup, servers: RolloutServers | None, mismatch: str = "stop"
    ) -> None:
        self._ranks = ranks
        self._servers = servers
        self._mismatch = mismatch
        self._engine: EngineWeights | None = None  # the colocated engine's; set by the first update
        self._sent: Shapes = {}
        self._failure: Exception | None = None  # this rank's first failure in this update

    def update(self, move: Callable[[bool], None]) -> None:
        """Make one update, on every rank. If sending fails, retry once with the remaining replicas.

        `move` is ms-swift's update, which calls `load_colocated`, `send` or their counterparts for
        adapters. Its argument is true if replicas may have no weights yet. Raise a
        `WeightUpdateError` if an engine that this rank updates has other weights, and a
        `RolloutError` if the update failed on another rank.
        """
        for is_last in (False, True):
            self._sent, self._failure = {}, None
            recreated = False
            with self._kept_failure():
                if self._servers is not None:  # on rank 0 only
                    recreated = self._servers.reconnect(again=is_last)
            # Raise on all ranks: gathering weights would hang if one rank failed.
            recreated = any(self._ranks.all_gather_or_raise(recreated, self._failure))
            with self._kept_failure():
                move(recreated)
                # A failure that `send` kept explains more than a list of missing tensors.
                if self._failure is None:
                    self._check_engines()
            if is_last:
                break
            can_repeat = self._servers is not None and not isinstance(
                self._failure, WeightUpdateError
            )
            # All ranks repeat, or none: gathering weights takes every rank. Sending the same
            # tensors again would not mend an engine that refuses them.
            kinds = self._ranks.all_gather(self._failure and ("sending" if can_repeat else "else"))
            if set(kinds) - {None} != {"sending"}:
                break
            if self._failure is not None:
                logger.warning("The weight update is retried.")
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
    def _kept_failure(self) -> Iterator[None]:
        """Keep a failure for the next collective. Log it now: a launcher may kill this rank."""
        try:
            yield
        except Exception as e:
            self._failure = self._failure or e
            logger.error(
                f"The weight update failed on rank {self._ranks.rank}: {type(e).__name__}: {e}"
            )

    # --- called by ms-swift's update ---

    def load_colocated(self, state_dict: StateDict, engine: GRPOVllmEngine, load: Load) -> None:
        """Load tensors into this process's engine."""
        self._sent |= shapes_of(state_dict.items())
        with self._weights_of(engine).loading():
            load(state_dict)

    def send(self, state_dict: StateDict, load: Load) -> None:
        """Send tensors to the servers, and record their shapes."""
        if self._ranks.rank > 0:
            load(state_dict)  # sends nothing: only rank 0 does
        # After a failure, rank 0 sends nothing, but goes on to gather with the others.
        elif self._failure is None:
            with self._kept_failure(), self._servers.bounded() if self._servers else nullcontext():
                self._sent |= shapes_of(state_dict.items())
                load(state_dict)

    def load_adapter(self, engine: GRPOVllmEngine, move: Callable[[], None]) -> None:
        """Load an adapter into this process's engine; `move` gathers and loads it."""
        with self._weights_of(engine).adapter():
            move()

    def _weights_of(self, engine: GRPOVllmEngine) -> EngineWeights:
        if self._engine is None:
            worker = engine.inner_model_executor.driver_worker.worker
            self._engine = EngineWeights(worker.model_runner)
            if not has_accelerator():  # untested on GPUs for a colocated engine
                self._engine.begin_watch()
        return self._engine

    def send_adapter(self, client: VLLMClient, move: Callable[[], None]) -> None:
        """Send an adapter to the servers; `move` gathers it and calls rank 0's client."""
        if self._ranks.rank > 0:
            move()
            return

        def record(send: Callable[..., None], config: LoraConfig, *parts: Any) -> None:
            tensors = parts[0]  # by name
            if len(parts) > 1:  # a flattened adapter: its metadata and one tensor
                bucket = FlattenedTensorBucket(metadata=parts[0], flattened_tensor=parts[1])
                tensors = bucket.reconstruct_tensors()
            self.send(tensors, lambda _: send(config, *parts))

        with (
            wrapped(client, "update_adapter_flattened_param", record),
            wrapped(client, "update_adapter_param", record),
        ):
            move()
