"""The API key of `swift rollout`: no log shows it, and a training can send it."""

from __future__ import annotations

import base64
import os
import secrets
from urllib.parse import urlsplit

from swift.arguments import RLHFArguments, RolloutArguments

from swift_grpo_ext.checks.finding import SettingsError

VARIABLE = "VLLM_API_KEY"  # vLLM's own server reads it too
MASK = "***"  # replaces the key in the arguments, which ms-swift prints
REMEDY = (
    "Give a training the key by a line `machine HOST login swift password KEY` in ~/.netrc, or in "
    f"the file that NETRC names (scripts/launch.sh does so if {VARIABLE} is set)"
)

kept_key: str | None = None


def take(args: RolloutArguments) -> None:
    """Keep the key of a server for this process, and take it out of the environment."""
    global kept_key
    # ms-swift 4.6 (cli/main.py, pipelines/base.py) prints `--api_key`, and hands it to all workers.
    if args.api_key and not (args.api_key == MASK and kept_key):  # arguments are checked twice
        raise SettingsError(
            "--api_key is in the command line, which every user of this machine can see and "
            f"`swift` prints; expected none. Set {VARIABLE} in the server's environment."
        )
    key = os.environ.pop(VARIABLE, None) or kept_key  # workers inherit the environment
    if key:
        kept_key, args.api_key = key, MASK


def check_urls(args: RLHFArguments) -> None:
    """Refuse a key in the servers' URLs."""
    for url in args.vllm_server_base_url or ():
        if urlsplit(url).password is not None:
            host = urlsplit(url).hostname
            raise SettingsError(
                f"--vllm_server_base_url holds a password for {host}, which the log and args.json "
                f"would show; expected none. {REMEDY}."
            )


def key_of(args: RolloutArguments) -> str | None:
    """Return the key that clients of a server need; None if they need none."""
    if args.api_key == MASK and not kept_key:
        raise ValueError(
            f"--api_key is {MASK!r}: another process has the key. Set {VARIABLE} for this one."
        )
    return kept_key if args.api_key == MASK else None


def is_authorized(authorization: str, key: str) -> bool:
    """Return whether a request's `Authorization` is `Bearer KEY`, or `Basic` (RFC 7617) with any
    user and the key as the password."""
    # ms-swift's client cannot send `Bearer`. `requests` sends `Basic` to each host in the netrc.
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            decoded = base64.b64decode(given.strip(), validate=True).decode("utf-8", "replace")
        except ValueError:
            return False
        given = decoded.partition(":")[2]
    elif scheme.lower() != "bearer":
        return False
    return secrets.compare_digest(given.encode(), key.encode())
