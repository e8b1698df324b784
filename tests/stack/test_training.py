"""A colocated engine samples with the trained weights (M4), the parts of a step add up to its time
(V5), and the log begins with features and ends with results. `replay` generates recorded groups
again from their checkpoints. A run that is killed and resumed equals an uninterrupted one, bit for
bit (S4, R9)."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from swift_grpo_ext.record.query import read_group
from swift_grpo_ext.record.tables import LOGPROB_STEPS
from swift_grpo_ext.timing.step_clock import PARTS, ROLLOUT_PARTS
from tests.rig import policy
from tests.rig.fixtures import LEARNED_STEPS
from tests.rig.processes import COMMAND, run
from tests.rig.resuming import assert_same_killed_and_resumed
from tests.rig.rounds import BATCH, GROUP_SIZE, LEARNING, best_argv, logged_steps, read_lines

SAME_MERGED = 1e-4
"""Bound in nats on log-probabilities of the same weights in float32. The record rounds them beside,
and LoRA weights are merged again."""


@pytest.mark.parametrize("name", ["learned_full", "learned_lora"])
def test_engine_samples_with_the_trained_weights(
    name: str, assets: Path, request: pytest.FixtureRequest
) -> None:
    """One rank trains all weights, two ranks train LoRA."""
    folder = request.getfixturevalue(name)
    policy.assert_sampled_with_trained_weights(folder, assets / "tiny_vlm", LEARNED_STEPS)
    assert_timed(folder, ranks=1 if name == "learned_full" else 2)
    log = (folder / "log").read_text(encoding="utf-8")
    begin, end = "a seed for each sample", f"{LEARNED_STEPS} rounds of training, "
    assert (log.count(begin), log.count(end)) == (1, 1)
    assert log.index(begin) < log.index("'loss'") < log.index(end)


def assert_timed(folder: Path, ranks: int) -> None:
    """Assert that the logged parts of each step add up to its time by another clock. A checkpoint
    is saved after each step, and counts for the next one."""
    ends = [record["seconds"] for record in read_lines(folder / "record/ends0.jsonl")]
    steps = logged_steps(folder / "run")
    assert len(steps) == len(ends) - 1 == LEARNED_STEPS
    for log, (begin, end) in zip(steps, pairwise(ends), strict=True):
        parts = {part: log[f"time/{part}"] for part in (*PARTS, *ROLLOUT_PARTS)}
        assert sum(parts[part] for part in PARTS) == pytest.approx(end - begin, rel=0.02)
        engine = sum(parts[part] for part in ROLLOUT_PARTS)
        # The rest builds requests and samples: a fifth of a short rollout beside other processes.
        assert 0.5 * parts["rollout"] < engine <= parts["rollout"]
        assert min(parts.values()) >= 0
        assert not any(name.startswith("memory/") for name in log)  # there is no GPU
        worked = ("generate", "rewards", "batch", "logps", "loss", "optimizer", "rest")
        assert all(parts[part] > 0 for part in worked), parts
        assert ("time/wait" in log) == (ranks > 1)
        assert 0 <= log.get("time/wait", 0) < parts["generate"]
    assert steps[0]["time/send"] > 0  # before later ones, the evaluation has sent the weights


def test_a_group_is_drawn_again(learned_lora: Path, tmp_path: Path) -> None:
    """The group's image was given as content."""
    run_dir = learned_lora / "run"
    before = sorted(path.name for path in run_dir.iterdir())
    numbers = range(BATCH // GROUP_SIZE)
    groups = (read_group(run_dir, phase="train", step=1, number=0, group=n) for n in numbers)
    rows = next(g for g in groups if g[0].media[0].startswith("blake2b:"))
    place = ("--round", "1", "--group", str(rows[0].sample_id.group))
    command = (*COMMAND, "replay", str(run_dir), *place, "--json")
    env = {"RECORD_DIR": str(tmp_path)}  # for the run's own plugin (`recorder.py`)
    run(*command, log=tmp_path / "log", env=env, out=tmp_path / "out").check()
    result = json.loads((tmp_path / "out").read_text(encoding="utf-8"))
    assert result["weight_version"] == 1
    assert result["weights"].endswith("checkpoint-1")
    assert result["equal"] is True
    for sample, row in zip(result["samples"], rows, strict=True):
        assert sample["num_tokens"] == len(row.token_ids)
        # The record's rounding may change a log-probability by one of its steps.
        assert sample["logprob_gap"] < SAME_MERGED + 1 / LOGPROB_STEPS
    # A model that was merged for it is gone.
    assert sorted(path.name for path in run_dir.iterdir()) == before


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
