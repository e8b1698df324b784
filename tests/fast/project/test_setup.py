"""Links of the package's page are absolute if the builder names the project's address."""

from __future__ import annotations

import importlib.util
import re

from tests.conftest import ROOT

URL = "https://example.org/group/project"


def test_links_become_absolute() -> None:
    spec = importlib.util.spec_from_file_location("setup_of_the_package", ROOT / "setup.py")
    assert spec and spec.loader  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    others = "[c](https://c.org/d.md) [here](#top)"
    text = f"[a](docs/a.md#b) ![p](x/p.png) {others}"
    assert module.absolute_links(text, URL, "v1") == (
        f"[a]({URL}/blob/v1/docs/a.md#b) ![p]({URL}/raw/v1/x/p.png) {others}"
    )
    named = module.metadata(URL)
    assert set(named["project_urls"].values()) == {URL, f"{URL}/tree/HEAD/docs", f"{URL}/issues"}
    targets = re.findall(r"\]\(([^)]+)\)", named["long_description"])
    assert len(targets) > 20
    assert all(target.startswith("https://") for target in targets)
    assert f"]({URL}/raw/HEAD/docs/img/view_group.png)" in named["long_description"]
