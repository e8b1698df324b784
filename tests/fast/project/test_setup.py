"""`scripts/setup.sh` installs from the indexes that pip would take, by uv's settings."""

from __future__ import annotations

import os
import subprocess
import sys

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


def test_uvs_own_variables_win() -> None:
    """What the script prints is what the shell reads."""
    env = os.environ | {"PIP_CONFIG_FILE": os.devnull, "UV_FIND_LINKS": "/mine"}
    env |= {"PIP_INDEX_URL": "https://mirror/simple", "PIP_FIND_LINKS": "/wheels"}
    command = [sys.executable, str(ROOT / "scripts/uv_settings.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert "UV_DEFAULT_INDEX=https://mirror/simple\n" in printed
    assert "UV_FIND_LINKS" not in printed
