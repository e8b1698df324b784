"""Each fault of an engine's weights is named in families of each kind, and in bfloat16 (C2, M4)."""

from pathlib import Path

import pytest
from tiny_vlm.families import FAMILIES, Family, make_family

from tests.rig.watched_engine import assert_each_fault_is_named

OTHERS = ("qwen3_vl_moe", "gemma3", "qwen3_5", "internvl", "glm4v_moe")


@pytest.mark.parametrize("family", [FAMILIES[n] for n in OTHERS], ids=OTHERS, indirect=True)
def test_each_fault_is_named_at_once(family: Family, tmp_path: Path) -> None:
    make_family(family, tmp_path / "model", seed=0)
    assert_each_fault_is_named(family, tmp_path / "model", tmp_path, 8)


def test_bfloat16(assets: Path, tmp_path: Path) -> None:
    assert_each_fault_is_named(FAMILIES["qwen2_5_vl"], assets / "tiny_vlm", tmp_path, 8, "bfloat16")
