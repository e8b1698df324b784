"""Weight updates at the end of an engine without an accelerator. vLLM imports this module in every
process that holds a worker.

vLLM's CPU layers pack their weights and drop the originals (vLLM 0.32, model_executor/layers/
utils.py): a worker collects the tensors, and reloads the model once all have come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from swift_grpo_ext.cpu import patches
from swift_grpo_ext.cpu.engines import reload_weights
from swift_grpo_ext.upstream.patches import Moment, apply, replaced
from swift_grpo_ext.weights.receiver import VerifiedWeightSyncWorkerExtension

# In a process that vLLM has started nobody has called `register()`.
patches.register()
apply(Moment.WORKER)


class CPUWeightSyncWorkerExtension(VerifiedWeightSyncWorkerExtension):
    """The extension for CPU, which reloads packed weights."""

    def init_communicator(self, *args: Any, **kwargs: Any) -> None:
        if self.communicator is None:
            super().init_communicator(*args, **kwargs)
            self.received: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def _recorded_loads(self) -> Iterator[None]:
        """Collect what ms-swift would load."""

        def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            self.received.extend(weights)

        with replaced(self.model_runner.model, "load_weights", load_weights):
            yield

    def process_weights_after_loading(self) -> None:
        """Reload the model with all that was received since the last reload."""
        weights, self.received = self.received, []
        # The parent's block notes what is loaded, to be verified: now, and not as it was received.
        with super()._recorded_loads():
            reload_weights(self.model_runner, weights)
        # `reload_weights` leaves a tied head with the packed weights of before (vLLM 0.32).
        super().process_weights_after_loading()
