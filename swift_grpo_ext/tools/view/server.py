"""`swift-grpo-ext view`: the server, for one person.

It listens on 127.0.0.1, or where `--host` says. Every address begins with a token that only the
printed URL holds; what lacks it is answered 404, as is what no record has. An error of a page is
answered 500, and its traceback is in the log (uvicorn's). One background thread reads what the run
writes.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import duckdb
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route

from swift_grpo_ext.tools.view import pages, several
from swift_grpo_ext.tools.view.group import RunView, image_bytes
from swift_grpo_ext.tools.view.runs import NotFoundError, parse_place

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 1.0

Query = Mapping[str, str]
"""The values of an address."""

HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",  # the page itself holds the rest of it
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def make_app(runs: Sequence[RunView], token: str) -> Starlette:
    """Return the application; who calls it refreshes the runs. Each run's pages stand below its
    number."""

    def start(request: Request) -> Response:
        return RedirectResponse("0/overview" if len(runs) == 1 else "runs", headers=HEADERS)

    def pair(query: Query) -> dict[str, Any]:
        numbers = query.get("a", ""), query.get("b", "")
        if not all(number.isdecimal() and int(number) < len(runs) for number in numbers):
            raise NotFoundError(f"a={numbers[0]}, b={numbers[1]}: expected the numbers of two runs")
        return several.pair_values(runs, (int(numbers[0]), int(numbers[1])))

    pages_of_all = {"runs": lambda query: several.runs_values(runs), "pair": pair}
    mounts = [Mount(f"/{n}", routes=_run_routes(runs, run)) for n, run in enumerate(runs)]
    routes = [Route("/", start), *mounts, *_routes(runs, None, pages_of_all)]
    return Starlette(
        routes=[Mount(f"/{token}", routes=routes)], exception_handlers={NotFoundError: _not_found}
    )


def _run_routes(runs: Sequence[RunView], run: RunView) -> list[BaseRoute]:
    """Return the routes of one run's pages and images."""

    def image(request: Request) -> Response:
        query = request.query_params  # by round, group and number: what the run's record names
        place = parse_place(query, "group", "number")
        turn = parse_place(query, "index", "turn")[1:] if "index" in query else ()
        content = image_bytes(run.medium_name(*place, *turn), query.get("size", ""))
        return Response(content, media_type="image/png", headers=HEADERS)

    pages_of_run = {
        "overview": lambda query: pages.overview_values(run),
        "samples": lambda query: pages.samples_values(run, query),
        "groups": lambda query: pages.groups_values(run, query),
        "group": lambda query: pages.group_values(run, query),
    }
    return [Route("/image", image), *_routes(runs, run, pages_of_run)]


def _routes(
    runs: Sequence[RunView],
    run: RunView | None,
    values_of: Mapping[str, Callable[[Query], dict[str, Any]]],
) -> list[BaseRoute]:
    """Return the routes of a run's pages, or of all runs', by their names, and of their state."""

    def state(request: Request) -> Response:
        return PlainTextResponse(pages.state_of(runs if run is None else [run]), headers=HEADERS)

    def page(request: Request) -> Response:
        name = request.path_params["page"]
        if name not in values_of:
            raise NotFoundError(f"there is no page {name}")
        values = values_of[name](request.query_params)
        return HTMLResponse(pages.render(name, run, runs, **values), headers=HEADERS)

    return [Route("/state", state), Route("/{page}", page)]


def _not_found(request: Request, cause: Exception) -> Response:
    return PlainTextResponse(f"Not found: {cause}.", 404, headers=HEADERS)


def serve(runs: Sequence[Path], port: int, host: str) -> None:
    """Serve until Ctrl-C; print the address, and how to reach it from elsewhere.

    Args:
        runs: their folders.
        port: 0 for any that is free.
        host: the address of this machine at which to listen; 0.0.0.0 for all.

    Raises:
        OSError: the port is taken, or the address is none of this machine's.
    """
    views = [RunView(folder) for folder in runs]
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
        threading.Thread(target=_follow, args=(views, stop), daemon=True).start()
        listens_at, port, *_ = listener.getsockname()
        print(_how_to_look(listens_at, port, token), flush=True)
        config = uvicorn.Config(make_app(views, token), log_level="warning", access_log=False)
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


def _follow(runs: Sequence[RunView], stop: threading.Event) -> None:
    """Read what the runs write until `stop` is set; an error is told once and tried again."""
    told: set[str] = set()
    while not stop.is_set():
        is_behind = False
        for run in runs:
            try:
                run.refresh(REFRESH_SECONDS)
                is_behind |= not run.record.is_whole
            except (OSError, ValueError, duckdb.Error) as e:  # a file that is being replaced
                if str(e) not in told:
                    logger.warning("%s cannot be read now (%s): tried again.", run.run_dir, e)
                told.add(str(e))
        if not is_behind:
            stop.wait(REFRESH_SECONDS)
