"""A request names only files and addresses that the server allows, and a replica fetches no others
(F5, F7)."""

import base64
import ipaddress
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import swift.utils
from swift.model import get_processor
from swift.template import Template, get_template, vision_utils
from swift.template.template_inputs import StdTemplateInputs

from swift_grpo_ext.media.paths import check_media, check_redirects
from swift_grpo_ext.rollout.dispatch import RequestError
from swift_grpo_ext.rollout.engine import RolloutEngine

KINDS = ("images", "videos", "audios")
VARIABLE = "SWIFT_MEDIA_ALLOWED_DIRS"
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


def in_each_form(kind: str, text: str) -> list[dict[str, Any]]:
    name = f"{kind.removesuffix('s')}_url"
    part = {"type": name, name: {"url": text}}
    return [
        {kind: text},
        {kind: [f" {text}\n"]},
        {kind: [[text]]},
        {kind: [{"bytes": None, "path": text}]},
        {"messages": [{"role": "user", "content": [part]}]},
    ]


def in_each_place(text: str) -> list[dict[str, Any]]:
    tag, forms = f"<img>{text}</img>", [in_each_form(kind, text) for kind in KINDS]
    parts = [{"type": "text", "text": f"<img>{text}"}, {"type": "text", "text": "</img>."}]
    said = ("system", tag), ("tool", {"found": tag}), ("user", parts)
    messages = [[{"role": role, "content": content}] for role, content in said]
    return [*chain(*forms), *({"messages": each} for each in messages)]


def test_a_file_elsewhere_is_refused_wherever_it_is_named(allowed: Path) -> None:
    """Content and public addresses pass."""
    for request in in_each_place(str(allowed.parent / "secret.png")):
        with pytest.raises(ValueError, match=REFUSED):
            check_media(request)
    pixels = base64.b64encode(bytes(300)).decode()
    contents = pixels, pixels * 100, f"data:image/png;base64,{pixels}"
    for text in (*contents, "https://a.b/c.png", str(allowed / "digit.png")):
        for request in in_each_place(text):
            check_media(request)
    check_media({"messages": [{"role": "user", "content": [1, 2]}]})


WAYS_AROUND = [
    " {}/../secret.png ",
    "file://{}/../secret.png",
    "{}/link.png",
    "{}/other/../secret.png",
    "data:/../../../../../../../..{}/../secret.png",
    "HTTP:/../../../../../../../..{}/../secret.png",
    "{}/../none.png",
    "~/none.png",
    "/" * 3991 + "etc/hosts",  # a path, and base64 as well
]
PROTOCOLS = ["concat:/etc/passwd", "rtsp://10.0.0.1/a", "HTTP://10.0.0.1/a.mp4"]
PROTOCOLS += ["subfile,,start,0,end,9,,:http://10.0.0.1/a", "async:cache:http://10.0.0.1/a"]


