"""The tables of options, families and conversations are what their scripts make."""

from __future__ import annotations

import re

import conversations
import families
import pytest
import recipes
from pages import SUPPORT, read_from

from tests.newest import is_newest


def test_the_table_of_conversations_is_up_to_date() -> None:
    """Else: `python scripts/conversations.py --write`."""
    assert read_from(SUPPORT, conversations.TABLE) == conversations.made()


def test_the_page_of_families_is_up_to_date() -> None:
    """Else: `python scripts/families.py --write`."""
    assert read_from(SUPPORT, families.TABLE) == families.made()
    assert read_from(SUPPORT, families.TABLE_OF_EXPERTS) == families.made_of_experts()


@pytest.mark.skipif(not is_newest("swift"), reason="the page is about the newest ms-swift")
def test_the_page_of_options_is_up_to_date() -> None:
    """Else: `python scripts/recipes.py --write`. Any test that gives the option will do."""
    options = recipes.options()
    assert [o.name for o in options if o.is_own and o.verdict[0] == "not tried"] == []
    on_page = rows_of(read_from(SUPPORT, recipes.TABLE))
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
