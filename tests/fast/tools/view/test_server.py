"""The server answers only requests with the token, and only with the run's record and images."""

from __future__ import annotations

import html
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from swift_grpo_ext.tools.view import pages, server
from swift_grpo_ext.tools.view.runs import Run
from swift_grpo_ext.tools.view.server import make_app
from tests.rig.record.rows import open_log
from tests.rig.view.runs import add_logs, make_rows, make_run, open_run, write

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
    """A browser refuses the script if the hash is wrong (`test_browser.py`)."""
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


def test_one_page_of_many_samples(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS", 6)
    links = []
    for offset in (0, 6, 12, 18):
        page = client.get(f"samples?min_step=0&offset={offset}").text
        links += re.findall(r'href="(group\?[^"]*)"', page)
        assert ('id="next"' in page) == (offset < 18)
    assert len(links) == 24


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


@pytest.mark.parametrize(
    ("host", "name", "remote"),
    [
        ("127.0.0.1", "127.0.0.1", " run: ssh -N -L 80:127.0.0.1:80 ann@gpu-7"),
        ("::1", "[::1]", "On another machine, run: ssh -N -L 80:[::1]:80 ann@gpu-7"),
        ("0.0.0.0", "gpu-7", "Nothing is encrypted: "),
        ("::", "gpu-7", "Nothing is encrypted: "),
    ],
)
def test_the_address_and_how_to_reach_it_from_another_machine(
    host: str, name: str, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    monkeypatch.setenv("USER", "ann")
    address, words, shown, *_ = server._describe_access(host, 80, "T0ken").splitlines()
    assert address == f"http://{name}:80/T0ken/"
    assert words == "Only people with this address can open the pages. Ctrl-C stops the server."
    assert remote in shown


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
