"""The server answers only requests with the token, and only with the run's record and images. In
headless Chromium the pages' script runs, and follows a run that goes on (V2)."""

import html
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient

from swift_grpo_ext.tools.view import pages, server
from swift_grpo_ext.tools.view.runs import Run
from swift_grpo_ext.tools.view.server import make_app
from tests.rig.record.rows import open_log
from tests.rig.view.runs import HOSTILE, add_logs, make_rows, make_run, open_run, write

SECRET = "not for the page"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a run whose newest round names a symlink to a text file as its image."""
    folder = tmp_path_factory.mktemp("made")
    run_dir = make_run(folder / "run")
    (folder / "secret.txt").write_text(SECRET, encoding="utf-8")
    (folder / "link.png").symlink_to(folder / "secret.txt")
    link = str(folder / "link.png")
    rows = [replace(row, media=[link], fingerprint="new") for row in make_rows(4)]
    write(open_log(run_dir, session=1, start_step=4), rows)
    app = make_app([open_run(run_dir)], "T0ken")
    with TestClient(app, base_url="http://127.0.0.1/T0ken/0/") as client:
        yield client


def image(round_: str = "train.2.0", number: object = 0) -> str:
    return f"image?round={round_}&group=1&index=0&turn=0&number={number}&size=full"


def test_the_page_may_run_its_own_script_only(client: TestClient) -> None:
    """A browser refuses the script if the hash is wrong (see below)."""
    assert client.get("..").url == client.get("overview").url
    page = client.get("overview").text
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)">', page)
    allowed = r"default-src 'none'; script-src 'sha256-[^' ]+'; style-src 'unsafe-inline'; "
    assert re.match(allowed, html.unescape(policy))
    for path in ("..", "samples", "state", image()):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == "frame-ancestors 'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_the_state_tells_when_something_is_new(client: TestClient, tmp_path: Path) -> None:
    state = client.get("state").text
    assert f'data-state="{state}"' in client.get("samples").text
    assert "data-state" not in client.get("groups?round=train.1.0").text.partition("</main>")[0]
    # Times of a step are logged after its samples are on disk.
    run = Run(make_run(tmp_path / "run"))
    states = [pages.state_of([run])]
    for _ in range(2):
        add_logs(run.run_dir, 1.0)
        states.append(pages.state_of([run]))
    assert len(set(states)) == 3
    assert states[0].endswith("…")  # nothing is read yet


@pytest.mark.parametrize(
    "path",
    [
        *("nothing", "group?round=train.1.0&group=7", "group?round=x&group=0", "samples?sort=text"),
        *("groups?round=train.9.0", "samples?min_reward=x", "samples?offset=a"),
        image("train.4.0"),  # a symlink to a text
        *(image(number=1), image(number=-1), image("..%2F..%2Fsecret.txt")),
        *("..%2f..%2fsecret.txt", "http://127.0.0.1/0/samples", "http://127.0.0.1/t0ken/0/samples"),
    ],
)
def test_wrong_questions_other_files_and_no_token(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/plain")
    is_no_route = "%2fsecret" in path or path.startswith("http")
    assert answer.text.startswith("Not Found" if is_no_route else "Not found: ")
    assert SECRET not in answer.text


def test_the_command_serves_until_ctrl_c(tmp_path: Path) -> None:
    code = "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    run_dir = str(make_run(tmp_path / "run"))
    command = [sys.executable, "-c", code, "view", run_dir, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", address)
        assert "<main" in httpx.get(address, follow_redirects=True, trust_env=False).text
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_where_it_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for host, port in (taken.getsockname(), ("192.0.2.1", 0)):
            with pytest.raises(OSError, match=rf"--host {host} --port {port}: cannot listen"):
                server.serve([Path("run")], port, host)


# --- in a browser ---

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed")

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


@needs_browser
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


@needs_browser
def test_filters_images_and_curves(show: Callable[..., str]) -> None:
    text = show("samples?text=i1+s1&phase=train")
    assert 'id="count">2 /' in text
    assert re.search("<details[^>]* open", text)  # it has the filter of phases
    assert {"reward ↓", "stop (21)"} <= {*re.findall("<option[^>]*>([^<]*)<", text)}
    asked.clear()
    show("group?round=train.1.0&group=1")
    assert "image" in asked
    assert re.search("data-panel=.grad_norm.*<polyline", show("overview"), re.S)
