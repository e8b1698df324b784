"""Print pip's settings as variables of uv's environment, `NAME=VALUE`, one a line.

uv reads no pip configuration (https://docs.astral.sh/uv/pip/compatibility/), and users have their
mirrors, proxies and certificates there. A variable that is set already stays as it is.
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
"""Parts of pip's configuration that `pip install` reads; a later one wins."""


def uv_settings(listing: str) -> dict[str, str]:
    """Translate what `pip config list` printed, lines such as `global.index-url='https://...'`."""
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in listing.splitlines()]
    for section in SECTIONS:
        for name, _, value in lines:
            where, _, key = name.rpartition(".")
            if where == section and key in VARIABLES:
                separator = "," if key == "find-links" else " "
                words = str(ast.literal_eval(value)).split()  # pip separates several by whitespace
                found[VARIABLES[key]] = separator.join(words)
    return found


def read_uv_settings() -> dict[str, str]:
    """Return the variables that are not set yet."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = uv_settings(listing)
    return {name: value for name, value in found.items() if name not in os.environ}


if __name__ == "__main__":
    for name, value in read_uv_settings().items():
        print(f"{name}={value}")
