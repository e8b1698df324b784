"""Every way of training that CPU runs support, with the real `swift`, vLLM and Qwen2.5-VL.

Each trains some steps and proves that the engine sampled with the weights that training had made.
`test_servers.py` does so for servers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import SampleId
from tests.stack import policy
from tests.stack.conftest import LEARNED_STEPS
from tests.stack.rounds import LEARNING, Samples, assert_same, recorded, train

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("run", ["learned_full", "learned_lora"])
def test_engine_samples_with_the_trained_weights(
    run: str, assets: Path, request: pytest.FixtureRequest
) -> None:
    """Colocated: one rank that trains all weights, two that train LoRA."""
    folder = request.getfixturevalue(run)
    policy.assert_sampled_with_trained_weights(folder, assets / "tiny_vlm", LEARNED_STEPS)
    recorded = json.loads((folder / "run/args.json").read_text(encoding="utf-8"))
    assert recorded["rollout_seed_mode"] == "sample"
    assert recorded["use_cpu"] is True
    assert recorded["encoder_cache_gb"] == 1.0
    assert recorded["ignore_args_error"] is False


def test_tensor_parallel(
    assets: Path, learning_rows: Path, tmp_path: Path, learned_full: Path
) -> None:
    """Two ranks share an engine, which draws as one rank's while the weights are the same."""
    parallel = ("--vllm_tensor_parallel_size", "2")
    run = tmp_path / "run"
    samples = train(assets, learning_rows, run, *LEARNING, *parallel, ranks=2, steps=2)
    policy.assert_sampled_with_trained_weights(run, assets / "tiny_vlm", 2)
    assert_same(first_round(samples), recorded(learned_full), steps=range(1))


def first_round(samples: Samples) -> Samples:
    return {name: s for name, s in samples.items() if SampleId.parse(name).step == 0}
