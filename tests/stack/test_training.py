"""A colocated engine samples with the trained weights (M4), the parts of a step add up to its time
(V5), and the log begins with features and ends with results."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from swift_grpo_ext.timing.step_clock import PARTS, ROLLOUT_PARTS
from tests.rig import policy
from tests.rig.fixtures import LEARNED_STEPS
from tests.rig.rounds import logged_steps, read_lines


@pytest.mark.parametrize("run", ["learned_full", "learned_lora"])
def test_engine_samples_with_the_trained_weights(
    run: str, assets: Path, request: pytest.FixtureRequest
) -> None:
    """One rank trains all weights, two ranks train LoRA."""
    folder = request.getfixturevalue(run)
    policy.assert_sampled_with_trained_weights(folder, assets / "tiny_vlm", LEARNED_STEPS)
    arguments = json.loads((folder / "run/args.json").read_text(encoding="utf-8"))
    assert arguments["rollout_seed_mode"] == "sample"
    assert arguments["use_cpu"] is True
    assert arguments["ignore_args_error"] is False
    assert_timed(folder, ranks=1 if run == "learned_full" else 2)
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
