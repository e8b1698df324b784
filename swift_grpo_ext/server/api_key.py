"""The API key of `swift rollout`: kept out of the log, and taken as a training can send it.

Symptom: `--api_key` is printed with the command line and with the arguments, and stands in the
arguments that every worker gets. No training can use such a server: ms-swift's client sends no
header, and connects before plugins are imported.
Upstream: ms-swift 4.6, cli/main.py, pipelines/base.py, rlhf_trainers/vllm_client.py,
pipelines/infer/rollout.py (`_require_api_key`: `Bearer` only; 4.5 has none).
Adaptation: the key is read from the environment too, and the arguments hold a mask. The server
takes `Basic` with the key as the password as well, which `requests`, and with it ms-swift's client,
sends to every host that stands in the user's netrc.
Can go when ms-swift's client sends a key, and its log leaves it out.
"""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from swift.utils import get_logger

from swift_grpo_ext.upstream.patches import patch

logger = get_logger()

VARIABLE = "VLLM_API_KEY"
"""vLLM's own name for it."""

MASK = "***"
"""What the arguments hold in its place: ms-swift asks whether there is a key, and prints it."""

REMEDY = (
    "Give a training the key by a line `machine HOST login swift password KEY` in ~/.netrc, or in "
    f"the file that NETRC names (scripts/launch.sh does, where {VARIABLE} is set)"
)

_kept: str | None = None


def take(args: Any, *, on_command_line: bool) -> None:
    """Keep the key of a server for this process, and take it out of arguments and environment.

    Args:
        args: ms-swift's `RolloutArguments`; their `api_key` wins over the environment's.
        on_command_line: whether it was given there, or in YAML, which ms-swift makes one of.

    Raises:
        ValueError: the key cannot stand in a header.
    """
    global _kept
    environment = os.environ.pop(VARIABLE, None)  # workers inherit what is left
    if args.api_key == MASK:
        key_of(args)
        return
    if args.api_key and environment:
        logger.warning(f"{VARIABLE} is ignored: --api_key was given.")
    if args.api_key and on_command_line:
        logger.warning(
            "--api_key stands in the command line, which every user of this machine can see, and "
            f"which `swift` prints. Set {VARIABLE} in the server's environment instead."
        )
    key = args.api_key or environment or _kept
    if not key:
        return
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ValueError(
            f"--api_key ({VARIABLE}) holds a character that cannot stand in a header; expected "
            "printable ASCII, without spaces around it. `openssl rand -hex 32` makes a key."
        )
    _kept, args.api_key = key, MASK


def check_urls(args: Any) -> None:
    """Raise `ValueError` for a key in the servers' URLs, which stand in the log and in args.json.

    Args:
        args: ms-swift's `RLHFArguments`.
    """
    for url in args.vllm_server_base_url or ():
        if urlsplit(url).password is not None:
            host = urlsplit(url).hostname
            raise ValueError(
                f"--vllm_server_base_url holds a password for {host}, which would be written to "
                f"the log and to args.json; expected URLs without. {REMEDY}."
            )


def key_of(args: Any) -> str | None:
    """The key that a server asks for; None where it asks for none.

    Raises:
        ValueError: it was taken out of these arguments in another process.
    """
    if args.api_key != MASK:
        return args.api_key or None
    if _kept is None:
        raise ValueError(
            f"--api_key is {MASK!r}, which stands for a key that another process has. Set "
            f"{VARIABLE} in the environment of this one."
        )
    return _kept


def is_authorized(authorization: str, key: str) -> bool:
    """Whether a request's `Authorization` holds the key: `Bearer KEY`, or `Basic` (RFC 7617) with
    any user and the key as the password."""
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


def require_api_key(server: Any) -> Callable[[Request], Awaitable[None]]:
    """What raises 401 for a request to `server` without its key."""
    key = key_of(server.args)

    async def check(request: Request) -> None:
        authorization = request.headers.get("Authorization", "")
        if key is not None and not is_authorized(authorization, key):
            what = "the API key is not this server's" if authorization else "the API key is missing"
            raise HTTPException(
                status_code=401,
                detail=f"401 Unauthorized: {what}. {REMEDY}.",
                headers={"WWW-Authenticate": "Bearer"},
            )

    return check


@cache
def install() -> None:
    """Let `swift rollout` ask for the key so. Call before a server is made."""
    from swift.pipelines.infer.rollout import SwiftRolloutDeploy

    patch(SwiftRolloutDeploy, _require_api_key=lambda self: require_api_key(self))
