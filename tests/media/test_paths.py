"""Which files a request may name, where ms-swift's own rule is set."""

from __future__ import annotations

import base64
import io
import ipaddress
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import swift.utils
from fastapi.testclient import TestClient
from PIL import Image, ImageFile
from swift.template import vision_utils

from swift_grpo_ext.media.paths import LONGEST_PATH, VARIABLE, check_media, check_redirects
from tests.server import served
from tests.server.served import Deployed, Replica

pytestmark = pytest.mark.skipif(
    not hasattr(swift.utils, "SafeMediaPath"), reason="ms-swift 4.5 has no such rule"
)

REFUSED = f"outside the directories listed in the `{VARIABLE}`"


@pytest.fixture(autouse=True)
def _addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names without a network: `a.b` is public, all others are private."""

    def resolve(host: str) -> list[Any]:
        return [ipaddress.ip_address("8.8.8.8" if host == "a.b" else "10.0.0.1")]

    monkeypatch.setattr(swift.utils.SafeUrlFetcher, "_resolve", resolve)
    monkeypatch.delenv("SWIFT_ALLOW_INTERNAL_URL", raising=False)


@pytest.fixture
def allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that may be read, beside a file that may not."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "allowed"
    folder.mkdir()
    (folder / "digit.png").write_bytes(b"digit")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "other").mkdir()
    (folder / "other").symlink_to(tmp_path / "other")
    (folder / "secret.png").write_bytes(b"another of that name")
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def in_each_place(text: str) -> list[dict[str, Any]]:
    def said(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}]}

    return [
        {"audios": text},
        {"rejected_images": [text]},
        {"videos": [[text, text]]},
        {"images": [{"bytes": None, "path": text}]},
        {"messages": [{"role": "system", "content": f"<img>{text}</img>"}]},
        {"messages": [{"role": "tool", "content": {"found": f"<img>{text}</img>"}}]},
        said([{"type": "text", "text": f"See <img>{text}"}, {"type": "text", "text": "</img>."}]),
        said([{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": text}}]),
    ]


def test_a_file_elsewhere_is_refused_wherever_it_is_named(allowed: Path) -> None:
    secret = str(allowed.parent / "secret.png")
    for request in in_each_place(secret):
        with pytest.raises(ValueError, match=REFUSED):
            check_media(request)
    for request in in_each_place(str(allowed / "digit.png")):
        check_media(request)


@pytest.mark.parametrize(
    "name",
    [
        " {}/../secret.png ",
        "file://{}/../secret.png",
        "{}/link.png",
        "{}/other/../secret.png",
        "data:/../../../../../../../..{}/../secret.png",
        "HTTP:/../../../../../../../..{}/../secret.png",
        "{}/../none.png",
        "~/none.png",
        "/" * 3991 + "etc/hosts",  # a path, and base64 as well
    ],
)
def test_ways_around_are_refused(name: str, allowed: Path) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        check_media({"images": [name.format(allowed)]})


def test_what_is_no_file_passes(allowed: Path) -> None:
    """But for protocols, some of which read files."""
    with pytest.raises(ValueError, match=r"Refusing to read 'concat:/etc/passwd': concat:"):
        check_media({"videos": ["concat:/etc/passwd"]})
    pixels = base64.b64encode(bytes(300)).decode()
    assert len(pixels) < LONGEST_PATH
    for text in (pixels, pixels * 100, f"data:image/png;base64,{pixels}", "https://a.b/c.png"):
        for request in in_each_place(text):
            check_media(request)
    with pytest.raises(ValueError, match=r"^images: .*10\.0\.0\.1, which is not a public"):
        check_media({"images": ["http://inside/c.png"]})
    check_media({"messages": [{"role": "user", "content": [1, 2]}], "images": 7})
    with pytest.raises(ValueError, match=r"^messages: cannot be read"):
        check_media({"messages": [None]})


def test_the_settings_of_ms_swift_hold(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder for relative paths; and without its rule, all is read."""
    secrets = in_each_place(str(allowed.parent / "secret.png"))
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(allowed))
    check_media({"images": ["digit.png"]})
    with pytest.raises(ValueError, match=REFUSED):
        check_media({"images": ["../secret.png"]})
    monkeypatch.delenv(VARIABLE)
    for request in secrets:
        check_media(request)


