"""`swift-grpo-ext replay` on real runs: recorded groups are generated again from their checkpoints,
token by token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_grpo_ext.record.query import read_group
from swift_grpo_ext.record.tables import LOGPROB_STEPS, SampleRow
from tests.rig.processes import COMMAND, Finished, started
from tests.rig.rounds import BATCH, GROUP_SIZE

SAME = 1e-4
"""Bound in nats on log-probabilities of the same weights in float32. The record rounds them beside,
and LoRA weights are merged again."""


def replay(run: Path, folder: Path, step: int, group: int) -> tuple[Finished, dict[str, Any]]:
    """Run the command; return its end and the JSON of its standard output."""
    out = folder / "out"
    argv = ("replay", str(run), "--round", str(step), "--group", str(group), "--json")
    env = {"RECORD_DIR": str(folder)}  # for the run's own plugin (`recorder.py`)
    with started([*COMMAND, *argv], folder / "log", env, out=out) as running:
        finished = running.wait(900)
    return finished, json.loads(out.read_text(encoding="utf-8"))


def assert_drawn_again(result: dict[str, Any], rows: Sequence[SampleRow]) -> None:
    """The record's rounding may change a log-probability by one of its steps."""
    assert result["equal"] is True
    for sample, row in zip(result["samples"], rows, strict=True):
        assert sample["num_tokens"] == len(row.token_ids)
        assert sample["logprob_gap"] < SAME + 1 / LOGPROB_STEPS


def logged_group(run: Path, step: int, *, as_content: bool) -> list[SampleRow]:
    """Return a group whose image was given as content, or as a path."""
    numbers = range(BATCH // GROUP_SIZE)
    groups = (read_group(run, phase="train", step=step, number=0, group=n) for n in numbers)
    return next(g for g in groups if g[0].media[0].startswith("blake2b:") == as_content)


def test_a_group_is_drawn_again(learned_full: Path, tmp_path: Path) -> None:
    run = learned_full / "run"
    rows = logged_group(run, 2, as_content=True)
    finished, result = replay(run, tmp_path, 2, rows[0].sample_id.group)
    assert finished.returncode == 0, finished.cause
    assert result["weight_version"] == 2
    assert_drawn_again(result, rows)


def test_lora(learned_lora: Path, tmp_path: Path) -> None:
    run = learned_lora / "run"
    before = sorted(path.name for path in run.iterdir())
    rows = logged_group(run, 1, as_content=False)
    finished, result = replay(run, tmp_path, 1, rows[0].sample_id.group)
    assert finished.returncode == 0, finished.cause
    assert result["weights"].endswith("checkpoint-1")
    assert_drawn_again(result, rows)
    assert sorted(path.name for path in run.iterdir()) == before  # the merged model is gone
