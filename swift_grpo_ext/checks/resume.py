"""Which checkpoints of a run are whole, judged by the files on the disk.

The Trainer writes a checkpoint's `trainer_state.json` last: one without it was not finished.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from swift_grpo_ext.checks.finding import Findings, error

if TYPE_CHECKING:
    from swift.arguments import RLHFArguments

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


def check_resume(args: RLHFArguments) -> Findings:
    """Refuse a `--resume_from_checkpoint` that is not whole, and name the last one that is."""
    given = args.resume_from_checkpoint
    # --resume_only_model reads weights alone, which other programs may have written.
    if not given or args.resume_only_model or is_whole(Path(given)):
        return
    run = Path(given).parent
    remedy = f"{run} has no whole checkpoint: start without --resume_from_checkpoint."
    if last := last_whole(run):
        remedy = f"The last whole one is {last}: resume with --resume_from_checkpoint {last}."
    yield error(
        f"resume_from_checkpoint {given}",
        f"is no whole checkpoint: its {TRAINER_STATE}, which is written last, is missing or cut "
        "short.",
        remedy,
    )
