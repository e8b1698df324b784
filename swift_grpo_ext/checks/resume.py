"""Which checkpoints of a run are whole, judged by the files on the disk.

The Trainer writes a checkpoint's `trainer_state.json` last: one without it was not finished.
"""

from __future__ import annotations

import json
from pathlib import Path

TRAINER_STATE = "trainer_state.json"


def is_whole(checkpoint: Path) -> bool:
    """Return whether all of a checkpoint was written."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


def last_whole(run: Path) -> Path | None:
    """Return the newest whole checkpoint in a run's directory; None where there is none."""
    steps = {
        int(number): folder
        for folder in run.glob("checkpoint-*")
        if (number := folder.name.removeprefix("checkpoint-")).isdecimal() and is_whole(folder)
    }
    return steps[max(steps)] if steps else None
