"""Colocated trainings with the real `swift`, vLLM and Qwen2.5-VL: the engine samples with the
trained weights. `test_servers.py` has the same for servers."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.timing.step_clock import PARTS, ROLLOUT_PARTS
from tests.rig import policy
from tests.rig.fixtures import LEARNED_STEPS
from tests.rig.rounds import (
    LEARNING,
    Samples,
    assert_same,
    logged_steps,
    read_lines,
    recorded,
    train,
)


@pytest.mark.parametrize(
    "run", [pytest.param("learned_full", marks=pytest.mark.smoke), "learned_lora"]
)
def test_engine_samples_with_the_trained_weights(
    run: str, assets: Path, request: pytest.FixtureRequest
) -> None:
    """One rank trains all weights, two ranks train LoRA."""
    folder = request.getfixturevalue(run)
    policy.assert_sampled_with_trained_weights(folder, assets / "tiny_vlm", LEARNED_STEPS)
    recorded = json.loads((folder / "run/args.json").read_text(encoding="utf-8"))
    assert recorded["rollout_seed_mode"] == "sample"
    assert recorded["use_cpu"] is True
    assert recorded["ignore_args_error"] is False
    assert_timed(folder, ranks=1 if run == "learned_full" else 2)
    assert_summarized(folder)


def assert_summarized(folder: Path) -> None:
    """Assert that the log begins with one line of features, and ends with one of results."""
    log = (folder / "log").read_text(encoding="utf-8")
    [begin] = re.findall(r"swift-grpo-ext [0-9].*", log)
    assert "a seed for each sample; training reads prompts once a group where " in begin
    assert begin.endswith(f"Look at it meanwhile: swift-grpo-ext view {folder / 'run'}")
    [end] = re.findall(r"Seen by swift-grpo-ext: .*", log)
    assert f"{LEARNED_STEPS} rounds of training, " in end
    assert re.search(r"a rollout gap of \S+ nats \(rounding explains 0.01\), \S+ at most", end)
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
        if ranks == 1:
            assert "time/wait" not in log
        else:
            assert 0 < log["time/wait"] < parts["generate"]
    assert steps[0]["time/send"] > 0  # before later ones, the evaluation has sent the weights


def test_tensor_parallel(
    assets: Path, learning_rows: Path, tmp_path: Path, learned_full: Path
) -> None:
    """Two ranks share an engine. At equal weights it has the tokens of one rank's engine."""
    parallel = ("--vllm_tensor_parallel_size", "2")
    run = tmp_path / "run"
    samples = train(assets, learning_rows, run, *LEARNING, *parallel, ranks=2, steps=2)
    policy.assert_sampled_with_trained_weights(run, assets / "tiny_vlm", 2)
    assert_same(first_round(samples), recorded(learned_full), steps=range(1))


def first_round(samples: Samples) -> Samples:
    return {name: s for name, s in samples.items() if SampleId.parse(name).step == 0}
