"""Whether a server's last weight update was sound, whoever sent it (docs/promises.md, C2).

A training with the plugin compares weights itself: faults of its updates stand in the log and in
`/health`. Any other client gets the fault as the answer to its update, or to the next request where
the update is made after its answer (adapters). It draws nothing until an update is sound
(`--rollout_mismatch stop`). `/health` stays 200: a restart would throw the evidence away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swift.utils import get_logger

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
        self.is_due = False  # weights have come that were not looked at yet
        self.is_arriving = False  # others follow: nothing is judged or generated meanwhile
        self.state = "sound" if watches else NOT_LOOKED_AT
        self.fault = ""  # `/health` says this, or `state` where the last update has none

    def judge(self, replies: Iterable[tuple[int, Any]]) -> None:
        """Set `state` and `fault` by each replica's number and the reports of its workers
        (`WeightReport`), None where it could not answer."""
        named, is_seen = [], True
        for number, reports in replies:
            found = [f for r in reports or () for f in (*(r["faults"] or ()), r["adapter_fault"])]
            if any(found):
                named.append(f"replica {number}: {'; '.join(dict.fromkeys(filter(None, found)))}")
            # Where a worker's watch has ended, its faults are None.
            is_seen &= bool(reports) and all(r["faults"] is not None for r in reports)
        self.state = "sound" if is_seen else NOT_LOOKED_AT
        self.fault = f"The weight update has failed. {'. '.join(named)}. {REMEDY}" if named else ""
        if self.fault:
            logger.error(self.fault)
