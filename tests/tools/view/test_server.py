"""The server answers who has the token, and gives out nothing but the run's record and images."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from swift_grpo_ext.tools.view import pages, server
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.server import make_app
from tests.tools.view.runs import Writer, make_rows, make_run

SECRET = "not for the page"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Round 3's groups name, as their image: a symlink to a text; a symlink to an image."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "secret.txt").write_text(SECRET, encoding="utf-8")
    run_dir = make_run(folder / "run")
    (folder / "link.png").symlink_to(folder / "secret.txt")
    (folder / "good.png").symlink_to(run_dir / "images/1.png")
    rows = make_rows(3)
    names = [folder / "link.png", folder / "good.png"]
    rows = [
        replace(r, media=[str(names[r.sample_id.group])], fingerprint=f"new {r.sample_id.group}")
        for r in rows
    ]
    Writer(run_dir, session=1, start_step=3).write(rows)
    return run_dir


@pytest.fixture(scope="module")
def client(run_dir: Path) -> Iterator[TestClient]:
    run = RunView(run_dir)
    run.refresh()
    with TestClient(make_app([run], "T0ken"), base_url="http://127.0.0.1/T0ken/") as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/state", "/0/samples", "/t0ken/", "/T0ken2/", "//"])
def test_nothing_without_the_token(client: TestClient, path: str) -> None:
    answer = client.get(f"http://127.0.0.1{path}")
    assert (answer.status_code, answer.text) == (404, "Not Found")


def test_the_page_may_run_its_own_script_only(client: TestClient) -> None:
    page = client.get("").text  # follows to the samples
    [script] = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)">', page)
    assert html.unescape(policy).startswith(
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
    )
    for path in ("", "state", image()):
        headers = client.get(path).headers
        assert headers["content-security-policy"] == "frame-ancestors 'none'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def read(client: TestClient, path: str) -> str:
    """Return a page's English text, without its spaces."""
    answer = client.get(path)
    assert answer.status_code == 200
    main = answer.text.partition("<main")[2].partition("</main>")[0]
    return re.sub(r'<span lang="zh">.*?</span>|<[^>]*>|\s+', "", main)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("0/samples", "16of16"),
        ("0/samples?sort=-reward&min_reward=0.5", "4of16"),
        ("0/samples?min_reward=x", "xisnonumber"),
        ("0/samples?offset=x", "invalidliteral"),
        ("0/groups", "train.3.0·Group0"),
        ("0/groups?round=train.1.0", "train.1.0·Group1"),
        ("0/groups?round=train.1.0", "Spreadofrewards0.500"),
        ("0/group?round=train.2.0&group=1", "g1i1s2"),
        ("0/overview", "Noroundwaswatched"),
        ("0/overview", "Accuracy"),
    ],
)
def test_pages(client: TestClient, path: str, expected: str) -> None:
    assert expected in read(client, path)


def test_one_page_of_many_samples(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "PAGE_ROWS", 6)
    links = []
    for offset in (0, 6, 12):
        page = client.get(f"0/samples?steps=0:&offset={offset}").text
        links += re.findall(r'href="(\.\./0/group\?[^"]*)"', page)
        assert ('id="next"' in page) == (offset < 12)
    assert len(set(links)) == 16


def test_the_state_tells_when_something_is_new(client: TestClient, run_dir: Path) -> None:
    state = client.get("state").text
    assert f'data-state="{state}"' in client.get("0/samples").text
    assert state == "1"


@pytest.mark.parametrize(
    "path",
    [
        *("7/samples", "0/nothing", "0/groups?round=train.9.0", "0/groups?round=x"),
        *("0/group?round=train.9.0&group=0", "0/group?round=train.1.0&group=7", "0/group"),
        *("0/group?round=x&group=0", "0/image"),
    ],
)
def test_wrong_questions(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith("text/plain")


def image(round_: str = "train.2.0", group: int = 0, number: object = 0, size: str = "full") -> str:
    return f"0/image?round={round_}&group={group}&number={number}&size={size}"


def test_images_of_the_record(client: TestClient, run_dir: Path) -> None:
    for path in (image(group=1), image("train.3.0", group=1), image(group=1, size="small")):
        answer = client.get(path)  # the second is a symlink to the first
        assert answer.headers["content-type"] == "image/png"
        with Image.open(io.BytesIO(answer.content)) as shown:
            assert (shown.size, shown.getpixel((0, 0))) == ((56, 28), (200, 30, 0))


@pytest.mark.parametrize(
    "path",
    [
        image("train.3.0", group=0),  # a symlink to a text
        image(number=1),
        image(number=-1),
        image(number="../0"),
        image(group=9),
        image("..%2F..%2Fsecret.txt"),
        "0/..%2Fserver.py",
        "0/%2e%2e/%2e%2e/cli.py",
        "../secret.txt",
        "..%2f..%2fsecret.txt",
        "images/0.png",
    ],
)
def test_other_files_are_not_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert SECRET not in answer.text
    assert "import" not in answer.text


def test_a_file_that_cannot_be_read_now_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, tries = threading.Event(), []

    class Flaky:
        run_dir = "run"

        def refresh(self) -> None:
            tries.append(1)
            if len(tries) < 3:
                raise OSError("gone")
            stop.set()

    monkeypatch.setattr(server, "REFRESH_SECONDS", 0)
    server._follow([Flaky()], stop)  # type: ignore[list-item]
    assert len(tries) == 3
    assert [r.getMessage() for r in caplog.records] == [
        "run cannot be read now (gone): tried again."
    ]
