"""Which files a request may name, where ms-swift's own rule is set."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import swift.utils
from fastapi.testclient import TestClient

from swift_grpo_ext.upstream.media_paths import LONGEST_PATH, VARIABLE, check_media
from tests.upstream import served
from tests.upstream.served import Deployed, Replica

pytestmark = pytest.mark.skipif(
    not hasattr(swift.utils, "SafeMediaPath"), reason="ms-swift 4.5 has no such rule"
)

REFUSED = f"outside the directories listed in the `{VARIABLE}`"


@pytest.fixture
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may be read, beside a file that may not."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "digit.png").write_bytes(b"digit")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def in_each_place(text: str) -> list[dict[str, Any]]:
    def said(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}]}

    return [
        *({"images": [text]}, {"videos": [text]}, {"audios": text}, {"videos": [[text, text]]}),
        {"images": [{"bytes": None, "path": text}]},
        *(said(f"See <img>{text}</img>."), said([{"type": "image", "image": text}])),
        said([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": text}}]),
    ]


def test_a_file_elsewhere_is_refused_wherever_it_is_named(allowed: Path) -> None:
    secret = str(allowed.parent / "secret.png")
    for request in in_each_place(secret):
        with pytest.raises(ValueError, match=REFUSED):
            check_media(request)
    for request in in_each_place(str(allowed / "digit.png")):
        check_media(request)


def test_a_server_refuses_the_request(allowed: Path) -> None:
    replica = Replica()
    asked = [served.request(0) | {"images": [str(allowed.parent / "secret.png")]}]
    refused = TestClient(Deployed(replica).app).post("/infer/", json={"infer_requests": asked})
    assert (refused.status_code, replica.groups) == (400, [])
    assert REFUSED in refused.json()["detail"]


@pytest.mark.parametrize(
    "name",
    [
        *("{}/../secret.png", " {}/../secret.png ", "file://{}/../secret.png", "{}/link.png"),
        *("{}/../none.png", "~/none.png", "~nobody0/none.png", "/etc/passwd", "/////etc/hosts"),
        "/" * 3991 + "etc/hosts",  # a path, and base64 as well
    ],
)
def test_ways_around_are_refused(name: str, allowed: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        check_media({"images": [name.format(allowed)]})


def test_protocols_that_read_files_are_refused(allowed: Path) -> None:
    with pytest.raises(ValueError, match=r"Refusing to read 'concat:/etc/passwd': concat:"):
        check_media({"videos": ["concat:/etc/passwd"]})


def test_what_is_no_file_passes(allowed: Path) -> None:
    pixels = base64.b64encode(bytes(300)).decode()
    assert len(pixels) < LONGEST_PATH
    for text in (pixels, pixels * 100, f"data:image/png;base64,{pixels}", "https://a.b/c.png"):
        for request in in_each_place(text):
            check_media(request)
    check_media({"messages": [None, {"content": 7}, {"content": [None]}], "images": 7})


def test_relative_paths_hold_from_ms_swifts_folder(
    allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(allowed))
    check_media({"images": ["digit.png"]})
    with pytest.raises(ValueError, match=REFUSED):
        check_media({"images": ["../secret.png"]})


def test_without_the_rule_all_is_read(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    for request in in_each_place(str(allowed.parent / "secret.png")):
        check_media(request)
