"""The media that a request may name, and a replica's fetches (F7)."""

from __future__ import annotations

import base64
import io
import ipaddress
import threading
import wave
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import qwen_vl_utils
import swift.utils
import transformers.audio_utils
import transformers.image_utils
import transformers.video_utils
from fastapi.testclient import TestClient
from PIL import Image, ImageFile
from swift.model import get_processor
from swift.template import Template, get_template, vision_utils
from swift.template.template_inputs import StdTemplateInputs

from swift_grpo_ext.media.paths import check_media, check_redirects
from swift_grpo_ext.rollout.dispatch import RequestError
from swift_grpo_ext.rollout.engine import RolloutEngine
from tests.rig.server import served
from tests.rig.server.served import Deployed, Replica

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


def in_each_place(text: str) -> list[dict[str, Any]]:
    def said(content: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": content}]}

    return [
        {"audios": text},
        {"images": [text]},
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
    """Except for protocols: some of them read files."""
    with pytest.raises(ValueError, match=r"Refusing to read 'concat:/etc/passwd': concat:"):
        check_media({"videos": ["concat:/etc/passwd"]})
    pixels = base64.b64encode(bytes(300)).decode()
    for text in (pixels, pixels * 100, f"data:image/png;base64,{pixels}", "https://a.b/c.png"):
        for request in in_each_place(text):
            check_media(request)
    with pytest.raises(ValueError, match=r"^images: .*10\.0\.0\.1, which is not a public"):
        check_media({"images": ["http://inside/c.png"]})
    check_media({"messages": [{"role": "user", "content": [1, 2]}]})
    with pytest.raises(ValueError, match=r"^messages: cannot be read"):
        check_media({"messages": [None]})


def test_the_settings_of_ms_swift_hold(allowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder for relative paths is used. Without its list of folders, all files are read."""
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


# --- what a replica fetches ---


class Site(BaseHTTPRequestHandler):
    """Sends `/moved` on to the same server under another name, by way of `/further`."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.asked.append(self.path)
        there = f"http://{{}}:{server.server_port}/{{}}"
        moved = {
            "/moved": there.format("127.0.0.1", "further"),
            "/further": there.format("localhost", "secret"),
        }
        found = server.content.get(self.path.partition("?")[0])
        if self.path in moved:
            self.send_response(302)
            self.send_header("Location", moved[self.path])
        else:
            self.send_response(404 if found is None else 200)
        self.end_headers()
        self.wfile.write(found or b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server that a replica may fetch from by its number alone, not by the name localhost."""
    monkeypatch.setenv("SWIFT_URL_ALLOWED_HOSTS", "127.0.0.1")
    monkeypatch.setattr(Template, "encode", Template.encode)
    check_redirects()
    server: Any = HTTPServer(("127.0.0.1", 0), Site)
    server.asked, server.content = [], {}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def processor(assets: Path) -> Any:
    return get_processor(str(assets / "tiny_vlm"), model_type="qwen2_5_vl")


LOADERS: dict[str, dict[str, Callable[[str], Any]]] = {
    "images": {
        "ms-swift": vision_utils.load_image,
        "transformers": transformers.image_utils.load_image,
        "qwen_vl_utils": lambda image: qwen_vl_utils.fetch_image({"image": image}),
    },
    "videos": {
        "ms-swift, httpx": lambda video: vision_utils.load_video_hf([video]),
        "ms-swift, decord": vision_utils.load_video_internvl,
        "ms-swift, opencv": vision_utils.load_vllm_video,
        "transformers": transformers.video_utils.load_video,
        "qwen_vl_utils": lambda video: qwen_vl_utils.fetch_video({"video": video}),
        "libav": av.open,
    },
    "audios": {
        "ms-swift": lambda audio: vision_utils.load_audio(audio, 16000),
        "transformers": transformers.audio_utils.load_audio,
    },
}


def encode(processor: Any, load: Callable[[str], Any], **media: Any) -> list[Any]:
    """Return the media of a request as a template's loader reads them."""
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


def in_each_form(kind: str, text: str) -> list[dict[str, Any]]:
    name = kind.removesuffix("s")
    part = {"type": f"{name}_url", f"{name}_url": {"url": text}}
    return [
        {kind: text},
        {kind: [f" {text}\n"]},
        {kind: [[text]]},
        {kind: [{"bytes": None, "path": text}]},
        {"messages": [{"role": "user", "content": [part]}]},
    ]


@pytest.mark.parametrize(("kind", "of"), [(kind, of) for kind in LOADERS for of in LOADERS[kind]])
def test_a_replica_judges_each_hop_of_what_it_fetches(
    kind: str, of: str, site: Any, processor: Any
) -> None:
    for media in in_each_form(kind, f"{site.url}/moved"):
        with pytest.raises(ValueError, match=r"the host 'localhost' is not listed"):
            encode(processor, LOADERS[kind][of], **media)
        assert site.asked == ["/moved", "/further"]
        site.asked.clear()


def test_what_a_replica_fetches_is_what_a_file_is(
    site: Any, processor: Any, tmp_path: Path
) -> None:
    """With each loader a medium is fetched once, and equals that of a file. No file is left."""
    Image.new("RGB", (60, 30), "red").save(tmp_path / "image.png")
    write_video(tmp_path / "video.mp4")
    with wave.open(str(tmp_path / "audio.wav"), "wb") as audio:
        audio.setparams((1, 2, 16000, 0, "NONE", ""))
        audio.writeframes(bytes(range(200)) * 160)
    names: list[str] = []
    files = ("image.png", "video.mp4", "audio.wav")
    for file, (kind, loaders) in zip(files, LOADERS.items(), strict=True):
        site.content[f"/{file}"] = (tmp_path / file).read_bytes()
        for of, load in loaders.items():
            if of == "libav" or (kind == "audios" and find_spec("librosa") is None):
                continue
            for media in in_each_form(kind, f"{site.url}/{file}?size=1"):
                [(name, fetched)] = encode(processor, partial(with_name, load), **media)
                names.append(name)
                assert repr_of(fetched) == repr_of(load(str(tmp_path / file))), (kind, of)
    assert len(site.asked) == len(names)
    assert not [name for name in names if Path(name).exists()]


def with_name(load: Callable[[str], Any], name: str) -> tuple[str, Any]:
    return name, load(name)


def repr_of(loaded: Any) -> Any:
    """Return all numbers of a loaded medium."""
    if isinstance(loaded, (list, tuple)):
        return [repr_of(item) for item in loaded]
    is_array = hasattr(loaded, "__array__") or isinstance(loaded, Image.Image)
    return np.asarray(loaded).tolist() if is_array else repr(loaded)


def write_video(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for k in range(8):
            pixels = np.full((48, 64, 3), 30 * k, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def test_a_replica_fetches_no_more_than_it_may(
    site: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFT_MAX_DOWNLOAD_SIZE_MB", "0.5")
    site.content["/long"] = bytes(600_000)
    with pytest.raises(ValueError, match=rf"{site.url}/long': .*larger than"):
        encode(processor, print, videos=[f"{site.url}/long"])


def test_a_replica_names_the_cause_without_another_fetch(site: Any, processor: Any) -> None:
    """A search for the cause would follow a redirect without a check."""
    row = {"messages": [{"role": "user", "content": "<image>?"}], "images": [f"{site.url}/moved"]}
    with pytest.raises(ValueError, match="'localhost' is not listed") as refused:
        encode(processor, vision_utils.load_image, **row)
    site.asked.clear()
    replica: Any = SimpleNamespace(serves=True)
    with pytest.raises(RequestError, match=r"'localhost' is not listed.*; it shows .*/moved"):
        RolloutEngine._refuse(replica, row, refused.value)
    assert site.asked == []


PLAYLISTS = {
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{}/secret\n#EXT-X-ENDLIST\n",
    "concat": "ffconcat version 1.0\nfile '{}/secret'\n",
    "dash": "<?xml version='1.0'?>\n<MPD><BaseURL>{}/secret</BaseURL></MPD>",
    "sdp": "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nc=IN IP4 127.0.0.1\r\nm=video 5004 RTP/AVP 96\r\n",
}


@pytest.mark.parametrize("name", PLAYLISTS)
def test_a_playlist_is_no_medium(name: str, site: Any, processor: Any, tmp_path: Path) -> None:
    """decord would fetch the addresses in it without a check."""
    content = PLAYLISTS[name].format(site.url).encode()
    site.content["/list.mp4"] = content
    (tmp_path / "list.mp4").write_bytes(content)
    encoded = base64.b64encode(content).decode()
    for text in (
        f"{site.url}/list.mp4",
        str(tmp_path / "list.mp4"),
        encoded,
        f"{encoded[:9]}\n{encoded[9:]}",
        f"data:video/mp4;base64,{encoded}",
    ):
        with pytest.raises(ValueError, match="' is a playlist"):
            encode(processor, vision_utils.load_video_internvl, videos=[text])
    assert site.asked == ["/list.mp4"]


@pytest.mark.parametrize(
    "text",
    [
        "rtsp://10.0.0.1/a",
        "HTTP://10.0.0.1/a.mp4",
        "http:/10.0.0.1/a.mp4",
        "concat:http://10.0.0.1/a|",
        "subfile,,start,0,end,9,,:http://10.0.0.1/a",
        "async:cache:http://10.0.0.1/a",
        "tcp://10.0.0.1:80",
    ],
)
def test_protocols_are_refused_without_a_list_of_folders(text: str) -> None:
    """ffmpeg has dozens, and ms-swift refuses none if its list of folders is not set."""
    for request in in_each_place(text):
        with pytest.raises(ValueError, match=r"Refusing to (read|fetch)"):
            check_media(request)


def test_a_file_of_such_a_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train:1.png").write_bytes(picture(3, 3))
    check_media({"images": ["train:1.png"]})


@pytest.mark.parametrize("side", [300, 600])  # Pillow warns of the first, and refuses the second
def test_pictures_of_too_many_pixels_are_refused_by_their_header(
    side: int, site: Any, processor: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 299 * 300)
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)  # nothing is decoded
    site.content["/large.png"] = content = picture(side, 300)
    (tmp_path / "large.png").write_bytes(content)
    encoded = base64.b64encode(content).decode()
    for text in (
        f"{site.url}/large.png",
        str(tmp_path / "large.png"),
        encoded,
        f"data:image/png;base64,{encoded}",
    ):
        with pytest.raises(
            (Image.DecompressionBombWarning, Image.DecompressionBombError),
            match=rf"Image size \({side * 300} pixels\) exceeds",
        ):
            encode(processor, vision_utils.load_image, images=[text])


def test_a_server_names_the_field(allowed: Path) -> None:
    replica = Replica()
    asked = [served.request(0), served.request(1) | {"images": ["/etc/passwd"]}]
    refused = TestClient(Deployed(replica).app).post("/infer/", json={"infer_requests": asked})
    assert (refused.status_code, replica.groups) == (400, [])
    assert refused.json()["detail"].startswith("infer_requests[1].images: ")
