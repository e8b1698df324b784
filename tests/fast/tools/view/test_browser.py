"""Pages in headless Chromium: their script runs, a run that goes on, and hostile text (V2)."""

from __future__ import annotations

import html
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest
import uvicorn

from swift_grpo_ext.tools.view.server import make_app
from tests.rig.record.rows import open_log
from tests.rig.view.runs import HOSTILE, add_logs, make_rows, make_run, open_run, write

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")

asked: list[str] = []
"""The last parts of the paths that the browser has asked for."""


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Return a function that opens a page of a run, and returns its elements ten seconds later by
    the page's clock. After the first page is open, the run gets a round of hostile texts."""
    run_dir = make_run(tmp_path_factory.mktemp("runs") / "one")
    add_logs(run_dir, 1.0, 1.0, 1.0)
    app, profile = make_app([open_run(run_dir)], "T0ken"), tmp_path_factory.mktemp("profile")

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        asked.append(str(scope.get("path")).rpartition("/")[2])
        if asked.count("state") == 1 and asked[-1] == "state":
            rows = [replace(row, text=HOSTILE) for row in make_rows(4)]
            write(open_log(run_dir, session=1, start_step=4), rows)
        await app(scope, receive, send)

    def shown(page: str, *options: str) -> str:
        command = [
            *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server"),
            *("--enable-logging=stderr", f"--user-data-dir={profile}", *options),
            *("--virtual-time-budget=10000", "--dump-dom", f"{address}/T0ken/0/{page}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert "CONSOLE" not in done.stderr  # errors of scripts, and what the policy refuses
        assert 'data-ready="yes"' in done.stdout
        return done.stdout

    server = uvicorn.Server(uvicorn.Config(answer, log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield shown
        server.should_exit = True
        thread.join()


def test_a_run_that_goes_on_and_hostile_text(show: Callable[..., str]) -> None:
    text = show("samples", "--accept-lang=zh-CN")
    assert '<html lang="zh">' in text
    assert 'id="count">24 / 24<' in text
    assert asked.count("samples") == 2  # it is not loaded again without news
    group = show("group?round=train.4.0&group=1", "--accept-lang=en-US")
    assert '<html lang="en">' in group
    for page in (text, group):
        assert html.escape(HOSTILE[:20], quote=False) in page
        assert "<title>1<" not in page
        main = page.partition("<main")[2].partition("</main>")[0]
        assert not re.search("<script|<img[^>]* src=.x\\b", main)


def test_filters_images_and_curves(show: Callable[..., str]) -> None:
    text = show("samples?text=i1+s1&phase=train")
    assert 'id="count">2 /' in text
    assert re.search("<details[^>]* open", text)  # it has the filter of phases
    assert {"reward ↓", "stop (21)"} <= {*re.findall("<option[^>]*>([^<]*)<", text)}
    asked.clear()
    show("group?round=train.1.0&group=1")
    assert "image" in asked
    assert re.search("data-panel=.grad_norm.*<polyline", show("overview"), re.S)
