"""The tables of `docs/families.md` are what `scripts/families.py` makes of what was found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import families
import pytest
from tiny_vlm.families import FAMILIES


@pytest.mark.parametrize("language", families.PAGES)
def test_the_page_is_up_to_date(language: str) -> None:
    """Else: `python scripts/families.py --write`."""
    text = families.PAGES[language].read_text(encoding="utf-8")
    found = text.partition(families.BEGIN)[2].partition(families.END)[0].strip()
    assert found == families.made(language)


def test_every_family_that_can_be_made_has_a_row() -> None:
    assert list(FAMILIES) == list(families.MADE)


def test_a_row_says_what_was_found_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {
        **{"gap": 2.4e-6, "line_breaks": True, "ways": ["logits_to_keep"], "stopped": 9},
        **{"samples": 48, "wanted": 0.5, "media_asked": 60, "media_made": 15},
    }
    results = tmp_path / "results.json"
    found = {
        "internvl": {"whole": whole, "lora": {"gap": 0.003}, "videos": {"gap": 2e-5}},
        "qwen2_5_omni": {"whole": whole, "served": {"gap": 1e-6}, "audio": {"gap": 4e-6}},
        "glm4v": {"whole": whole},
    }
    results.write_text(json.dumps(found), encoding="utf-8")
    monkeypatch.setattr(families, "RESULTS", results)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", families.made("en"), re.M))
    assert rows["internvl"] == (
        "works | equal: the rollout's line breaks | 2e-06 | equal, 3e-03 | not run | 2e-05 |  | "
        "never, wanted at 50% | `logits_to_keep` | 9 of 48 | 60 asked, 15 made"
    )
    assert " | 2e-06 | not run | equal, 1e-06 | not run | 4e-06 | " in rows["qwen2_5_omni"]
    assert rows["glm4v"].startswith("in part | ")
    assert rows["gemma3"] == " | ".join(["not run"] * 11)
