"""Runs with the monitor's rows, made of given samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_grpo_ext.diversity.analyzer import RoundAnalyzer
from swift_grpo_ext.record.tables import DIVERSITY, DiversityRow, SampleRow
from tests.rig.diversity.samples import group_of
from tests.rig.record.rows import open_log, read_diversity

HOSTILE = "<script>alert('数字')</script>"


def make_run(folder: Path, rounds: Sequence[list[SampleRow]]) -> list[DiversityRow]:
    """Write a sample log and the monitor's rows; return these rows."""
    analyzer = RoundAnalyzer(is_greedy=False, seed_mode="engine")
    log = open_log(folder)
    for samples in rounds:
        log.append(analyzer.analyze(samples), DIVERSITY)
        log.append(samples)
    log.flush()
    return read_diversity(folder)


def frozen_rounds() -> list[list[SampleRow]]:
    """Return three rounds; round 2 has the tokens of round 0."""
    ids = [[i * 100 + k for k in range(40)] for i in range(4)]
    others = [[5000 + i * 100 + k for k in range(40)] for i in range(4)]
    return [
        group_of(*completions, step=step, text=HOSTILE + "x" * 3000)
        for step, completions in enumerate([ids, others, ids])
    ]
