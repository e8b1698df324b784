"""Trainings that are killed, and resumed."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from swift_grpo_ext.checks.resume import is_whole
from swift_grpo_ext.record.query import open_record
from swift_grpo_ext.tools.diff import diff
from tests.rig.fixtures import LEARNED_STEPS
from tests.rig.processes import SWIFT, Finished, started
from tests.rig.rounds import recorded, run_training, training_command

SECONDS = 600


def weights_of(checkpoint: Path) -> dict[str, str]:
    """Return digests of the files of all weights, and of the optimizer's state."""
    files = [*checkpoint.glob("*.safetensors"), checkpoint / "optimizer.pt"]
    assert len(files) > 1
    return {file.name: xxh3_64_hexdigest(file.read_bytes()) for file in files}


def assert_same_killed_and_resumed(
    whole: Path, folder: Path, *data: Any, argv: Sequence[str], ranks: int
) -> Finished:
    """Kill a run after two steps, and resume it for its last one. Assert that it has the tokens,
    log-probabilities, losses, gradients, weights and optimizer's state of the whole run."""
    killed, resumed = folder / "killed", folder / "resumed"
    counts = {"ranks": ranks, "steps": LEARNED_STEPS}
    command, env = training_command(*data, killed, *argv, **counts)
    halfway, deadline = killed / "run/checkpoint-2", time.monotonic() + SECONDS
    with started([str(SWIFT), *command], killed / "log", env) as running:
        while not is_whole(halfway):
            assert running.process.exitcode is None, running.output[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGKILL)
        assert running.wait(SECONDS).returncode == -signal.SIGKILL

    again = ("--output_dir", str(killed / "run"), "--resume_from_checkpoint", str(halfway))
    finished = run_training(*data, resumed, *argv, *again, **counts).check()

    samples = [recorded(run) for run in (whole, killed, resumed)]
    assert len(samples[2]) < len(samples[0]) <= len(samples[1]) + len(samples[2])
    result = diff(open_record(whole / "run"), open_record(killed / "run"))
    assert result.is_equal
    assert result.logprob_gap == 0
    assert result.num_steps == LEARNED_STEPS
    assert result.checkpoint == f"checkpoint-{LEARNED_STEPS}"
    assert result.settings == {}
    names = [f"run/checkpoint-{step}" for step in range(1, LEARNED_STEPS + 1)]
    sums = [weights_of(whole / name) for name in names]
    assert [weights_of(killed / name) for name in names] == sums
    assert len({tuple(s.values()) for s in sums}) == LEARNED_STEPS, "no weight moved"
    return finished