def test_ways_around_are_refused_by_field(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some protocols read files. ms-swift refuses none without its list of folders."""
    for name in WAYS_AROUND:
        with pytest.raises(ValueError, match=REFUSED):
            check_media({"images": [name.format(allowed)]})
    with pytest.raises(ValueError, match=r"^messages: cannot be read"):
        check_media({"messages": [None]})
    monkeypatch.delenv(VARIABLE)
    for text in PROTOCOLS:
        with pytest.raises(ValueError, match=r"^images: Refusing to (read|fetch)"):
            check_media({"images": [text]})
    with pytest.raises(ValueError, match=r"^images: .*10\.0\.0\.1, which is not a public"):
        check_media({"images": ["http://inside/c.png"]})


def test_the_settings_of_ms_swift_hold(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder for relative paths is used. Without its list of folders, all files are read, also
    one with the name of a protocol."""
    monkeypatch.setenv("ROOT_IMAGE_DIR", str(allowed))
    check_media({"images": ["digit.png"]})
    with pytest.raises(ValueError, match=REFUSED):
        check_media({"images": ["../secret.png"]})
    monkeypatch.delenv(VARIABLE)
    (allowed / "train:1.png").write_bytes(b"digit")
    check_media({"images": ["../secret.png", "train:1.png"]})


# --- what a replica fetches ---


class Site(SimpleHTTPRequestHandler):
    """Serves a folder. Sends `/moved` on to the same server under another name, by `/further`."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append(self.path)
        if host := {"/moved": "127.0.0.1", "/further": "localhost"}.get(self.path):
            self.send_response(302)
            self.send_header("Location", f"http://{host}:{server.server_port}/further")
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that a replica may fetch from by its number alone, not by the name localhost."""
    monkeypatch.setenv("SWIFT_URL_ALLOWED_HOSTS", "127.0.0.1")
    monkeypatch.setattr(Template, "encode", Template.encode)
    check_redirects()
    server: Any = HTTPServer(("127.0.0.1", 0), partial(Site, directory=str(tmp_path)))
    server.asked = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def processor(assets: Path) -> Any:
    return get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")


def read(name: str) -> tuple[str, bytes]:
    return name, Path(name).read_bytes()


def encode(processor: Any, load: Callable[[str], Any] = read, **media: Any) -> list[Any]:
    """Return the media of a request as a template's loader, which fetches nothing, reads them."""
    template, loaded = get_template(processor, template_type="qwen2_5_vl"), []
    template.set_mode("vllm")

    def load_all(inputs: StdTemplateInputs) -> dict[str, Any]:
        for value in (*inputs.images, *inputs.videos, *inputs.audios):
            for item in value if isinstance(value, list) else [value]:
                loaded.append(load(item["path"] if isinstance(item, dict) else item))
        return {}

    template._encode_truncated = load_all
    template.encode({"messages": [{"role": "user", "content": "?"}], **media})
    return loaded


@pytest.mark.parametrize("kind", KINDS)
def test_a_replica_judges_each_hop_and_gives_its_loaders_files(
    kind: str, site: Any, processor: Any, tmp_path: Path
) -> None:
    (tmp_path / "medium").write_bytes(bytes(300))
    for media in in_each_form(kind, f"{site.url}/medium?size=1"):
        [(name, content)] = encode(processor, **media)
        assert content == bytes(300)
        assert not Path(name).exists()
    assert site.asked == ["/medium?size=1"] * 5
    for media in in_each_form(kind, f"{site.url}/moved"):
        site.asked.clear()
        with pytest.raises(ValueError, match=r"the host 'localhost' is not listed") as refused:
            encode(processor, **media)
        assert site.asked == ["/moved", "/further"]
    # The replica names the row without another fetch, which would follow a redirect unchecked.
    row = {"messages": [{"role": "user", "content": "?"}], kind: [f"{site.url}/moved"]}
    replica: Any = SimpleNamespace(serves=True)
    with pytest.raises(RequestError, match=r"'localhost' is not listed.*; it shows .*/moved"):
        RolloutEngine._refuse(replica, row, refused.value)
    assert site.asked == ["/moved", "/further"]


PLAYLISTS = [
    "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}/secret\n#EXT-X-ENDLIST\n",
    "ffconcat version 1.0\nfile '{}/secret'\n",
    "<?xml version='1.0'?>\n<MPD><BaseURL>{}/secret</BaseURL></MPD>",
    "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nc=IN IP4 127.0.0.1\r\nm=video 5004 RTP/AVP 96\r\n",
]


@pytest.mark.parametrize("playlist", PLAYLISTS, ids=["hls", "concat", "dash", "sdp"])
def test_a_playlist_is_no_medium(playlist: str, site: Any, processor: Any, tmp_path: Path) -> None:
    """decord would fetch the addresses in it without a check."""
    content = playlist.format(site.url).encode()
    (file := tmp_path / "medium").write_bytes(content)
    text = base64.b64encode(content).decode()
    in_lines = f"{text[:9]}\n{text[9:]}"
    for medium in (f"{site.url}/medium", str(file), text, f"data:x/y;base64,{text}", in_lines):
        with pytest.raises(ValueError, match="' is a playlist"):
            encode(processor, vision_utils.load_video_internvl, videos=[medium])
    assert site.asked == ["/medium"]
