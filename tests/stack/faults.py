"""A plugin for tests: rollout engines that fail in a given round, weights that are lost, trainers
that are killed or wait.

What is to happen comes from the environment variable `FAULTS`, as JSON: a list of faults with the
step at which a rollout meets them and the replica, with the word `weights`, or with the word
`trainer` and a rank, which meets them between a step's rollout and its training if the reward
`fate` is asked for. `MAX_RESTARTS` is how often a server starts replicas anew.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from swift.rewards import ORM, orms

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.engine import RolloutEngine
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server import replicas

CANARY = 2**31
"""As in weights/sync.py, which a server has no need to import."""

FAULTS = json.loads(os.environ.get("FAULTS", "[]"))


def meet(step: int) -> None:
    replica = os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0")
    for fault in FAULTS:
        if fault.get("step") == step and str(fault.get("replica", 0)) == replica:
            if "noted" in fault:  # the file that tells when
                Path(fault["noted"]).write_text(str(time.time()))
            if fault["kind"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault["kind"] == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault["kind"] == "raise":
                raise OSError("the disk is gone")


class Fate(ORM):
    """Rewards nothing; ends its rank, or keeps it until a file `go` is there."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        step, rank = SampleId.parse(request_id[0]).step, int(os.environ.get("RANK", "0"))
        for fault in FAULTS:
            if fault.get("trainer") and (fault["step"], fault["rank"]) == (step, rank):
                if fault["trainer"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                folder = Path(fault["folder"])
                (folder / "waiting").touch()
                while not (folder / "go").exists():
                    time.sleep(0.2)
        return [0.0] * len(completions)


class FailingEngine(RolloutEngine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if any(fault.get("weights") == "ignore" for fault in FAULTS):
            keep_first_weights(type(self.inner_model))

    def _batch_encode(self, infer_requests: Any, *args: Any, **kwargs: Any) -> Any:
        for request in infer_requests:
            metadata = wire.read_metadata(wire.data_dict_of(request))
            if metadata is not None and metadata.sample_id.number != CANARY:
                meet(metadata.sample_id.step)
        return super()._batch_encode(infer_requests, *args, **kwargs)

    def reload_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return super().reload_weights(spoil(list(weights)))


def keep_first_weights(model: Any) -> None:
    """Let a vLLM model say that it takes all weights, and hold on to those of the first update."""
    load = model.load_weights
    first: list[tuple[str, torch.Tensor]] = []

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        new = [(name, tensor.clone()) for name, tensor in weights]
        first.extend(() if first else new)
        return load(self, first)

    model.load_weights = load_weights


def spoil(weights: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Weights as a bad wire would bring them."""
    for fault in FAULTS:
        if fault.get("weights") == "flip":
            name, tensor = weights[0]
            flipped = tensor.clone()
            flipped.view(torch.int32).view(-1)[0] ^= 1
            weights = [(name, flipped), *weights[1:]]
    return weights


def install() -> None:
    import sys

    from swift_grpo_ext.rollout import engine

    orms["fate"] = Fate
    replicas.MAX_RESTARTS = int(os.environ.get("MAX_RESTARTS", "3"))
    engine.RolloutEngine = FailingEngine  # type: ignore[misc]  # the trainer installs it
    rollout = sys.modules.get("swift.pipelines.infer.rollout")
    if rollout is not None:
        rollout.GRPOVllmEngine = FailingEngine  # type: ignore[attr-defined]
    if any("weights" in fault for fault in FAULTS):
        from swift_grpo_ext.weights.receiver import CPUWeightSyncWorkerExtension

        receive = CPUWeightSyncWorkerExtension.process_weights_after_loading

        def process_weights_after_loading(self: Any) -> None:
            self._received = spoil(self._received)
            receive(self)

        CPUWeightSyncWorkerExtension.process_weights_after_loading = (  # type: ignore[method-assign]
            process_weights_after_loading
        )


install()
