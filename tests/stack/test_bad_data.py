"""`--truncation_strategy delete` over bad rows of every kind: groups stay whole."""

from __future__ import annotations

import base64
import statistics
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.sampling.seeding import SampleId
from tests.stack.rounds import (
    BATCH,
    GROUP_SIZE,
    LORA,
    logged_steps,
    read_records,
    train,
    write_lines,
)

pytestmark = pytest.mark.stack

STEPS = 6
PROMPTS = BATCH // GROUP_SIZE


def good_images(digit: Path, folder: Path) -> dict[str, Any]:
    """Images that are unusual, and that training has to take."""
    image = Image.open(digit).convert("RGB")
    spaces = folder / "with spaces" / "数字 七.png"
    spaces.parent.mkdir()
    image.save(spaces)
    image.convert("CMYK").save(folder / "cmyk.jpg")
    Image.new("I;16", (56, 56), 40_000).save(folder / "16bit.png")
    image.save(folder / "animated.gif", save_all=True, append_images=[image.rotate(90)])
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    image.save(folder / "exif.jpg", exif=exif)
    Image.new("RGB", (1, 1), "white").save(folder / "pixel.png")
    return {
        "spaces": str(spaces),
        **{f.name: str(f) for f in sorted(folder.glob("*.*")) if f.is_file()},
        "base64": base64.b64encode(digit.read_bytes()).decode(),
        "data URL": f"data:image/png;base64,{base64.b64encode(digit.read_bytes()).decode()}",
    }


def bad_images(digit: Path, folder: Path) -> dict[str, str]:
    (folder / "text.png").write_text("not an image")
    (folder / "cut.png").write_bytes(digit.read_bytes()[:-200])
    Image.new("RGB", (20_000, 28)).save(folder / "wide.png")
    return {
        "missing": str(folder / "none.png"),
        **{name: str(folder / f"{name}.png") for name in ("text", "cut", "wide")},
        "dead URL": "http://127.0.0.1:9/digit.png",
    }


@pytest.fixture
def kinds(assets: Path, tmp_path: Path) -> tuple[Path, set[str], set[str]]:
    """A data set of all kinds of rows, and the questions of its good and its bad ones."""
    digit = sorted((assets / "digits").rglob("*.png"))[0]
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    rows = {f"good {k}": [v] for k, v in good_images(digit, tmp_path / "good").items()}
    rows |= {f"bad {k}": [v] for k, v in bad_images(digit, tmp_path / "bad").items()}
    rows["bad too long"] = [str(digit)]
    rows["bad two marks"] = [str(digit)]
    questions = {name: f"<image>{name}?" for name in rows}
    questions["bad too long"] += " again" * 300
    questions["bad two marks"] += "<image>"
    lines = (
        {"messages": [{"role": "user", "content": questions[name]}], "solution": name, "images": i}
        for name, i in rows.items()
    )
    path = write_lines(tmp_path / "rows.jsonl", lines)
    good = {name for name in rows if name.startswith("good")}
    return path, good, rows.keys() - good


def test_bad_rows_leave_as_whole_groups(
    assets: Path, kinds: tuple[Path, set[str], set[str]], tmp_path: Path
) -> None:
    rows, good, bad = kinds
    argv = ["--truncation_strategy", "delete", "--max_length", "200", "--reward_funcs", "name"]
    samples = train(assets, rows, tmp_path / "run", *argv, *LORA, steps=STEPS)

    assert len(samples) == STEPS * BATCH
    prompts: dict[tuple[int, int], set[str]] = {}
    for name, sample in samples.items():
        sample_id = SampleId.parse(name)
        prompts.setdefault((sample_id.step, sample_id.group), set()).add(sample["solution"])
    assert all(len(of_group) == 1 for of_group in prompts.values())
    drawn = set().union(*prompts.values())
    assert drawn <= good
    # An epoch has six batches of three: of 17 rows, all but two are met.
    assert len(drawn) >= len(good) - 2

    log = (tmp_path / "run/log").read_text(encoding="utf-8")
    named = {row for row in bad if f"{row}?" in log}
    assert len(named) >= len(bad) - 2
    assert_advantages(tmp_path / "run/record")
    counts = [step["prompts/replaced"] for step in logged_steps(tmp_path / "run/run")]
    assert len(counts) == STEPS
    assert sum(counts) == log.count("takes the place of the whole group") > 0


def assert_advantages(record: Path) -> None:
    """(reward - mean of its group) / (standard deviation of its group + 1e-4), by hand."""
    found = {r["name"]: r["advantage"] for r in read_records(record, "advantages")}
    assert len(found) == STEPS * BATCH
    for name, advantage in found.items():
        sample_id = SampleId.parse(name)
        rewards = [float(i**2 * (1 + sample_id.group) + sample_id.step) for i in range(GROUP_SIZE)]
        expected = rewards[sample_id.index] - statistics.mean(rewards)
        assert advantage == pytest.approx(expected / (statistics.stdev(rewards) + 1e-4), abs=1e-4)
