"""`swift-grpo-ext view`: the server, for one person.

It listens on 127.0.0.1, or where `--host` says. Every address begins with a token that only the
printed URL holds; what lacks it is answered 404. One background thread reads what the run writes.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from swift_grpo_ext.tools.view import pages
from swift_grpo_ext.tools.view.group import RunView, image_bytes
from swift_grpo_ext.tools.view.runs import parse_round

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0

HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",  # the page itself holds the rest of it
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def make_app(run: RunView, token: str) -> Starlette:
    """Return the application; who calls it refreshes the run."""

    def start(request: Request) -> Response:
        return RedirectResponse("samples", headers=HEADERS)

    def state(request: Request) -> Response:
        return PlainTextResponse(pages.state_of(run), headers=HEADERS)

    def page(request: Request) -> Response:
        name, query = request.path_params["page"], dict(request.query_params)
        try:
            if name == "image":  # by round, group and number: what the run's record names
                place = parse_round(query["round"]), int(query["group"]), int(query["number"])
                index = int(query["index"]) if "index" in query else None
                medium = run.medium_name(*place, index, int(query.get("turn", 0)))
                content = image_bytes(medium, query["size"])
                return Response(content, media_type="image/png", headers=HEADERS)
            values = {
                "samples": lambda: pages.samples_values(run, query),
                "groups": lambda: pages.groups_values(run, query),
                "group": lambda: pages.group_values(run, query),
                "overview": lambda: pages.overview_values(run),
            }[name]()
        except (LookupError, ValueError) as e:
            return PlainTextResponse(f"There is no such thing here ({e}).", 404)
        return HTMLResponse(pages.render(name, run, **values), headers=HEADERS)

    routes = [Route("/", start), Route("/state", state), Route("/{page}", page)]
    return Starlette(routes=[Mount(f"/{token}", routes=routes)])


def serve(runs: Sequence[Path], port: int, host: str) -> None:
    """Serve until Ctrl-C; print the address, and how to reach it from elsewhere.

    Args:
        runs: their folders.
        port: 0 for any that is free.
        host: the address of this machine at which to listen; 0.0.0.0 for all.

    Raises:
        OSError: the port is taken, or the address is none of this machine's.
    """
    run = RunView(runs[0])
    token = secrets.token_urlsafe(16)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as e:
        cause = str(e.strerror).partition(" (while")[0]
        if e.errno == errno.EADDRINUSE:
            raise OSError(f"--port {port} is taken ({cause}): give another, or 0.") from e
        raise OSError(
            f"--host {host} --port {port}: cannot listen there ({cause}). Give an address of this "
            "machine, or 0.0.0.0 for all of them, and a port from 1024 on."
        ) from e
    with listener:
        stop = threading.Event()
        threading.Thread(target=_follow, args=(run, stop), daemon=True).start()
        listens_at, port, *_ = listener.getsockname()
        print(_how_to_look(listens_at, port, token), flush=True)
        config = uvicorn.Config(make_app(run, token), log_level="warning", access_log=False)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        finally:
            stop.set()


def _how_to_look(host: str, port: int, token: str) -> str:
    """Return the address of the pages, and how to reach it from another machine."""
    listens, machine = ip_address(host), socket.gethostname()
    name = machine if listens.is_unspecified else f"[{host}]" if listens.version == 6 else host
    remote = "Nothing is encrypted: who listens to the network can read the pages and the address."
    if listens.is_loopback:
        remote = (
            f"From another machine, type there: ssh -N -L {port}:{name}:{port} "
            f"{os.environ.get('USER', 'USER')}@{machine}\n(or as you log in here), and open this "
            "address there."
        )
    return (
        f"http://{name}:{port}/{token}/\nOnly who has this address can look. Ctrl-C ends it.\n"
        f"{remote}"
    )


def _follow(run: RunView, stop: threading.Event) -> None:
    """Read what the run writes until `stop` is set; an error is told once and tried again."""
    told = ""
    while not stop.is_set():
        try:
            run.refresh()
        except (OSError, ValueError) as e:  # a file that is being replaced; of Arrow, too
            if str(e) != told:
                logger.warning("%s cannot be read now (%s): tried again.", run.run_dir, e)
            told = str(e)
        stop.wait(REFRESH_SECONDS)
