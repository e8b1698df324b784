"""`swift-grpo-ext view`: the server, for one person on one machine.

It listens on 127.0.0.1. Every address begins with a token that only the printed URL holds; what
lacks it is answered 404. Each refresh happens in one background thread.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from swift_grpo_ext.tools.view import media, queries
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.table import parse_round, warn_once
from swift_grpo_ext.version import __version__

logger = logging.getLogger(__name__)

STATIC = Path(__file__).with_name("static")
STATIC_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
REFRESH_SECONDS = 1.0
PAGE_ROWS = 50

HEADERS = [
    (b"content-security-policy",
     b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
     b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]  # fmt: skip
"""Of every answer: the page runs its own scripts, and no other."""


class Guard:
    """Answers 404 to whatever does not begin with the token, and adds `HEADERS`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # start and end of the server
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        first = scope["path"].lstrip("/").partition("/")[0]
        is_known = secrets.compare_digest(first.encode(), self._token.encode())
        app = self._app if is_known else Response("Not found.", 404)
        await app(scope, receive, send_with_headers)


def make_app(runs: Sequence[RunView], token: str) -> Starlette:
    """The application; who calls it refreshes the runs."""

    def answer(handler: Callable[[RunView, Request], Any]) -> Callable[[Request], Response]:
        def endpoint(request: Request) -> Response:
            try:
                run = runs[request.path_params["run"]]
                return JSONResponse(finite(handler(run, request)))
            except queries.BadQueryError as e:
                return JSONResponse({"problem": str(e)}, 400)
            except (LookupError, ValueError) as e:
                return JSONResponse({"problem": f"There is no such thing here ({e})."}, 404)

        return endpoint

    def state(request: Request) -> Response:
        return JSONResponse(finite({"version": __version__, "runs": [describe(r) for r in runs]}))

    api = "/api/{run:int}"
    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/api/state", state),
        Route(f"{api}/samples", answer(samples)),
        Route(f"{api}/rounds", answer(rounds)),
        Route(f"{api}/groups", answer(groups)),
        Route(f"{api}/group", answer(group)),
        Route(f"{api}/different", answer(different)),
        Route(f"{api}/curves", answer(curves)),
        Route(f"{api}/image", lambda request: image(runs, request)),
    ]
    return Starlette(
        routes=[Mount(f"/{token}", routes=routes)], middleware=[Middleware(Guard, token=token)]
    )


def page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


def static(request: Request) -> Response:
    """A file of the package's own, by its name among them."""
    names = {path.name: path for path in STATIC.iterdir() if path.suffix in STATIC_TYPES}
    path = names.get(request.path_params["name"])
    if path is None:
        return Response("Not found.", 404)
    return FileResponse(path, media_type=STATIC_TYPES[path.suffix])


def describe(run: RunView) -> dict[str, Any]:
    """What the page needs of a run before all else."""
    snapshot = run.snapshot
    return {
        "name": run.name,
        "version": snapshot.version,
        "is_whole": snapshot.is_whole,
        "problem": snapshot.problem,
        "samples": snapshot.table.num_rows,
        "greatest": pc.max(snapshot.table["reward"]).as_py(),
        "rounds": len(snapshot.rounds),
        "functions": snapshot.functions,
        "facets": snapshot.facets,
        "settings": {name: run.follower.settings.get(name) for name in SHOWN_SETTINGS},
    }


SHOWN_SETTINGS = ("model", "seed", "num_generations", "temperature", "learning_rate", "beta")


def samples(run: RunView, request: Request) -> dict[str, Any]:
    values = request.query_params
    try:
        offset, limit = int(values.get("offset") or 0), int(values.get("limit") or PAGE_ROWS)
    except ValueError as e:
        raise queries.BadQueryError(f"offset and limit: expected whole numbers ({e}).") from e
    query = queries.read_query(values)
    return queries.list_samples(run.snapshot, query, max(offset, 0), max(limit, 1))


def rounds(run: RunView, request: Request) -> list[dict[str, Any]]:
    return queries.list_rounds(run.snapshot)


def groups(run: RunView, request: Request) -> list[dict[str, Any]]:
    return queries.list_groups(run.snapshot.round(parse_round(request.query_params["round"])))


def group(run: RunView, request: Request) -> dict[str, Any]:
    values = request.query_params
    return run.group(parse_round(values["round"]), int(values["group"]))


def different(run: RunView, request: Request) -> dict[str, Any]:
    query = queries.read_query(request.query_params)
    return {"groups": queries.most_different(run.snapshot, query)}


def curves(run: RunView, request: Request) -> dict[str, Any]:
    from swift_grpo_ext.tools.view.curves import make_panels  # imports matplotlib: a second

    return make_panels(run.run_dir, run.snapshot)


def image(runs: Sequence[RunView], request: Request) -> Response:
    """`run`, `round`, `group`, `number`, `size`: an image that the record names."""
    values = request.query_params
    try:
        run = runs[request.path_params["run"]]
        number = int(values["number"])
        if number < 0 or values["size"] not in media.SIZES:
            raise ValueError(values["size"])
        name = run.medium_name(parse_round(values["round"]), int(values["group"]), number)
        content, kind = media.image_bytes(name, values["size"], run.limits)
    except (LookupError, ValueError):
        return Response("Not found.", 404)
    return Response(content, media_type=kind)


def finite(value: Any) -> Any:
    """JSON has no infinite numbers: null for them."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def serve(run_dirs: Sequence[str | os.PathLike[str]], port: int) -> None:
    """Serve until Ctrl-C; prints the address.

    Args:
        port: 0 for any that is free.

    Raises:
        FileNotFoundError: a folder is not there.
        OSError: the port is taken.
    """
    runs = open_runs(run_dirs)
    token = secrets.token_urlsafe(16)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as e:
            raise OSError(f"--port {port} is taken ({e.strerror}): give another, or 0.") from e
        listener.listen()
        stop = threading.Event()
        follow = threading.Thread(target=_follow, args=(runs, stop), daemon=True)
        follow.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
        print(f"{address}\nOnly who has this address can look. Ctrl-C ends it.", flush=True)
        config = uvicorn.Config(make_app(runs, token), log_level="warning", access_log=False)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            pass
        finally:
            stop.set()


def open_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> list[RunView]:
    """Raises FileNotFoundError where a folder is not there."""
    for run_dir in run_dirs:
        if not Path(run_dir).is_dir():
            raise FileNotFoundError(f"{run_dir} is no folder: give the --output_dir of a run.")
    warn_once()
    return [RunView(run_dir) for run_dir in run_dirs]


def _follow(runs: Sequence[RunView], stop: threading.Event) -> None:
    told = ""
    while not stop.is_set():
        for run in runs:
            try:
                run.follower.refresh()
            except (OSError, ValueError) as e:  # a file that is being replaced; of Arrow, too
                if str(e) != told:
                    logger.warning("%s cannot be read now (%s): tried again.", run.run_dir, e)
                told = str(e)
        stop.wait(REFRESH_SECONDS)
