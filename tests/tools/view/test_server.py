"""The server answers who has the token, and gives out nothing but the run's record and images."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from swift_grpo_ext.tools.view import server
from swift_grpo_ext.tools.view.group import RunView
from swift_grpo_ext.tools.view.server import make_app, open_runs
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
    rows = [replace(r, media=[str(names[r.sample_id.group])]) for r in rows]
    Writer(run_dir, session=1, start_step=3).write(rows)
    return run_dir


@pytest.fixture(scope="module")
def client(run_dir: Path) -> Iterator[TestClient]:
    run = RunView(run_dir)
    run.follower.refresh()
    with TestClient(make_app([run], "T0ken"), base_url="http://127.0.0.1/T0ken/") as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/api/state", "/t0ken/", "/T0ken2/", "/static/app.js", "//"])
def test_nothing_without_the_token(client: TestClient, path: str) -> None:
    answer = client.get(f"http://127.0.0.1{path}")
    assert (answer.status_code, answer.text) == (404, "Not found.")


def test_the_page_may_run_its_own_scripts_only(client: TestClient) -> None:
    for path in ("", "static/app.js", "api/state", "nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_state(client: TestClient) -> None:
    [run] = client.get("api/state").json()["runs"]
    assert (run["name"], run["samples"], run["rounds"], run["greatest"]) == ("run", 16, 4, 1.0)
    assert run["functions"] == ["Accuracy", "Format"]


def test_what_the_pages_ask_for(client: TestClient) -> None:
    samples = client.get("api/0/samples?sort=reward&descending=1&limit=1").json()
    assert (samples["count"], samples["rows"][0]["round"]) == (16, "train.3.0")
    assert client.get("api/0/rounds").json()[0]["round"] == "train.0.0"
    assert len(client.get("api/0/groups?round=train.2.0").json()) == 2
    group = client.get("api/0/group?round=train.2.0&group=1").json()
    assert [s["text"] for s in group["samples"]] == ["g1 i0 s2", "g1 i1 s2"]
    assert client.get("api/0/different").json()["groups"][0]["group"] == 1
    panels = {p["key"]: p["curves"] for p in client.get("api/0/curves").json()["panels"]}
    assert panels["loss"][0]["points"] == [[1, 0.5], [2, 0.25], [3, 0.16667]]
    reward = panels["reward"][0]
    assert reward["points"] == [[1, 0.25], [2, 0.25], [3, 0.25], [4, 0.25]]
    assert reward["band"][0] == [1, 0.05, 0.45]  # of the groups' means, 0 and 0.5


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("api/0/samples?sort=nothing", 400),
        ("api/0/samples?offset=x", 400),
        ("api/7/samples", 404),
        ("api/0/group?round=train.9.0&group=0", 404),
        ("api/0/group?round=x&group=0", 404),
        ("api/0/group", 404),
        ("api/0/groups?round=train.1.0.0", 404),
    ],
)
def test_wrong_questions(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert answer.json()["problem"]


def image(round_: str = "train.2.0", group: int = 0, number: object = 0, size: str = "full") -> str:
    return f"api/0/image?round={round_}&group={group}&number={number}&size={size}"


def test_images_of_the_record(client: TestClient, run_dir: Path) -> None:
    expected = (run_dir / "images/1.png").read_bytes()
    assert client.get(image(group=1)).content == expected
    followed = client.get(image("train.3.0", group=1))  # a symlink to an image
    assert (followed.content, followed.headers["content-type"]) == (expected, "image/png")
    assert client.get(image(size="small")).headers["content-type"] == "image/jpeg"


@pytest.mark.parametrize(
    "path",
    [
        image("train.3.0", group=0),  # a symlink to a text
        image(number=1),
        image(number=-1),
        image(number="../0"),
        image(group=9),
        image(size="../../secret.txt"),
        image("..%2F..%2Fsecret.txt"),
        "static/..%2Fserver.py",
        "static/../server.py",
        "static/%2e%2e/%2e%2e/cli.py",
        "static/server.py",
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


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone is no folder: give the --output_dir"):
        open_runs([tmp_path / "gone"])


def test_a_file_that_cannot_be_read_now_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, tries = threading.Event(), []

    class Flaky:
        run_dir = "run"
        follower: Any

        def refresh(self) -> None:
            tries.append(1)
            if len(tries) < 3:
                raise OSError("gone")
            stop.set()

    flaky = Flaky()
    flaky.follower = flaky
    monkeypatch.setattr(server, "REFRESH_SECONDS", 0)
    server._follow([flaky], stop)  # type: ignore[list-item]
    assert len(tries) == 3
    assert [r.getMessage() for r in caplog.records] == [
        "run cannot be read now (gone): tried again."
    ]
