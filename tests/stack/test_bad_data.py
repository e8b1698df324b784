"""`--truncation_strategy delete` over bad rows of every kind: groups stay whole."""

from __future__ import annotations

import base64
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import to_rows
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.processes import rollout_server
from tests.rig.rounds import (
    BATCH,
    GROUP_SIZE,
    LORA,
    client_argv,
    logged_steps,
    read_records,
    server_argv,
    train,
    web,
    write_lines,
    write_video,
)

Row = dict[str, Any]

PROMPTS = BATCH // GROUP_SIZE


@dataclass
class Kinds:
    """A data set with all kinds of rows, and the names of the good and of the bad ones."""

    rows: Path
    good: set[str]
    bad: set[str]
    steps: int
    """Steps of one epoch."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with web(tmp_path) as address:
        yield address


@pytest.fixture
def kinds(assets: Path, url: str, tmp_path: Path) -> Kinds:
    digits = sorted((assets / "digits").rglob("*.png"))[:4]
    digit = digits[0]
    image, content = Image.open(digit).convert("RGB"), digit.read_bytes()
    spaces = tmp_path / "with spaces" / "数字 七.png"
    spaces.parent.mkdir()
    image.save(spaces)
    image.convert("CMYK").save(tmp_path / "cmyk.jpg")
    Image.new("I;16", (56, 56), 40_000).save(tmp_path / "16bit.png")
    image.save(tmp_path / "animated.gif", save_all=True, append_images=[image.rotate(90)])
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    image.save(tmp_path / "exif.jpg", exif=exif)
    Image.new("RGB", (1, 1), "white").save(tmp_path / "pixel.png")
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "cut.png").write_bytes(content[:-200])
    image.save(tmp_path / "whole.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:-200])
    Image.new("RGB", (20_000, 28)).save(tmp_path / "wide.png")
    image.save(tmp_path / "page.pdf")
    (tmp_path / "frames").mkdir()
    image.save(tmp_path / "frames/1.png")
    video = write_video(list(map(str, digits)), tmp_path / "digits.mp4")
    image.save(tmp_path / "1.png")
    base64_text = base64.b64encode(content).decode()

    def asks(name: str, *images: str, text: str = "", mark: str = "<image>", **columns: Any) -> Row:
        messages: list[Any] = [{"role": "user", "content": f"{mark}{name}?{text}"}]
        shown: Row = {"images": [*images]} if images else {}
        return {"messages": messages, "solution": name, **shown, **columns}

    def in_parts(name: str, *parts: Row) -> Row:
        content = [*parts, {"type": "text", "text": f"{name}?"}]
        return {"messages": [{"role": "user", "content": content}], "solution": name}

    files = ("cmyk.jpg", "16bit.png", "animated.gif", "exif.jpg", "pixel.png")
    lost = ("none.png", "text.png", "cut.png", "cut.jpg", "wide.png", "page.pdf")
    good = [
        asks("text alone", mark=""),  # whose columns are null
        asks("spaces", str(spaces)),
        *(asks(name, str(tmp_path / name)) for name in files),
        asks("base64", base64_text),
        asks("data URL", f"data:image/png;base64,{base64_text}"),
        asks("URL", f"{url}/1.png"),
        asks("file URL", f"file://{digit}"),
        asks("one path", images=str(digit)),
        asks("a video", mark="<video>", videos=[str(video)]),
        asks("surplus marks", str(digit), mark="<image> and <image>: "),
        asks("a tag", mark="Of the tag <image>: "),
        in_parts("a part", {"type": "image", "image": str(digit)}),
        in_parts("a part of a URL", {"type": "image_url", "image_url": {"url": str(digit)}}),
        in_parts("inline", {"type": "image", "image": f"data:image/png;base64,{base64_text}"}),
    ]
    bad = [
        *(asks(name, str(tmp_path / name)) for name in lost),
        asks("dead URL", "http://127.0.0.1:9/digit.png"),
        asks("no such URL", f"{url}/none.png"),
        asks("too long", str(digit), text=" again" * 1200),
        asks("beyond the engine", str(digit), text=" again" * 600),
        asks("folder", mark="<video>", videos=[str(tmp_path / "frames")]),
        asks("lost for a teacher", str(digit), teacher_images=[str(tmp_path / "none.png")]),
        asks("cut for a teacher", str(digit), teacher_images=[str(tmp_path / "cut.png")]),
        asks("list in a text", images=str([str(digit)])),
        asks("placeholder", str(digit), text="<|image_pad|>"),
        in_parts("cut part", {"type": "image", "image": str(tmp_path / "cut.jpg")}),
        in_parts("PDF part", {"type": "image", "image": str(tmp_path / "page.pdf")}),
        in_parts("no type", {"image": str(digit)}),
    ]
    rows = write_lines(tmp_path / "rows.jsonl", [*good, *bad])
    names = [{row["solution"] for row in rows} for rows in (good, bad)]
    assert len(good + bad) % PROMPTS == 0  # the sampler leaves the rest out
    return Kinds(rows, *names, steps=len(good + bad) // PROMPTS)


@pytest.mark.parametrize("mode", [pytest.param("colocate", marks=pytest.mark.extra), "server"])
def test_bad_rows_leave_as_whole_groups(
    mode: str, assets: Path, kinds: Kinds, tmp_path: Path
) -> None:
    argv = ["--truncation_strategy", "delete", "--max_length", "1000", "--reward_funcs", "name"]
    with ExitStack() as stack:
        if mode == "server":
            server = rollout_server(
                *server_argv(assets),
                log=tmp_path / "server.log",
                env={"SWIFT_ALLOW_INTERNAL_URL": "1"},
            )
            argv += client_argv(stack.enter_context(server))
        samples = train(assets, kinds.rows, tmp_path / "run", *argv, *LORA, steps=kinds.steps)

    assert len(samples) == kinds.steps * BATCH
    prompts: dict[tuple[int, int], set[str]] = {}
    for name, sample in samples.items():
        sample_id = SampleId.parse(name)
        prompts.setdefault((sample_id.step, sample_id.group), set()).add(sample["solution"])
    assert all(len(names) == 1 for names in prompts.values())
    used = set().union(*prompts.values())
    assert used == kinds.good

    log = (tmp_path / "run/log").read_text(encoding="utf-8")
    named = {
        row
        for row in kinds.good | kinds.bad
        if any(f"asks '{mark}{row}?" in log for mark in ("", "<image>", "<video>"))
    }
    assert named == kinds.bad
    steps = logged_steps(tmp_path / "run/run")
    counts = [step["prompts/replaced"] for step in steps]
    assert len(counts) == kinds.steps
    assert sum(counts) == log.count("takes the place of the whole group") > 0
    assert max(step["rollout_gap/mean"] for step in steps) < 1e-5
    # The record has the name or a digest of each picture, and no content in the prompt's text.
    logged = to_rows(read_samples(tmp_path / "run/run"))
    assert max(len(row.prompt) for row in logged) < 1000
    assert {len(row.media) for row in logged} == {0, 1}

    # (reward - mean of its group) / (standard deviation of its group + 1e-4), by hand
    advantages = read_records(tmp_path / "run/record", "advantages")
    assert len(advantages) == kinds.steps * BATCH
    for found in advantages:
        sample_id = SampleId.parse(found["name"])
        rewards = [float(i**2 * (1 + sample_id.group) + sample_id.step) for i in range(GROUP_SIZE)]
        expected = rewards[sample_id.index] - statistics.mean(rewards)
        expected /= statistics.stdev(rewards) + 1e-4
        assert found["advantage"] == pytest.approx(expected, abs=1e-4)
