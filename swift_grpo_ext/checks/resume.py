"""Finds the whole checkpoints of a run, by their files."""

from __future__ import annotations

import json
from pathlib import Path

TRAINER_STATE = "trainer_state.json"  # the Trainer writes it last


def is_whole(checkpoint: Path) -> bool:
    """Return whether all of a checkpoint was written."""
    try:
        return "global_step" in json.loads((checkpoint / TRAINER_STATE).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def last_whole(run: Path) -> Path | None:
    """Return the newest whole checkpoint in a run's directory; None if there is none."""
    whole = [folder for folder in run.glob("checkpoint-[0-9]*") if is_whole(folder)]
    return max(whole, key=lambda folder: int(folder.name.partition("-")[2]), default=None)
