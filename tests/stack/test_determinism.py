"""`--full_determinism true`: a run that is killed and resumed equals an uninterrupted one, bit for
bit (S4, R9)."""

from __future__ import annotations

import re
from pathlib import Path

from tests.rig.resuming import assert_same_killed_and_resumed
from tests.rig.rounds import LEARNING, best_argv


def test_killed_and_resumed(
    assets: Path, learning_rows: Path, learned_full: Path, tmp_path: Path
) -> None:
    """At its end the run loads its best weights."""
    argv = (*LEARNING, *best_argv(learning_rows))
    finished = assert_same_killed_and_resumed(
        learned_full, tmp_path, assets, learning_rows, argv=argv, ranks=1
    )
    # Of the checkpoint to resume from, and of the best one.
    assert len(re.findall(r"The weights of \S+ are loaded", finished.output)) == 2
