"""The rollout engine: ms-swift's vLLM engine for GRPO, and what it does more on CPU.

Takes the place of `GRPOVllmEngine` in the trainer (colocate) and in `swift rollout` (server).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import swift.infer_engine
import torch
from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine

from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.upstream.contract import Pin, verify

PINS = (
    Pin("swift.infer_engine", "GRPOVllmEngine", ("model_id_or_path",)),
    Pin("swift.infer_engine.vllm_engine", "VllmEngine.inner_model_executor"),
    Pin("vllm.v1.worker.gpu_model_runner", "GPUModelRunner.reload_weights",
        ("self", "weights_iterator", "weights_path", "is_checkpoint_format")),
)  # fmt: skip
verify(PINS)

ROLLOUT_MODULE = "swift.pipelines.infer.rollout"
UPSTREAM_EXTENSION = f"{ROLLOUT_MODULE}.WeightSyncWorkerExtension"
CPU_EXTENSION = "swift_grpo_ext.upstream.weight_sync.CPUWeightSyncWorkerExtension"


class RolloutEngine(GRPOVllmEngine):
    """Generates completions for `swift rlhf` and `swift rollout`."""

    def __init__(self, *args: Any, engine_kwargs: dict[str, Any] | None = None, **kw: Any) -> None:
        engine_kwargs = dict(engine_kwargs or {})
        extension = engine_kwargs.get("worker_extension_cls")
        if extension == UPSTREAM_EXTENSION and not has_accelerator():
            engine_kwargs["worker_extension_cls"] = CPU_EXTENSION
        super().__init__(*args, engine_kwargs=engine_kwargs, **kw)

    def reload_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights of a colocated engine, by their checkpoint names.

        vLLM's CPU layers keep packed weights only, which `model.load_weights` cannot fill (vLLM
        0.32, `dispatch_cpu_unquantized_gemm`); this rebuilds them, all but a tied head's, which
        waits for ms-swift's `finish_vllm_weight_reload` after all weights have come.
        """
        model_runner = self.inner_model_executor.driver_worker.worker.model_runner
        model_runner.reload_weights(weights_iterator=iter(weights))


def install() -> None:
    """Put `RolloutEngine` where the trainer and `swift rollout` look for their engine."""
    swift.infer_engine.GRPOVllmEngine = RolloutEngine
    if ROLLOUT_MODULE in sys.modules:
        sys.modules[ROLLOUT_MODULE].GRPOVllmEngine = RolloutEngine  # type: ignore[attr-defined]
