"""`swift-grpo-ext view`: the server, for one person.

The answer is 404 without the printed URL's token, and if no record has the run, round or sample of
the address. It is 500 if a page fails; uvicorn logs the traceback.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route

from swift_grpo_ext.tools.view import pages
from swift_grpo_ext.tools.view.group import read_image
from swift_grpo_ext.tools.view.runs import NotFoundError, Run

REFRESH_SECONDS = 1.0  # of reading for one answer: a large record takes several answers

HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",  # the page has the rest of the policy
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def make_app(runs: Sequence[Run], token: str) -> Starlette:
    """Return the application. The pages of a run have its number in their addresses; the page of
    all runs has none."""

    def start(request: Request) -> Response:
        return RedirectResponse("0/overview" if len(runs) == 1 else "runs", headers=HEADERS)

    def page(request: Request) -> Response:
        index, name = request.path_params.get("run"), request.path_params["page"]
        if index is not None and index >= len(runs):
            raise NotFoundError(f"there is no run {index}")
        shown = runs if index is None else [runs[index]]
        if name == "image" and index is not None:
            content = read_image(runs[index], request.query_params)
            return Response(content, media_type="image/png", headers=HEADERS)
        # An open page asks for changes every two seconds. Each answer first reads new files.
        for run in shown:
            run.refresh(REFRESH_SECONDS)
        if name == "state":
            return PlainTextResponse(pages.state_of(shown), headers=HEADERS)
        text = pages.render(runs, index, name, request.query_params)
        return HTMLResponse(text, headers=HEADERS)

    def not_found(request: Request, cause: Exception) -> Response:
        return PlainTextResponse(f"Not found: {cause}.", 404, headers=HEADERS)

    routes = [Route("/", start), Route("/{page}", page), Route("/{run:int}/{page}", page)]
    return Starlette(
        routes=[Mount(f"/{token}", routes=routes)], exception_handlers={NotFoundError: not_found}
    )


def serve(runs: Sequence[Path], port: int, host: str) -> None:
    """Serve runs until Ctrl-C; print the address, and how to reach it from elsewhere. Raises
    OSError if the port is taken, or the host is no address of this machine."""
    # Every address begins with it, and only the printed URL holds it.
    token = secrets.token_urlsafe(16)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as e:
        raise OSError(
            f"--host {host} --port {port}: cannot listen there ({e.strerror}). Give an address of "
            "this machine (0.0.0.0: all of them) and a free port from 1024 on (0: any)."
        ) from e
    with listener, suppress(KeyboardInterrupt):
        listens_at, port, *_ = listener.getsockname()
        print(_describe_access(listens_at, port, token), flush=True)
        app = make_app([Run(folder) for folder in runs], token)
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


def _describe_access(host: str, port: int, token: str) -> str:
    """Return the address of the pages, and how to reach it from another machine."""
    listens, machine = ip_address(host), socket.gethostname()
    name = machine if listens.is_unspecified else f"[{host}]" if listens.version == 6 else host
    remote = "Nothing is encrypted: others on the network can read the pages and the address."
    if listens.is_loopback:
        user = os.environ.get("USER", "USER")
        remote = (
            f"On another machine, run: ssh -N -L {port}:{name}:{port} {user}@{machine}\n"
            "(use the host name that you log in to), and open this address there."
        )
    url = f"http://{name}:{port}/{token}/"
    access = "Only people with this address can open the pages. Ctrl-C stops the server."
    return f"{url}\n{access}\n{remote}"
