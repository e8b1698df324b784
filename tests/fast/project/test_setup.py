"""`scripts/setup.sh` takes the indexes that pip would take, and links of the package's page are
absolute if the builder names the project's address."""

from __future__ import annotations

import importlib.util
import re

from uv_settings import uv_settings

from tests.conftest import ROOT

LISTING = r"""
:env:.extra-index-url='file:///a/simple\nhttps://b/simple'
:env:.find-links='/wheels /more'
:env:.no-color='1'
global.cert='/etc/ca.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='https://c/simple'
global.index-url='https://mirror/simple'
global.timeout='60'
install.index-url='https://user:secret@mirror/simple'
install.trusted-host='mirror'
download.index-url='https://other/simple'
"""


def test_uv_gets_the_indexes_that_pip_install_would_take() -> None:
    """Settings of `pip install` win over global ones, and environment variables over both."""
    assert uv_settings(LISTING) == {
        "UV_DEFAULT_INDEX": "https://user:secret@mirror/simple",
        "UV_INDEX": "file:///a/simple https://b/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "mirror",
        "UV_HTTP_TIMEOUT": "60",
        "SSL_CERT_FILE": "/etc/ca.crt",
    }


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
