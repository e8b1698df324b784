"""The page's table of releases agrees with the releases that the plugin lists (I2)."""

from __future__ import annotations

from compatibility import SWIFT, TABLE, Cell
from pages import SUPPORT, read_from

from swift_grpo_ext.upstream.contract import TRIED

NEEDED_CELLS = ("4.6.0-0.23.0", "4.6.0-0.25.1", "4.6.0-0.32.0")
"""Releases of ms-swift and vLLM: recommended by ms-swift, in its image, and pinned here."""


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
    cells = {str(Cell(row["ms-swift"], row["vLLM"])) for row in works}
    assert cells >= set(NEEDED_CELLS)
    assert set(TRIED["ms-swift"]) <= set(SWIFT)
