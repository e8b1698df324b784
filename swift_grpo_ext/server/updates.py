"""Whether a server's last weight update was sound, whoever sent it (docs/promises.md, C2).

A training with the plugin compares weights itself: faults of its updates stand in the log and in
`/health`. Any other client gets the fault as the answer to its update, or (adapters, which arrive
after the answer) to its next request. It draws nothing until an update is sound
(`--rollout_mismatch stop`). `/health` stays 200: a restart would destroy the evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swift.utils import get_logger

from swift_grpo_ext.server.replicas import ReplicaConnection

logger = get_logger()

NOT_LOOKED_AT = "not looked at"
REMEDY = (
    "Rollouts would be garbage. Send the weights again; start `swift rollout` with the --model "
    "that the client trains, and both with the same versions of ms-swift and transformers; or go "
    "on with `swift rollout ... --rollout_mismatch warn`."
)


class Updates:
    """The state of a server's weight updates. `watches`: workers look at what they receive."""

    def __init__(self, watches: bool) -> None:
        self.watches = watches
        self.is_due = False  # weights have come that nothing has looked at
        self.is_arriving = False  # others follow: nothing is judged or generated meanwhile
        self.state = "sound" if watches else NOT_LOOKED_AT
        self.fault = ""  # `/health` says this, or `state` where the last update has none

    def judge(self, replicas: Iterable[ReplicaConnection], replies: Iterable[Any]) -> None:
        """Set `state` and `fault` by the reports of each replica's workers (`WeightReport`); None
        stands for a replica that could not answer."""
        named, is_seen = [], True
        for replica, reports in zip(replicas, replies, strict=True):
            found = dict[str, None]()  # in order, each once
            for report in reports or ():
                found |= dict.fromkeys([*(report["faults"] or ()), report["adapter_fault"]])
            if texts := "; ".join(filter(None, found)):
                named.append(f"replica {replica.number}: {texts}")
            # Where a worker's watch has ended, its faults are None.
            is_seen &= bool(reports) and all(r["faults"] is not None for r in reports)
        self.state = "sound" if is_seen else NOT_LOOKED_AT
        self.fault = f"The weight update has failed. {'. '.join(named)}. {REMEDY}" if named else ""
        if self.fault:
            logger.error(self.fault)
