"""A plugin for tests: servers' engines that fail in a given round, weights that arrive changed,
trainers that are killed, wait, or fail to score.

What is to happen comes from the environment variable `FAULTS`, as JSON: a list of faults with the
step at which a rollout meets them, the turn and the replica, with the word `weights`, or the word
`trainer` and a rank, which meets them between a step's rollout and its training if the reward
`fate` is asked for. `MAX_RESTARTS` is how often a server starts replicas anew, and `STALL_MINUTES`
how long a process waits before it reports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms

from swift_grpo_ext.rollout import engine, wire
from swift_grpo_ext.rollout.answers import answer_of
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server import replicas
from swift_grpo_ext.timing import stalls
from swift_grpo_ext.upstream.rows import column_of

SECONDS_OF_PAUSE = 20.0

FAULTS = json.loads(os.environ.get("FAULTS", "[]"))


def is_this_ranks(fault: dict[str, Any]) -> bool:
    return str(fault.get("rank", 0)) == os.environ.get("RANK", "0")


def pause() -> None:
    """Stop this process as an overloaded machine would, and go on later."""
    going_on = f"sleep {SECONDS_OF_PAUSE:g}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", going_on])
    os.kill(os.getpid(), signal.SIGSTOP)


def meet(step: int, turn: int) -> None:
    replica = os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0")
    for fault in FAULTS:
        is_now = fault.get("step") == step and fault.get("turn", 0) == turn
        is_now &= is_this_ranks(fault)
        if is_now and str(fault.get("replica", 0)) == replica:
            if "noted" in fault:  # the file that tells when
                Path(fault["noted"]).write_text(str(time.time()))
            kind = fault.get("kind")
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif kind == "kill server":
                server = parent_process()
                assert server is not None
                assert server.pid is not None
                os.kill(server.pid, signal.SIGKILL)
                time.sleep(60)  # ends with it
            elif kind == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif kind == "pause":
                pause()
            elif kind == "raise":
                raise OSError("the disk is gone")


class Fate(ORM):
    """Rewards nothing; ends its rank, raises, or waits until a file `go` is there."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        step, rank = SampleId.parse(request_id[0]).step, int(os.environ.get("RANK", "0"))
        for fault in FAULTS:
            if fault.get("trainer") and (fault["step"], fault["rank"]) == (step, rank):
                if fault["trainer"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault["trainer"] == "pause":
                    pause()
                    break
                if fault["trainer"] == "sleep":
                    time.sleep(SECONDS_OF_PAUSE)
                    break
                if fault["trainer"] == "raise":
                    raise OSError("the judge is gone")
                folder = Path(fault["folder"])
                (folder / "waiting").touch()
                while not (folder / "go").exists():
                    time.sleep(0.2)
        return [0.0] * len(completions)


class FailingEngine(engine.RolloutEngine):
    def infer(self, infer_requests: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super().infer(infer_requests, *args, **kwargs)
        if any(is_this_ranks(fault) and fault.get("kind") == "forget" for fault in FAULTS):
            answer_of(outputs[0]).completions[0].logprobs.pop()
        return outputs

    def _batch_encode(self, infer_requests: Any, *args: Any, **kwargs: Any) -> Any:
        for request in infer_requests:
            metadata = wire.read_metadata(column_of(request, "data_dict"))
            if metadata is not None:
                meet(metadata.sample_id.step, metadata.sample_id.turn)
        return super()._batch_encode(infer_requests, *args, **kwargs)


def lose_received_weights() -> None:
    """Lose a tensor of what a server's worker received."""
    from swift_grpo_ext.cpu.receiver import CPUWeightSyncWorkerExtension as Extension

    receive = Extension.process_weights_after_loading

    def process_weights_after_loading(self: Any) -> None:
        self.received = self.received[1:]
        receive(self)

    Extension.process_weights_after_loading = process_weights_after_loading


orms["fate"] = Fate
stalls.MINUTES = float(os.environ.get("STALL_MINUTES", "10"))
replicas.MAX_RESTARTS = int(os.environ.get("MAX_RESTARTS", "3"))
engine.RolloutEngine = FailingEngine  # the server installs it
rollout = sys.modules.get("swift.pipelines.infer.rollout")
if rollout is not None:
    rollout.GRPOVllmEngine = FailingEngine
if any("weights" in fault for fault in FAULTS):
    lose_received_weights()
