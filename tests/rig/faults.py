"""A plugin for tests: engines of servers, and trainers, that fail in a given round.

The environment variable `FAULTS` holds a JSON list of faults, each with a `step` and a `kind`. A
fault of a trainer has a `rank`; it happens between the rollout of a step and its training, in the
reward `fate`. Other faults are those of a replica. `MAX_RESTARTS` is how often a server restarts a
replica, `STALL_MINUTES` how long a process waits before it reports.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms

from swift_grpo_ext.rollout import engine, wire
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.server import replicas
from swift_grpo_ext.timing import stalls
from swift_grpo_ext.upstream.rows import column_of

SECONDS_OF_PAUSE = 10

FAULTS = json.loads(os.environ.get("FAULTS", "[]"))


def happen(fault: dict[str, Any]) -> None:
    if "noted" in fault:  # the file to which the time is written
        Path(fault["noted"]).write_text(str(time.time()))
    kind = fault["kind"]
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "pause":  # as on an overloaded machine
        going_on = f"sleep {SECONDS_OF_PAUSE}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", going_on])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raise":
        raise OSError("the judge is gone")
    else:
        folder = Path(fault["waits in"])
        folder.mkdir()
        while not (folder / "go").exists():
            time.sleep(0.2)


class Fate(ORM):
    """Rewards nothing; lets its rank's faults happen."""

    def __call__(self, completions: list[str], request_id: list[str], **_: Any) -> list[float]:
        place = (SampleId.parse(request_id[0]).step, int(os.environ.get("RANK", "0")))
        for fault in FAULTS:
            if (fault["step"], fault.get("rank")) == place:
                happen(fault)
        return [0.0] * len(completions)


class FailingEngine(engine.RolloutEngine):
    def _batch_encode(self, infer_requests: Any, *args: Any, **kwargs: Any) -> Any:
        for request in infer_requests:
            metadata = wire.read_metadata(column_of(request, "data_dict"))
            for fault in FAULTS if metadata is not None else ():
                place = (metadata.sample_id.step, os.environ.get("SWIFT_ROLLOUT_DP_RANK", "0"))
                if (fault["step"], str(fault.get("replica", 0))) == place and "rank" not in fault:
                    happen(fault)
        return super()._batch_encode(infer_requests, *args, **kwargs)


orms["fate"] = Fate
stalls.MINUTES = float(os.environ.get("STALL_MINUTES", "10"))
replicas.MAX_RESTARTS = int(os.environ.get("MAX_RESTARTS", "3"))
engine.RolloutEngine = FailingEngine  # the server installs it
rollout = sys.modules.get("swift.pipelines.infer.rollout")
if rollout is not None:
    rollout.GRPOVllmEngine = FailingEngine
