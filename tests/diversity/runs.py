"""Runs as a training leaves them, for tests of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_grpo_ext.diversity.analyzer import RoundAnalyzer
from swift_grpo_ext.diversity.record import RoundRecord, append_line, read_records
from swift_grpo_ext.diversity.sample import Sample
from tests.diversity.samples import group_of, row_of
from tests.record.rows import write_session

HOSTILE = "<script>alert('数字')</script>"


def make_run(
    folder: Path, rounds: Sequence[list[Sample]], media: Sequence[str] = ()
) -> list[RoundRecord]:
    """Write the monitor's records and a sample log."""
    analyzer = RoundAnalyzer(alarm_p=1e-6, is_greedy=False, seed_mode="engine")
    append_line(folder, 0)
    rows = []
    for samples in rounds:
        for record in analyzer.analyze(samples):
            append_line(folder, record)
        rows += [row_of(s) for s in samples]
    for row in rows:
        object.__setattr__(row, "media", list(media))
    write_session(folder, rows)
    return read_records(folder)


def frozen_rounds() -> list[list[Sample]]:
    """Round 2 generates what round 0 generated."""
    ids = [[i * 100 + k for k in range(40)] for i in range(4)]
    others = [[5000 + i * 100 + k for k in range(40)] for i in range(4)]
    return [
        group_of(*completions, step=step, text=HOSTILE + "x" * 3000)
        for step, completions in enumerate([ids, others, ids])
    ]
