"""Runs with the monitor's rows, made of given samples or by a real training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swift_grpo_ext.diversity.analyzer import RoundAnalyzer
from swift_grpo_ext.record.tables import DIVERSITY, DiversityRow, SampleRow
from swift_grpo_ext.tools.runs import find_run
from tests.rig.diversity.samples import group_of
from tests.rig.processes import PLUGIN, Finished, swift
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


def train_watched(
    assets: Path, rows: Path, folder: Path, *argv: str, ranks: int = 1
) -> tuple[Finished, Path]:
    """Train on digits with the monitor; return the end, and ms-swift's version of the folder."""
    plugins = (PLUGIN, "examples/digits/rewards.py", "examples/diversity/favour.py")
    command = [
        *("rlhf", "examples/digits/grpo.yaml", "--external_plugins", *plugins),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(rows)),
        *("--output_dir", str(folder / "run"), "--callbacks", "diversity", *argv),
    ]
    env = {"NPROC_PER_NODE": str(ranks)} if ranks > 1 else {}
    finished = swift(*command, log=folder / "log", env=env)
    assert finished.returncode == 0, finished.cause
    return finished, find_run(folder / "run")
