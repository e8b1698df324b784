"""The server answers only requests with the token, and only with the run's record and images."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import requests
import uvicorn
from PIL import Image
from starlette.testclient import TestClient

from swift_grpo_ext.tools.view import pages, server
from swift_grpo_ext.tools.view.runs import Run
from swift_grpo_ext.tools.view.server import make_app
from tests.rig.view.runs import Writer, add_logs, make_rows, make_run

SECRET = "not for the page"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A client of a run whose newest round names a symlink to a text file as its image."""
    folder = tmp_path_factory.mktemp("made")
    run_dir = make_run(folder / "run")
    (folder / "secret.txt").write_text(SECRET, encoding="utf-8")
    (folder / "link.png").symlink_to(folder / "secret.txt")
    link = str(folder / "link.png")
    rows = [replace(row, media=[link], fingerprint="new") for row in make_rows(3)]
    Writer(run_dir, session=1, start_step=3).write(rows)
    run = Run(run_dir)
    run.refresh()
    with TestClient(make_app([run], "T0ken"), base_url="http://127.0.0.1/T0ken/0/") as client:
        yield client


def test_nothing_without_the_token(client: TestClient) -> None:
    for path in ("0/samples", "t0ken/0/samples"):
        answer = client.get(f"http://127.0.0.1/{path}")
        assert (answer.status_code, answer.text) == (404, "Not Found")


def test_the_page_may_run_its_own_script_only(client: TestClient) -> None:
    assert client.get("..").url == client.get("overview").url
    page = client.get("overview").text
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert len(digests) == 1
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)">', page)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert html.unescape(policy).startswith(
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; "
    )
    for path in ("..", "samples", "state", image()):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == "frame-ancestors 'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("samples?sort=-reward&min_reward=0.5", "4/16"),
        ("groups", "train.3.0·Group0"),
        ("groups?round=train.1.0", "Spreadofrewards0.5"),
        ("group?round=train.2.0&group=1", "g1i1s2"),
        ("overview", "Nomonitor"),
    ],
)
def test_pages(client: TestClient, path: str, expected: str) -> None:
    """A page has this English text; spaces do not count."""
    answer = client.get(path)
    assert answer.status_code == 200
    main = answer.text.partition("<main")[2].partition("</main>")[0]
    assert ("data-state" in main.split(">")[0]) == ("round=" not in path)
    assert expected in re.sub(r'<span lang="zh">.*?</span>|<[^>]*>|\s+', "", main)


def test_one_page_of_many_samples(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS", 6)
    links = []
    for offset in (0, 6, 12):
        page = client.get(f"samples?min_step=0&offset={offset}").text
        links += re.findall(r'href="(group\?[^"]*)"', page)
        assert ('id="next"' in page) == (offset < 12)
    assert len(set(links)) == 16


def test_the_state_tells_when_something_is_new(client: TestClient, tmp_path: Path) -> None:
    state = client.get("state").text
    assert f'data-state="{state}"' in client.get("samples").text
    # Times of a step are logged after its samples are on disk.
    run = Run(make_run(tmp_path / "run"))
    states = [pages.state_of([run])]
    for _ in range(2):
        add_logs(run.run_dir, 1.0)
        states.append(pages.state_of([run]))
    assert len(set(states)) == 3
    assert states[0].endswith("…")  # nothing is read yet


def test_a_page_reads_what_is_new(tmp_path: Path) -> None:
    with TestClient(make_app([Run(tmp_path)], "T"), base_url="http://127.0.0.1/T/0/") as client:
        assert "No samples yet" in client.get("samples").text
        Writer(tmp_path).write(make_rows(0))
        assert ">4 / 4<" in client.get("samples").text


def image(round_: str = "train.2.0", group: int = 1, number: object = 0) -> str:
    return f"image?round={round_}&group={group}&index=0&turn=0&number={number}&size=full"


def test_images_of_the_record(client: TestClient) -> None:
    answer = client.get(image())
    assert answer.headers["content-type"] == "image/png"
    with Image.open(io.BytesIO(answer.content)) as shown:
        assert (shown.size, shown.getpixel((0, 0))) == ((56, 28), (200, 30, 0))


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "groups?round=train.9.0",
        "group",
        "group?round=train.1.0&group=7",
        "group?round=x&group=0",
        "samples?min_reward=x",
        image("train.3.0"),  # a symlink to a text
        image(number=1),
        image(number=-1),
        image("..%2F..%2Fsecret.txt"),
        "..%2f..%2fsecret.txt",
    ],
)
def test_wrong_questions_and_other_files(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text.startswith("Not found: " if "%2fsecret" not in path else "Not Found")
    assert SECRET not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_the_command_serves_until_it_is_ended(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints an address with the token, and how to reach it from another machine, or that it is
    not encrypted. A port in use is an error."""
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    monkeypatch.setenv("USER", "ann")
    run_dir, servers = make_run(tmp_path / "run"), []

    class Server(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Server)
    thread = threading.Thread(target=server.serve, args=([run_dir], 0, host), daemon=True)
    thread.start()
    try:
        printed, deadline = "", time.monotonic() + 60
        while not (printed and servers and servers[0].started):
            assert time.monotonic() < deadline
            printed += capsys.readouterr().out
            time.sleep(0.05)
        address, words, *remote = printed.splitlines()
        assert words == "Only people with this address can open the pages. Ctrl-C stops the server."
        shown = {"0.0.0.0": "gpu-7", "localhost": "127.0.0.1"}.get(host, host)
        assert address.startswith(f"http://{shown}:")
        port = int(address.rpartition(":")[2].partition("/")[0])
        if host == "0.0.0.0":
            address = address.replace("gpu-7", "127.0.0.1")
            assert remote[0].startswith("Nothing is encrypted: ")
        else:
            command = f"ssh -N -L {port}:{shown}:{port} ann@gpu-7"
            assert remote[0] == f"On another machine, run: {command}"
        assert "<main" in requests.get(address, timeout=60).text
        monkeypatch.setitem(pages.VALUES, "groups", lambda *_: [].pop())
        errors: list[logging.LogRecord] = []
        monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handle", errors.append)
        assert requests.get(f"{address}0/groups", timeout=60).status_code == 500
        assert [record.exc_info[0] for record in errors if record.exc_info] == [IndexError]
        root, _, token = address.rstrip("/").rpartition("/")
        assert len(token) > 16
        assert requests.get(f"{root}/samples", timeout=60).status_code == 404
        with pytest.raises(OSError, match=rf"--port {port}: cannot listen there \(.+\)"):
            server.serve([run_dir], port, host)
        with pytest.raises(
            OSError, match=r"^--host 192.0.2.1 --port 0: cannot listen there \(.+\)"
        ):
            server.serve([run_dir], 0, "192.0.2.1")
    finally:
        for one in servers:
            one.should_exit = True
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("host", "name", "remote"),
    [("::1", "[::1]", " -L 80:[::1]:80 "), ("::", socket.gethostname(), "Nothing is encrypted")],
)
def test_addresses_of_version_6_stand_in_brackets(
    host: str, name: str, remote: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A stand-in listens: this machine may have no such address."""
    listener = MagicMock()
    listener.getsockname.return_value = (host, 80, 0, 0)
    monkeypatch.setattr(socket, "create_server", lambda address, family: listener)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    server.serve([Path("run")], 80, host)
    printed = capsys.readouterr().out
    assert printed.startswith(f"http://{name}:80/")
    assert remote in printed
