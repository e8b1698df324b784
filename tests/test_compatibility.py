"""The tables of releases are true to what the plugin says, and presets to older releases."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from compatibility import SWIFT, TABLE, Cell
from pages import ROOT, SUPPORT, read_from

from swift_grpo_ext.upstream.contract import TRIED

NEEDED_CELLS = (
    *("4.6.0-0.11.0", "4.6.0-0.23.0", "4.6.0-0.25.1", "4.6.0-0.32.0"),
    *("4.4.2-0.23.0", "4.4.2-0.25.1"),
)
"""Those that ms-swift recommends, those of its images, and the pinned set."""


def test_the_plugin_says_what_the_table_says() -> None:
    made = read_from(SUPPORT, TABLE).splitlines()
    head, _, *lines = [line.strip("| ").split(" | ") for line in made if "|" in line]
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    works = [row for row in rows if row["works"] == "yes"]
    for package, column in {
        "ms-swift": "ms-swift",
        "vllm": "vLLM",
        "transformers": "transformers",
    }.items():
        assert {row[column] for row in works} <= set(TRIED[package]), package
    cells = {str(Cell(row["ms-swift"], row["vLLM"], row["Python"])) for row in works}
    assert cells >= set(NEEDED_CELLS)
    assert set(TRIED["ms-swift"]) <= set(SWIFT)


@pytest.mark.parametrize("preset", sorted(ROOT.glob("examples/*/*.yaml")), ids=lambda p: p.name)
def test_presets_can_be_read_by_ms_swift_4_5(preset: Path) -> None:
    """It hands the values of a list on as they are, and dies of a number among them (cli/main.py);
    it takes no data loader without workers that is to keep them (trainers/arguments.py)."""
    settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
    lists = [value for value in settings.values() if isinstance(value, list)]
    assert all(isinstance(item, str) for values in lists for item in values)
    if settings.get("dataloader_num_workers") == 0:
        assert settings["dataloader_persistent_workers"] is False
