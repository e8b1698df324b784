"""Both languages say the same: README and the pages of docs/, section by section."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_grpo_ext.flags import flag_infos, flag_names, show
from tests.documents import Page, counterpart, drift, originals

ROOT = Path(__file__).resolve().parents[1]
ORIGINALS = originals(ROOT)


@pytest.mark.parametrize("original", ORIGINALS, ids=lambda page: page.name)
def test_the_translation_has_not_drifted(original: Path) -> None:
    translation = counterpart(original)
    assert drift(Page(original), Page(translation)) == []
    for page, other in ((original, translation), (translation, original)):
        assert Page(page).sections[1].links[0] == other.name, "each begins with a link to the other"


def rows_of_flags(page: str) -> list[list[str]]:
    """The rows of a page's tables that begin with a flag of ours, as cells."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    rows = [line.removeprefix("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0].strip("`-") in flag_names()]


def test_the_tables_of_flags_have_each_with_its_default() -> None:
    """The English one is the output of `swift-grpo-ext flags --markdown` (`test_cli`)."""
    ours = [row[:3] for row in rows_of_flags("docs/flags.md")]
    assert [row[:3] for row in rows_of_flags("docs/flags_CN.md")] == ours
    assert len(ours) == len(flag_names())
    expected = [[f"`--{info.name}`", show(info.default)] for info in flag_infos()]
    for page in (ROOT / "docs").glob("migration*.md"):
        assert [row[:2] for row in rows_of_flags(f"docs/{page.name}")] == expected
