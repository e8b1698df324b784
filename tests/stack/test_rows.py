"""One data set with good and bad rows: rollout and training see the same of each good row, and the
group of each bad one is replaced as a whole (M1, M3, M5). `tests/unit/checks/test_forms.py` has all
forms of rows."""

import base64
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from PIL.ExifTags import Base

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    GROUP_SIZE,
    LORA,
    client_argv,
    digits,
    logged_steps,
    read_records,
    server_argv,
    train,
    web,
    write_lines,
    write_video,
)

Row = dict[str, Any]
STEPS = 3  # one epoch
KINDS = ("text", "image", "images", "video", "image+video")
MARKS = ("", "<image>", "<video>")
LENGTH = ("--vllm_max_model_len", "1024")
NO_CACHE = '{"kv_cache_memory_bytes": 134217728, "mm_processor_cache_gb": 0}'
"""Without its cache vLLM reads the orientation of an image once more."""

ADVANTAGES = (-0.866, -0.619, 0.124, 1.361)
"""Differences of rewards from their group's mean, over its standard deviation. Rewards are
proportional to the square of the index in the group."""


def asks(name: str, *images: str, mark: str = "<image>", text: str = "", **columns: Any) -> Row:
    messages: list[Any] = [{"role": "user", "content": f"{mark}{name}?{text}"}]
    shown: Row = {"images": [*images]} if images else {}
    return {"messages": messages, "solution": name, **shown, **columns}


def photographs(paths: list[str], folder: Path) -> list[str]:
    """Save pictures of several sizes as phones do: turned or mirrored, with an orientation in
    EXIF."""
    sizes = [(56, 112), (140, 56), (84, 84), (112, 168), (56, 140), (168, 56)]
    endings, orientations = ("png", "png", "png", "webp", "jpg", "webp"), (8, 3, 5, 7, 6, 2)
    saved = []
    for path, size, ending, orientation in zip(paths, sizes, endings, orientations, strict=True):
        saved.append(str(folder / f"数字 {len(saved)}.{ending}"))
        exif = Image.Exif()
        exif[Base.Orientation] = orientation
        Image.open(path).resize(size).convert("RGB").save(saved[-1], exif=exif)
    return saved


def good_rows(digit: str, own: list[str], videos: list[str], folder: Path, url: str) -> list[Row]:
    image = Image.open(digit).convert("RGB")
    image.convert("CMYK").save(folder / "cmyk.jpg")
    Image.new("I;16", (56, 56), 40_000).save(folder / "16bit.png")
    image.save(folder / "animated.gif", save_all=True, append_images=[image.rotate(90)])
    Image.new("RGB", (1, 1), "white").save(folder / "pixel.png")
    files = ("cmyk.jpg", "16bit.png", "animated.gif", "pixel.png")
    content = base64.b64encode(Path(own[3]).read_bytes()).decode()
    inline = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    question = {"type": "text", "text": "a part of a data URL?"}
    return [
        asks("text alone", mark=""),
        asks("columns that are null", mark="", images=None, videos=None),
        asks("a path", own[0]),
        asks("two images", *own[1:3], mark="<image> and <image>"),
        asks("two images in a row", *own[4:], mark="<image>Upright, <image>and "),
        *(asks(name, str(folder / name)) for name in files),
        asks("base64", content),
        asks("URL", f"{url}/1.png"),
        asks("a video", mark="<video>", videos=videos[:1], images=[]),
        asks("a video and", own[0], mark="<image>Beside <video>", videos=videos[1:]),
        asks("surplus marks", digit, mark="<image> and <image>: "),
        {
            "messages": [{"role": "user", "content": [inline, question]}],
            "solution": "a part of a data URL",
        },
    ]


def bad_rows(digit: str, folder: Path) -> list[Row]:
    Image.open(digit).convert("RGB").save(folder / "whole.jpg")
    (folder / "cut.jpg").write_bytes((folder / "whole.jpg").read_bytes()[:-200])
    return [
        *(asks(name, str(folder / name)) for name in ("none.png", "cut.jpg")),
        asks("dead URL", "http://127.0.0.1:9/digit.png"),
        asks("too long", digit, text=" again" * 2000),
        asks("beyond the engine", digit, text=" again" * 1200),
    ]


