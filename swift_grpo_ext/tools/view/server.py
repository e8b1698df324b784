"""`swift-grpo-ext view`: the server, for one person on one machine.

It listens on 127.0.0.1. Every address begins with a token that only the printed URL holds; what
lacks it is answered 404. One background thread reads what the runs write.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence

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


def make_app(runs: Sequence[RunView], token: str) -> Starlette:
    """Return the application; who calls it refreshes the runs."""

    def start(request: Request) -> Response:
        return RedirectResponse("0/samples", headers=HEADERS)

    def state(request: Request) -> Response:
        return PlainTextResponse(pages.state_of(runs), headers=HEADERS)

    def page(request: Request) -> Response:
        number, name = request.path_params["run"], request.path_params["page"]
        query = dict(request.query_params)
        try:
            run = runs[number]
            if name == "image":  # by round, group and number: what the run's record names
                place = parse_round(query["round"]), int(query["group"]), int(query["number"])
                content = image_bytes(run.medium_name(*place), query["size"])
                return Response(content, media_type="image/png", headers=HEADERS)
            values = {
                "samples": lambda: pages.samples_values(run, query),
                "groups": lambda: pages.groups_values(run, query),
                "group": lambda: pages.group_values(runs, number, query),
                "overview": lambda: pages.overview_values(runs, number),
            }[name]()
        except (LookupError, ValueError) as e:
            return PlainTextResponse(f"There is no such thing here ({e}).", 404)
        html = pages.render(name, runs, number, **values)
        return HTMLResponse(html, headers=HEADERS)

    routes = [
        Route("/", start),
        Route("/state", state),
        Route("/{run:int}/{page}", page),
    ]
    return Starlette(routes=[Mount(f"/{token}", routes=routes)])


def serve(run_dirs: Sequence[str | os.PathLike[str]], port: int) -> None:
    """Serve until Ctrl-C; print the address.

    Args:
        port: 0 for any that is free.

    Raises:
        FileNotFoundError: a folder is not there.
        OSError: the port is taken.
    """
    runs = pages.open_runs(run_dirs)
    token = secrets.token_urlsafe(16)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as e:
            raise OSError(f"--port {port} is taken ({e.strerror}): give another, or 0.") from e
        listener.listen()
        stop = threading.Event()
        threading.Thread(target=_follow, args=(runs, stop), daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
        print(f"{address}\nOnly who has this address can look. Ctrl-C ends it.", flush=True)
        config = uvicorn.Config(make_app(runs, token), log_level="warning", access_log=False)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        finally:
            stop.set()


def _follow(runs: Sequence[RunView], stop: threading.Event) -> None:
    """Read what the runs write until `stop` is set; an error is told once and tried again."""
    told = ""
    while not stop.is_set():
        for run in runs:
            try:
                run.refresh()
            except (OSError, ValueError) as e:  # a file that is being replaced; of Arrow, too
                if str(e) != told:
                    logger.warning("%s cannot be read now (%s): tried again.", run.run_dir, e)
                told = str(e)
        stop.wait(REFRESH_SECONDS)
