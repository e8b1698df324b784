"""Rows of all forms in one run: rollout and training see the same of each."""

from __future__ import annotations

import base64
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from PIL.ExifTags import Base

from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    GROUP_SIZE,
    LORA,
    client_argv,
    digits,
    logged_steps,
    run_training,
    server_argv,
    web,
    write_lines,
    write_video,
)

LONG = ("--vllm_max_model_len", "1024")
KINDS = ("text", "image", "images", "video", "image+video")
NO_CACHE = '{"kv_cache_memory_bytes": 134217728, "mm_processor_cache_gb": 0}'
WAYS = {
    "colocate": (),
    "server": (),
    # Without its cache vLLM reads the orientation of an image once more.
    "no cache of vLLM's": ("--vllm_engine_kwargs", NO_CACHE),
}
"""Further arguments of the training."""


def photograph(image: Image.Image, path: Path, orientation: int) -> str:
    """Save a picture as phones do: turned or mirrored, with its orientation in EXIF."""
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    image.convert("RGB").save(path, exif=exif)
    return str(path)


def mixed_rows(assets: Path, folder: Path, url: str) -> list[dict[str, Any]]:
    """Return rows, first those of text with null or missing columns. Images differ in size, and all
    have an orientation in EXIF."""
    paths = [row["images"][0] for row in digits(assets, range(12))]
    sizes = [(56, 112), (140, 56), (84, 84), (112, 168), (56, 140), (168, 56)]
    suffixes, orientations = ("png", "png", "png", "webp", "jpg", "webp"), (8, 3, 5, 7, 6, 2)
    own = [
        photograph(Image.open(paths[i]).resize(size), folder / f"{i}.{suffix}", orientation)
        for i, (size, suffix, orientation) in enumerate(
            zip(sizes, suffixes, orientations, strict=True)
        )
    ]
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
        ("<image>In base64?", {"images": content[3:4]}),
        ("<image>From the web?", {"images": [f"{url}/0.png"]}),
        ("<image>Upright, <image>and upright?", {"images": own[4:]}),
        ("<video>Which digits are seen?", {"videos": [long], "images": []}),
        ("<video>And beside <image>?", {"videos": [short], "images": own[:1]}),
    ]
    rows = [{"messages": [{"role": "user", "content": text}], **more} for text, more in plain]
    rows.append({"messages": [{"role": "user", "content": parts}]})
    return [{**row, "solution": "1"} for row in rows]


@pytest.mark.parametrize(
    "way",
    ["colocate", *(pytest.param(w, marks=pytest.mark.extra) for w in WAYS if w != "colocate")],
)
def test_rows_of_all_forms(way: str, assets: Path, tmp_path: Path) -> None:
    """Each of two rounds has every row; the second follows an update."""
    env = {"SWIFT_ALLOW_INTERNAL_URL": "true"}
    with ExitStack() as servers:
        url = servers.enter_context(web(tmp_path))
        rows = mixed_rows(assets, tmp_path, url)
        path = write_lines(tmp_path / "rows.jsonl", rows)
        # A Parquet file with a column `image` that holds bytes.
        content = (tmp_path / "1.png").read_bytes()
        inline = {"query": "<image>As bytes?", "image": {"bytes": content, "path": None}}
        inline["solution"] = "1"
        pq.write_table(pa.Table.from_pylist([inline]), tmp_path / "inline.parquet")
        argv = [
            *("--per_device_train_batch_size", str(GROUP_SIZE * (len(rows) + 1)), *LORA, *LONG),
            *("--learning_rate", "2e-3", "--dataset", str(path), str(tmp_path / "inline.parquet")),
            *WAYS[way],
        ]
        if way == "server":
            server = rollout_server(*server_argv(assets, *LONG), log=tmp_path / "log", env=env)
            argv += client_argv(servers.enter_context(server))
        finished = run_training(assets, path, tmp_path / "a", *argv, steps=2, env=env)
    assert finished.returncode == 0, finished.cause
    assert "differ by more than" not in finished.output
    first, second = logged_steps(tmp_path / "a/run")
    for step in (first, second):
        assert step["grad_norm"] > 0
        assert 0 < step["rollout_gap/max"] < 1e-4
        assert {kind: step[f"rollout_gap/{kind}"] < 1e-5 for kind in KINDS} == dict.fromkeys(
            KINDS, True
        )