def picture(width: int, height: int) -> bytes:
    """A PNG of one colour: few bytes, whatever its size."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


class Moved(BaseHTTPRequestHandler):
    """Sends `/moved` on to the same server under another name."""

    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/moved" else 200)
        if self.path == "/moved":
            self.send_header("Location", f"http://localhost:{self.server.server_port}/secret")  # type: ignore[attr-defined]
        self.end_headers()
        self.wfile.write({"/large": picture(300, 300), "/there": b"content"}.get(self.path, b""))

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("load", ["load_file", "load_image", "load_audio"])
def test_a_replica_judges_what_it_fetches(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("requests", "_load_audio_librosa"):
        monkeypatch.setattr(vision_utils, name, getattr(vision_utils, name))
    monkeypatch.setenv("SWIFT_URL_ALLOWED_HOSTS", "127.0.0.1")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 299 * 300)
    check_redirects.__wrapped__()
    options = {"sampling_rate": 16000} if load == "load_audio" else {}
    server = HTTPServer(("127.0.0.1", 0), Moved)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert vision_utils.load_file(f"{url}/there").read() == b"content"
        with pytest.raises(ValueError, match="the host 'localhost' is not listed"):
            getattr(vision_utils, load)(f"{url}/moved", **options)
        with pytest.raises(ValueError, match=rf"{url}/large: Image size \(90000 pixels\) exceeds"):
            getattr(vision_utils, load)(f"{url}/large", **options)
        # A file's, too, before it is decoded.
        with pytest.raises(Image.DecompressionBombWarning):
            Image.open(io.BytesIO(picture(300, 300)))
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [300, 600])  # Pillow warns of the first, and refuses the second
def test_pictures_of_too_many_pixels_are_refused_by_their_header(
    side: int, allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 299 * 300)
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)  # nothing is decoded
    (allowed / "large.png").write_bytes(picture(side, 300))
    (allowed / "small.png").write_bytes(picture(299, 300))
    large, small = (base64.b64encode(picture(width, 300)).decode() for width in (side, 299))
    late = io.BytesIO()  # a JPEG whose size stands behind 100 kB of colour profile
    Image.new("L", (side, 300)).save(late, "JPEG", icc_profile=bytes(100_000))
    limit = "300 x 300 pixels; expected at most 89,700" if side == 300 else "size .180000 pixels"
    for text in (
        large,
        f"data:image/png;base64,{large}",
        str(allowed / "large.png"),
        base64.b64encode(late.getvalue()).decode(),
    ):
        for request in [*in_each_place(text), {"images": [{"bytes": text}]}]:
            with pytest.raises(ValueError, match=rf"^{next(iter(request))}: .*{limit}"):
                check_media(request)
    for text in (small, f"data:image/png;base64,{small}", f"file://{allowed}/small.png"):
        check_media({"images": [text]})
    monkeypatch.delenv(VARIABLE)  # with it, base64 has to be strict
    with pytest.raises(ValueError, match=limit):
        check_media({"images": [f"{large[:80]}\n{large[80:]}"]})
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    check_media({"images": [large]})


def test_a_server_names_the_field(allowed: Path) -> None:
    replica = Replica()
    asked = [served.request(0), served.request(1) | {"images": ["/etc/passwd"]}]
    refused = TestClient(Deployed(replica).app).post("/infer/", json={"infer_requests": asked})
    assert (refused.status_code, replica.groups) == (400, [])
    assert refused.json()["detail"].startswith("infer_requests[1].images: ")
