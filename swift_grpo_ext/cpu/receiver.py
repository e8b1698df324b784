"""Loads weight updates in vLLM workers on CPU. vLLM imports this module in every worker process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swift_grpo_ext import cpu
from swift_grpo_ext.upstream.patches import PatchPhase, apply, replaced
from swift_grpo_ext.weights.receiver import VerifiedWeightSyncWorkerExtension

# vLLM's worker processes have not registered the plugin.
cpu.register()
apply(PatchPhase.WORKER)


class CPUWeightSyncWorkerExtension(VerifiedWeightSyncWorkerExtension):
    def init_communicator(self, *args: Any, **kwargs: Any) -> None:
        # ms-swift's method does nothing if there is a communicator; `received` then stays, too.
        if self.communicator is None:
            super().init_communicator(*args, **kwargs)
            self.received: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Collect the tensors that ms-swift would load."""

        # CPU layers have packed their weights and dropped the originals (vLLM 0.32,
        # model_executor/layers/utils.py): only a reload of the whole model fills them.
        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.received.extend(weights)

        with replaced(self.model_runner.model, "load_weights", load_weights):
            yield

    def process_weights_after_loading(self) -> None:
        weights, self.received = self.received, []
        with self.engine_weights.loading():
            self.model_runner.reload_weights(weights_iterator=iter(weights))
        # `reload_weights` leaves the old packed weights in a tied head (vLLM 0.32).
        super().process_weights_after_loading()
