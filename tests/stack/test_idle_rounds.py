"""A training that trains nothing, and an evaluation that leaves rows out, say so once."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import SampleId
from tests.stack import rounds
from tests.stack.rounds import logged_steps, run_training, write_lines

pytestmark = [pytest.mark.stack, pytest.mark.extra]


def test_completions_that_are_all_cut_and_rows_that_fill_no_batch(
    assets: Path, tmp_path: Path
) -> None:
    rows = rounds.digits(assets, range(12))
    evaluated = write_lines(tmp_path / "val.jsonl", rows[:5])
    finished = run_training(
        *(assets, write_lines(tmp_path / "rows.jsonl", rows), tmp_path),
        *("--overlong_filter", "true", "--max_completion_length", "1"),
        *("--val_dataset", str(evaluated), "--eval_strategy", "steps", "--eval_steps", "4"),
        *("--per_device_eval_batch_size", str(4 * rounds.GROUP_SIZE)),
        *("--learning_rate", "1e-3", *rounds.LORA),
        steps=4,
    )
    assert finished.returncode == 0, finished.cause
    steps = logged_steps(tmp_path / "run")
    assert [(step["loss"], step["grad_norm"]) for step in steps] == [(0, 0)] * 4
    names = map(SampleId.parse, rounds.recorded(tmp_path))
    assert len({name.group for name in names if name.phase == "eval"}) == 4
    log = (tmp_path / "log").read_text(encoding="utf-8")
    cut = "--overlong_filter true: all completions of 3 rounds in a row were cut"
    assert log.count(cut) == 1
    assert log.count("--val_dataset: 1 of 5 rows are left out of each evaluation") == 1
