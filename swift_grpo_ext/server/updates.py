"""Whether a server's last weight update was sound, whoever sent it (docs/promises.md, C2).

A training with the plugin compares weights itself: faults of its updates stand in the log and in
`/health`. Any other client gets the fault as the answer to its update, or to the next request where
the update is made after its answer (adapters). It draws nothing until an update is sound
(`--rollout_mismatch stop`). `/health` stays 200: a restart would throw the evidence away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swift.pipelines.infer.rollout import SwiftRolloutDeploy
from swift.utils import get_logger

logger = get_logger()

NOT_LOOKED_AT = "not looked at"
REMEDY = (
    "Rollouts would be garbage. Send the weights again; start `swift rollout` with the --model "
    "that the client trains, and both with the same versions of ms-swift and transformers; or go "
    "on with `swift rollout ... --rollout_mismatch warn`."
)


class Updates:
    """A server keeps the state of its updates here."""

    def __init__(self, server: SwiftRolloutDeploy) -> None:
        self._server = server
        self.watches: bool = server.args.watches_weights
        self.is_due = False  # weights have come that were not looked at yet
        self.is_arriving = False  # others follow: nothing is judged or generated meanwhile
        self.state = "sound" if self.watches else NOT_LOOKED_AT
        self.fault = ""  # `/health` says this, or `state` where the last update has none

    def judge(self, replies: Sequence[Any]) -> None:
        """Set `state` and `fault` by each replica's reply: what the watches (`weights/watch.py`) of
        its workers have found in the last update."""
        told = []
        for connection, workers in zip(self._server.connections, replies, strict=True):
            found = list[str]()
            for report in workers or ():
                found += filter(None, [*(report["faults"] or ()), report["adapter_fault"]])
            if found:
                told.append(f"replica {connection.number}: {'; '.join(dict.fromkeys(found))}")
        # Nothing has looked where a worker's watch has ended, or a replica could not answer.
        is_seen = all(
            workers and all(report["faults"] is not None for report in workers)
            for workers in replies
        )
        self.state = "sound" if is_seen else NOT_LOOKED_AT
        self.fault = f"The weight update has failed. {'. '.join(told)}. {REMEDY}" if told else ""
        if self.fault:
            logger.error(self.fault)
