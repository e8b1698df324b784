"""Faults of an engine's sight are named in their round, before the update (M5)."""

from __future__ import annotations

from pathlib import Path

from tests.rig.seeing import assert_each_fault_is_named_in_its_round


def test_each_fault_is_named_in_its_round(assets: Path, tmp_path: Path) -> None:
    assert_each_fault_is_named_in_its_round(assets, tmp_path, "bfloat16", served=False)
