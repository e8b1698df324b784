"""Print pip's settings as environment variables of uv, one `NAME=VALUE` on each line.

pip's configuration names users' mirrors, proxies and certificates, but uv does not read it
(https://docs.astral.sh/uv/pip/compatibility/). Variables that are already set are left out.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
SECTIONS = ("global", "install", ":env:")
"""Sections of pip's configuration that `pip install` reads; a later section wins."""


def uv_settings(listing: str) -> dict[str, str]:
    """Translate the output of `pip config list`: lines like `global.index-url='https://...'`."""
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in listing.splitlines()]
    for section in SECTIONS:
        for name, _, value in lines:
            where, _, key = name.rpartition(".")
            if where == section and key in VARIABLES:
                separator = "," if key == "find-links" else " "
                words = str(ast.literal_eval(value)).split()  # whitespace separates pip's values
                found[VARIABLES[key]] = separator.join(words)
    return found


def read_uv_settings() -> dict[str, str]:
    """Return the variables that are not set yet."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: v for name, v in uv_settings(listing).items() if name not in os.environ}


if __name__ == "__main__":
    for name, value in read_uv_settings().items():
        print(f"{name}={value}")
