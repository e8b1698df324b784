"""`swift-grpo-ext replay` on real runs: recorded groups are generated again from their checkpoints,
token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_group
from swift_grpo_ext.record.tables import LOGPROB_STEPS
from tests.rig.processes import COMMAND, started
from tests.rig.rounds import BATCH, GROUP_SIZE

SAME = 1e-4
"""Bound in nats on log-probabilities of the same weights in float32. The record rounds them beside,
and LoRA weights are merged again."""


@pytest.mark.parametrize(
    ("training", "step", "as_content"), [("learned_full", 2, True), ("learned_lora", 1, False)]
)
def test_a_group_is_drawn_again(
    training: str, step: int, as_content: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A group's image was given as content, or as a path."""
    run: Path = request.getfixturevalue(training) / "run"
    before = sorted(path.name for path in run.iterdir())
    numbers = range(BATCH // GROUP_SIZE)
    groups = (read_group(run, phase="train", step=step, number=0, group=n) for n in numbers)
    rows = next(g for g in groups if g[0].media[0].startswith("blake2b:") == as_content)
    place = ("--round", str(step), "--group", str(rows[0].sample_id.group))
    command = [*COMMAND, "replay", str(run), *place, "--json"]
    env = {"RECORD_DIR": str(tmp_path)}  # for the run's own plugin (`recorder.py`)
    out = tmp_path / "out"
    with started(command, tmp_path / "log", env, out=out) as running:
        finished = running.wait(900)
    assert finished.returncode == 0, finished.cause
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["weight_version"] == step
    assert result["weights"].endswith(f"checkpoint-{step}")
    assert result["equal"] is True
    for sample, row in zip(result["samples"], rows, strict=True):
        assert sample["num_tokens"] == len(row.token_ids)
        # The record's rounding may change a log-probability by one of its steps.
        assert sample["logprob_gap"] < SAME + 1 / LOGPROB_STEPS
    # A model that was merged for it is gone.
    assert sorted(path.name for path in run.iterdir()) == before
