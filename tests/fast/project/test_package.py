"""Links of the package's page are absolute if the builder names the project's address."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
URL = "https://example.org/group/project"


@pytest.fixture(scope="module")
def setup_file() -> Any:
    spec = importlib.util.spec_from_file_location("setup_of_the_package", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_relative_links_become_absolute(setup_file: Any) -> None:
    others = "[c](https://c.org/d.md) [here](#top)"
    text = f"[a](docs/a.md#b) ![p](x/p.png) {others}"
    assert setup_file.absolute_links(text, URL, "v1") == (
        f"[a]({URL}/blob/v1/docs/a.md#b) ![p]({URL}/raw/v1/x/p.png) {others}"
    )


def test_an_address_is_named_where_it_is_known(setup_file: Any) -> None:
    named = setup_file.metadata(URL)
    assert set(named["project_urls"].values()) == {URL, f"{URL}/tree/HEAD/docs", f"{URL}/issues"}
    targets = re.findall(r"\]\(([^)]+)\)", named["long_description"])
    assert len(targets) > 20
    assert all(target.startswith("https://") for target in targets)
    assert f"]({URL}/raw/HEAD/docs/img/view_group.png)" in named["long_description"]
