"""docs/support.md names each option and each family of models with its verdict (R1, R3), and
the releases that the plugin lists (I2)."""

import re
from collections import Counter

import compatibility
import pytest
import support
from pages import SUPPORT, read_from
from tiny_vlm.families import FAMILIES, Family

from swift_grpo_ext.upstream.contract import TRIED
from tests.rig.releases import IS_NEWEST_SWIFT


@pytest.mark.parametrize("name", ["conversations", "families", "experts"])
def test_a_table_is_up_to_date(name: str) -> None:
    """If not: `python scripts/support.py --write`."""
    assert read_from(SUPPORT, name) == support.TABLES[name]()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_tiny_models_have_two_layers_of_each_kind(family: Family) -> None:
    """Completions do not depend on the last layer's results for the prompt. A fault in one kind of
    Gemma 4's layers was hidden because the tiny model's only such layer was the last."""
    config = family.config.get("thinker_config", family.config)
    text = config.get("text_config", config)
    kinds = text.get("layer_types", ["full_attention"] * text["num_hidden_layers"])
    assert len(kinds) == text["num_hidden_layers"]
    assert min(Counter(kinds).values()) >= 2


@pytest.mark.skipif(not IS_NEWEST_SWIFT, reason="the page is about the newest ms-swift")
def test_the_page_of_options_is_up_to_date() -> None:
    """If not: `python scripts/support.py --write`. The page may name any test with the option."""
    options = support.options()
    assert [o.name for o in options if o.is_rl and o.verdict[0] == "not tried"] == []
    on_page = rows_of(read_from(SUPPORT, "options"))
    assert {name: row[0] for name, row in on_page.items()} == {
        name: row[0] for name, row in rows_of(support.options_table()).items()
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


def test_the_plugin_says_what_the_table_says() -> None:
    """Releases that ms-swift recommends, of its image, and that are pinned here work."""
    made = read_from(SUPPORT, compatibility.TABLE).splitlines()
    head, _, *lines = [line.strip("| ").split(" | ") for line in made if "|" in line]
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    works = [row for row in rows if row["works"] == "yes"]
    for column in ("ms-swift", "vLLM", "transformers"):
        assert {row[column] for row in works} <= set(TRIED[column.lower()]), column
    cells = {(row["ms-swift"], row["vLLM"]) for row in works}
    assert cells >= {("4.6.0", vllm) for vllm in ("0.23.0", "0.25.1", "0.32.0")}
    assert set(TRIED["ms-swift"]) <= set(compatibility.SWIFT)
