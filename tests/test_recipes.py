"""The tables of options and of families are what their scripts make, and name real tests."""

from __future__ import annotations

import re
from pathlib import Path

import families
import pytest
import recipes

from tests.newest import is_newest

ROOT = Path(__file__).resolve().parents[1]


def table_of(page: Path, begin: str, end: str) -> str:
    return page.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip()


def test_the_page_of_families_is_up_to_date() -> None:
    """Else: `python scripts/families.py --write`."""
    assert table_of(families.PAGE, families.BEGIN, families.END) == families.made()
    begin, end = families.BEGIN_EXPERTS, families.END_EXPERTS
    assert table_of(families.PAGE, begin, end) == families.made_of_experts()


@pytest.mark.skipif(not is_newest("swift"), reason="the page is about the newest ms-swift")
def test_the_page_of_options_is_up_to_date() -> None:
    """Else: `python scripts/recipes.py --write`. Any test that gives the option will do."""
    options = recipes.options()
    assert [o.name for o in options if o.is_own and o.verdict == "not tried"] == []
    on_page = rows_of(table_of(recipes.PAGE, recipes.BEGIN, recipes.END))
    assert {name: row[0] for name, row in on_page.items()} == {
        name: row[0] for name, row in rows_of(recipes.made()).items()
    }
    for option in options:
        verdict, where = on_page.get(option.name, ("", ""))
        assert verdict != "tested" or where.strip("`") in option.tests


def rows_of(table: str) -> dict[str, tuple[str, str]]:
    """Return the verdict and the place of each option."""
    rows = re.findall(r"^\| ([^|]+) \| ([^|]*) \| (`[^|]+`) \|$", table, re.M)
    assert len(rows) > 10
    return {
        name: (verdict, where)
        for verdict, where, names in rows
        for name in re.findall(r"`(\w+)`", names)
    }
