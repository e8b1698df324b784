"""A mixture of experts trains each token on the experts that its rollout chose (L7)."""

from pathlib import Path

import pytest

from tests.rig.families import assert_replayed


@pytest.mark.parametrize("name", ["qwen3_vl_moe"])
def test_replay(
    name: str, assets: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two colocated ranks, with gradient checkpointing."""
    assert_replayed(name, assets, tmp_path, tmp_path_factory, served=False)
