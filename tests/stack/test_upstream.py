"""A run with `--rollout_seed_mode engine` has ms-swift's own losses and gradient norms (R7),
although a group is encoded once, its prompt is read once, and needless passes are left out."""

from pathlib import Path

import pytest

from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.bare import assert_losses_are_ms_swifts, train_both
from tests.rig.distillation import LEARNS, OWN, prepared, recorded_tokens, teacher


def test_losses_are_ms_swifts(assets: Path, tmp_path: Path) -> None:
    """Two updates of a round, with a reference model."""
    argv = ("--num_iterations", "2", "--beta", "0.04")
    assert_losses_are_ms_swifts(assets, tmp_path, *argv)


def test_losses_of_gkd_are_ms_swifts(
    assets: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run with rounds of both sources, a local teacher's top tokens and a supervised part has the
    same losses with and without the plugin."""
    places = prepared(assets, tmp_path_factory)
    mixed = (
        *("--use_vllm", "false", "--top_k", "1", "--lmbda", "0.5", "--gkd_logits_topk", "20"),
        *("--sft_alpha", "0.3", "--gradient_accumulation_steps", "2", *LEARNS, *teacher(places)),
        *("--per_device_train_batch_size", "4"),
    )
    argv = (*OWN, *mixed)
    pairs = train_both("gkd", assets, places / "rows.jsonl", tmp_path, *argv, steps=4)
    assert len(pairs) == 4
    for expected, found in pairs:
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        # A gradient at the head is a sum over 151,936 tokens, most of which cancel: with chunks of
        # 1, 7 and 1,024 positions the norms differed by 6e-5 here, with all else in float64 too.
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4)
    # Some of the four steps are of each source; those of the student are in the record.
    assert 0 < len({SampleId.parse(name).step for name in recorded_tokens(tmp_path / "ours")}) < 4
