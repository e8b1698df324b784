"""`swift-grpo-ext view`: the server, for one person on one machine.

It listens on 127.0.0.1. Every address begins with a token that only the printed URL holds; what
lacks it is answered 404. One background thread reads what the run writes.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Sequence
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


def serve(runs: Sequence[Path], port: int) -> None:
    """Serve until Ctrl-C; print the address.

    Args:
        runs: their folders.
        port: 0 for any that is free.

    Raises:
        OSError: the port is taken.
    """
    run = RunView(runs[0])
    token = secrets.token_urlsafe(16)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as e:
            raise OSError(f"--port {port} is taken ({e.strerror}): give another, or 0.") from e
        listener.listen()
        stop = threading.Event()
        threading.Thread(target=_follow, args=(run, stop), daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
        print(f"{address}\nOnly who has this address can look. Ctrl-C ends it.", flush=True)
        config = uvicorn.Config(make_app(run, token), log_level="warning", access_log=False)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        finally:
            stop.set()


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
