"""Sessions of a folder have unique numbers and are resumed after a kill (V1); two trainings never
share a folder."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.checks.finding import enforce
from swift_grpo_ext.ranks import RankGroup, RolloutError
from swift_grpo_ext.record import log
from swift_grpo_ext.record.log import check_output_dir, record_files
from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.recorder import SampleRecorder
from swift_grpo_ext.record.tables import SAMPLES
from tests.rig.arguments import ROOT, command_line_arguments
from tests.rig.ranks import ThreadRanks, run_rank_groups
from tests.rig.record.rows import row_of, sample_id

TRAINING = """
import sys
from pathlib import Path
from swift_grpo_ext.record.log import claim_session
from tests.rig.record.rows import row_of, sample_id, write_session
folder = Path(sys.argv[1])
rows = [row_of(sample_id(step)) for step in range(12)]
write_session(folder, rows, session=claim_session(folder))
print("written", flush=True)
sys.stdin.read()
"""


def open_run(folder: Path, ranks: RankGroup | None = None, start_step: int = 0) -> SampleRecorder:
    recorder = SampleRecorder(str(folder), ranks or RankGroup())
    recorder.open(start_step=start_step)
    return recorder


def write(recorder: SampleRecorder, steps: range) -> None:
    for step in steps:
        recorder.append([row_of(sample_id(step))])
        recorder.write()
    recorder.flush()


@contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run another process that has recorded twelve steps."""
    argv = [sys.executable, "-c", TRAINING, str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        try:
            yield process
        finally:
            process.kill()


def steps_of(folder: Path) -> list[int]:
    return read_samples(folder, columns=["step"])["step"].to_pylist()


def test_two_trainings_in_one_folder_and_a_resume_after_a_kill(tmp_path: Path) -> None:
    """The second is refused on all ranks, and before its model is loaded, if it would write. After
    the first was killed, it can be resumed."""

    def check(**changes: Any) -> None:
        enforce(check_output_dir(command_line_arguments("rlhf", output_dir=folder, **changes)))

    def second(ranks: ThreadRanks) -> str:
        with pytest.raises((log.RunInUseError, RolloutError)) as caught:
            open_run(tmp_path, ranks)
        return str(caught.value)

    folder = str(tmp_path)
    check()
    with training(tmp_path) as first:
        files = record_files(SAMPLES.folder(tmp_path))
        said = run_rank_groups(2, second)
        assert said[1] == f"The rollout failed on rank 0: RunInUseError: {said[0]}"
        process = rf"--output_dir {tmp_path}: process {first.pid} on \S+ \(since [-0-9: ]+\) trains"
        assert re.match(process, said[0])
        assert "give this training another --output_dir" in said[0]
        for changes in ({}, {"sample_log": "none", "callbacks": ["diversity"]}):
            with pytest.raises(ValueError, match=rf"^{process}"):
                check(**changes)
        check(sample_log="none")  # it would write nothing
        SampleRecorder(folder, RankGroup(), kept="none").open(start_step=0)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert record_files(SAMPLES.folder(tmp_path)) == files
    check()
    write(open_run(tmp_path, start_step=8), range(8, 14))
    assert steps_of(tmp_path) == list(range(14))


def test_disks_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each training still has its own files."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with training(tmp_path):
        monkeypatch.setattr("fcntl.lockf", refuse)
        write(open_run(tmp_path), range(12))
        sessions = {file.session for file in record_files(SAMPLES.folder(tmp_path))}
        assert sessions == {0, 1}


def test_sessions_of_one_process_have_files_of_their_own(tmp_path: Path) -> None:
    """Two sessions are open at once, as in a notebook; the first one keeps its lock."""
    for recorder in (open_run(tmp_path), open_run(tmp_path)):
        write(recorder, range(2))
    assert {file.session for file in record_files(SAMPLES.folder(tmp_path))} == {0, 1}
    assert steps_of(tmp_path) == [0, 1]
    probe = f"from {log.__name__} import *; print(reason_against({str(tmp_path)!r}))"
    said = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True)
    assert said.stdout.startswith(f"process {os.getpid()} on ")


def test_a_folder_that_cannot_be_read_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end at the start: a session could not find its number later."""

    def fail(run_dir: str) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(log, "next_session", fail)

    def work(ranks: ThreadRanks) -> None:
        kind = OSError if ranks.rank == 0 else RolloutError
        with pytest.raises(kind, match="Stale file handle"):
            open_run(tmp_path, ranks)

    run_rank_groups(2, work)


def test_a_folder_that_cannot_be_written_is_claimed_by_nobody(tmp_path: Path) -> None:
    """Its rounds wait for the disk."""
    (tmp_path / "samples").touch()
    recorder = open_run(tmp_path)
    write(recorder, range(2))
    (tmp_path / "samples").unlink()
    write(recorder, range(2, 3))
    assert steps_of(tmp_path) == [0, 1, 2]