def write(assets: Path, folder: Path, url: str) -> tuple[list[str], set[str], set[str]]:
    """Write the data set; return its files, and the names of good and of bad rows."""
    paths = [row["images"][0] for row in digits(assets, range(12))]
    Image.open(paths[1]).save(folder / "1.png")
    videos = [
        str(write_video(paths, folder / "long.mp4")),
        str(write_video(paths[3:7], folder / "short.mp4")),
    ]
    good = good_rows(paths[0], photographs(paths[:6], folder), videos, folder, url)
    bad = bad_rows(paths[0], folder)
    path = write_lines(folder / "rows.jsonl", [*good, *bad])
    # A Parquet file with a column `image` that holds bytes.
    image = {"bytes": Path(paths[2]).read_bytes(), "path": None}
    inline = {"query": "<image>bytes?", "image": image, "solution": "bytes"}
    pq.write_table(pa.Table.from_pylist([inline]), folder / "inline.parquet")
    names = [{row["solution"] for row in rows} for rows in ([*good, inline], bad)]
    return [str(path), str(folder / "inline.parquet")], *names


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_rows_of_all_forms(mode: str, assets: Path, tmp_path: Path) -> None:
    env = {"SWIFT_ALLOW_INTERNAL_URL": "true"}
    with ExitStack() as stack:
        url = stack.enter_context(web(tmp_path))
        files, good, bad = write(assets, tmp_path, url)
        size, rest = divmod(len(good | bad), STEPS)
        assert rest == 0, "the sampler leaves out the rest"
        argv = [
            *("--dataset", *files, "--truncation_strategy", "delete", "--max_length", "1500"),
            *("--per_device_train_batch_size", str(size * GROUP_SIZE), *LORA, *LENGTH),
            *("--learning_rate", "2e-3", "--reward_funcs", "name"),
        ]
        if mode == "server":
            command = server_argv(assets, *LENGTH, "--vllm_engine_kwargs", NO_CACHE)
            server = rollout_server(*command, log=tmp_path / "server.log", env=env)
            argv += client_argv(stack.enter_context(server))
        run = tmp_path / "run"
        samples = train(assets, Path(files[0]), run, *argv, steps=STEPS, env=env)
    assert_groups_are_whole(samples, good)

    log = (run / "log").read_text(encoding="utf-8")
    names = good | bad
    assert {n for n in names if any(f"asks '{mark}{n}?" in log for mark in MARKS)} == bad
    steps = logged_steps(run / "run")
    counts = [step["prompts/replaced"] for step in steps]
    assert sum(counts) == log.count("takes the place of the whole group") > 0

    assert "differ by more than" not in log
    seen = {kind for kind in KINDS if any(f"rollout_gap/{kind}" in step for step in steps)}
    assert seen == {*KINDS}
    for step in steps:
        assert step["grad_norm"] > 0
        assert 0 < step["rollout_gap/max"] < 1e-4
        assert max(step.get(f"rollout_gap/{kind}", 0) for kind in ("mean", *KINDS)) < 1e-5
    # The record has the name or a digest of each picture, and no content in the prompt's text.
    rows = to_rows(read_samples(run / "run"))
    assert max(len(row.prompt) for row in rows) < 1000
    assert {len(row.media) for row in rows} == {0, 1, 2}
    for found in read_records(run / "record", "advantages"):
        expected = ADVANTAGES[SampleId.parse(found["name"]).index]
        assert found["advantage"] == pytest.approx(expected, abs=1e-3)


def assert_groups_are_whole(samples: dict[str, Any], good: set[str]) -> None:
    """Assert that each group has one good row, and each good row a group."""
    prompts: dict[tuple[int, int], set[str]] = {}
    for name, sample in samples.items():
        sample_id = SampleId.parse(name)
        prompts.setdefault((sample_id.step, sample_id.group), set()).add(sample["solution"])
    assert len(samples) == GROUP_SIZE * len(prompts)
    assert all(len(names) == 1 for names in prompts.values())
    assert set().union(*prompts.values()) == good
