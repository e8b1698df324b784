"""Which checkpoints of a run are whole, by what stands on the disk. Pure.

The Trainer writes a checkpoint's `trainer_state.json` last: one without it was not finished.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift_grpo_ext.checks.finding import Findings, error

TRAINER_STATE = "trainer_state.json"


def is_whole(checkpoint: Path) -> bool:
    """Whether all of a checkpoint was written."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


def last_whole(run: Path) -> Path | None:
    """The newest whole checkpoint in a run's directory; None where there is none."""
    steps = {
        int(number): folder
        for folder in run.glob("checkpoint-*")
        if (number := folder.name.removeprefix("checkpoint-")).isdecimal() and is_whole(folder)
    }
    return steps[max(steps)] if steps else None


def how_to_go_on(run: Path) -> str:
    """What to do where a run has no use of its newest checkpoint, as a sentence."""
    last = last_whole(run)
    if last is None:
        return f"{run} has no whole checkpoint: start without --resume_from_checkpoint."
    return f"The last whole one is {last}: resume with --resume_from_checkpoint {last}."


def check_resume(args: Any) -> Findings:
    """`--resume_from_checkpoint` names a whole checkpoint; else the last one that was is named."""
    given = getattr(args, "resume_from_checkpoint", None)
    if given and not getattr(args, "resume_only_model", False) and not is_whole(Path(given)):
        yield error(
            f"resume_from_checkpoint {given}",
            f"is no whole checkpoint: its {TRAINER_STATE}, which is written last, is "
            "missing or cut short.",
            how_to_go_on(Path(given).parent),
        )
