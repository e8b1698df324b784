"""Two ranks that share an engine sample with the trained weights, as one rank does (S2, M4)."""

from __future__ import annotations

from pathlib import Path

from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig import policy
from tests.rig.rounds import LEARNING, assert_same, recorded, train


def test_tensor_parallel(
    assets: Path, learning_rows: Path, tmp_path: Path, learned_full: Path
) -> None:
    """Two ranks share an engine. At equal weights it has the tokens of one rank's engine."""
    argv = (*LEARNING, "--vllm_tensor_parallel_size", "2")
    samples = train(assets, learning_rows, tmp_path, *argv, ranks=2, steps=2)
    policy.assert_sampled_with_trained_weights(tmp_path, assets / "tiny_vlm", 2)
    first = {name: s for name, s in samples.items() if SampleId.parse(name).step == 0}
    assert_same(first, recorded(learned_full), steps=range(1))
