"""Reads the memory in use on each rank's device at the end of parts of a step.

All processes on the device count, as in `nvidia-smi`. torch's own counters still count the memory
that a sleeping engine has given back, and a reset of their peaks would change the `memory(GiB)` of
ms-swift. Freed memory that torch keeps counts too: the end of a part shows the highest peak since
that cache was last emptied, of earlier parts too. Waking and sleeping empty it.
"""

from __future__ import annotations

import torch
from swift.utils import get_logger

from swift_grpo_ext.timing import MEMORY_PARTS

logger = get_logger()


def used_bytes(device: torch.device) -> int:
    """Return the bytes in use on a device. It waits for no kernel."""
    free, total = torch.accelerator.get_memory_info(device)
    return total - free


class MemoryReader:
    """Holds the most memory in use on a device at the end of each part since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reads = device.type != "cpu"
        self._largest: dict[str, float] = {}

    def read(self, part: str) -> None:
        """Read the memory at the end of a part. After a failure, warn and read no more."""
        if not self._reads or part not in MEMORY_PARTS:
            return
        try:
            gib = used_bytes(self._device) / 2**30
        except Exception as e:  # an accelerator without this counter must not end a run
            self._reads = False
            logger.warning(
                f"The log has no `memory/*` of {self._device}, which cannot be read: {e}"
            )
        else:
            self._largest[part] = max(gib, self._largest.get(part, 0.0))

    def take(self) -> dict[str, float]:
        """Return the memory in GiB by part, and forget it."""
        largest, self._largest = self._largest, {}
        return largest
