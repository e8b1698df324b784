"""Rows as people have them, in one run: both sides see the same of each."""

from __future__ import annotations

import base64
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.stack.processes import rollout_server
from tests.stack.rounds import (
    GROUP_SIZE,
    LORA,
    client_argv,
    digits,
    logged_steps,
    run_training,
    server_argv,
    write_lines,
    write_video,
)

pytestmark = pytest.mark.stack

LONG = ("--vllm_max_model_len", "1024")
KINDS = ("text", "image", "images", "video", "image+video")


@contextmanager
def web(folder: Path) -> Iterator[str]:
    """A web server of this machine for a folder's files."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def mixed_rows(assets: Path, folder: Path, url: str) -> list[dict[str, Any]]:
    """Text first, in which columns are null or missing; no two images have one size."""
    paths = [row["images"][0] for row in digits(assets, range(12))]
    for number, (width, height) in enumerate([(56, 112), (140, 56), (84, 84), (112, 168)]):
        Image.open(paths[number]).resize((width, height)).save(folder / f"{number}.png")
    upright, turned = Image.open(paths[5]).resize((56, 140)).convert("RGB"), Image.Exif()
    turned[0x0112] = 6
    upright.save(folder / "photo.jpg", exif=turned)
    own = [str(folder / f"{number}.png") for number in range(4)]
    content = [base64.b64encode(Path(path).read_bytes()).decode() for path in own]
    long = str(write_video(paths[:12], folder / "long.mp4"))
    short = str(write_video(paths[3:7], folder / "short.mp4"))
    data_url = f"data:image/png;base64,{content[2]}"
    parts = [
        {"type": "image_url", "image_url": {"url": data_url}},
        {"type": "text", "text": "In parts: which digit?"},
    ]
    plain = [
        ("No image at all: say a digit.", {}),
        ("Columns are null: say another digit, please.", {"images": None, "videos": None}),
        ("<image>By its path?", {"images": own[:1]}),
        ("Two: <image> and <image>?", {"images": own[1:3]}),
        ("<image>In base64?", {"images": content[3:]}),
        ("<image>From the web?", {"images": [f"{url}/0.png"]}),
        ("<image>A photograph?", {"images": [str(folder / "photo.jpg")]}),
        ("<video>Which digits are seen?", {"videos": [long], "images": []}),
        ("<video>And beside <image>?", {"videos": [short], "images": own[:1]}),
    ]
    rows = [{"messages": [{"role": "user", "content": text}], **more} for text, more in plain]
    rows.append({"messages": [{"role": "user", "content": parts}]})
    return [{**row, "solution": "1"} for row in rows]


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_rows_of_all_forms(mode: str, assets: Path, tmp_path: Path) -> None:
    """Every row is met in each of two rounds, the second after an update."""
    env = {"SWIFT_ALLOW_INTERNAL_URL": "true"}
    with web(tmp_path) as url:
        rows = mixed_rows(assets, tmp_path, url)
        path = write_lines(tmp_path / "rows.jsonl", rows)
        # Another file of another form: one image in a column `image`, as bytes.
        content = (tmp_path / "1.png").read_bytes()
        inline = {"query": "<image>As bytes?", "image": {"bytes": content, "path": None}}
        inline["solution"] = "1"
        pq.write_table(pa.Table.from_pylist([inline]), tmp_path / "inline.parquet")
        argv = [
            *("--per_device_train_batch_size", str(GROUP_SIZE * (len(rows) + 1)), *LORA, *LONG),
            *("--learning_rate", "2e-3", "--dataset", str(path), str(tmp_path / "inline.parquet")),
        ]
        if mode == "colocate":
            finished = run_training(assets, path, tmp_path / "a", *argv, steps=2, env=env)
        else:
            serving = server_argv(assets, *LONG)
            with rollout_server(*serving, log=tmp_path / "server.log", env=env) as port:
                argv += client_argv(port)
                finished = run_training(assets, path, tmp_path / "a", *argv, steps=2, env=env)
    assert finished.returncode == 0, finished.cause
    first, second = logged_steps(tmp_path / "a/run")
    for step in (first, second):
        assert step["grad_norm"] > 0
        assert 0 < step["rollout_gap/max"] < 1e-4
        assert {kind: step[f"rollout_gap/{kind}"] < 1e-5 for kind in KINDS} == dict.fromkeys(
            KINDS, True
        )
