"""`--truncation_strategy delete` over bad rows of every kind: groups stay whole."""

from __future__ import annotations

import base64
import statistics
from pathlib import Path

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


@pytest.fixture
def kinds(assets: Path, tmp_path: Path) -> tuple[Path, set[str], set[str]]:
    """A data set of all kinds of rows, and the questions of its good and its bad ones."""
    digit = sorted((assets / "digits").rglob("*.png"))[0]
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
    Image.new("RGB", (20_000, 28)).save(tmp_path / "wide.png")
    good = {
        "spaces": str(spaces),
        **{name: str(tmp_path / name) for name in ("cmyk.jpg", "16bit.png", "animated.gif")},
        **{name: str(tmp_path / name) for name in ("exif.jpg", "pixel.png")},
        "base64": base64.b64encode(content).decode(),
        "data URL": f"data:image/png;base64,{base64.b64encode(content).decode()}",
    }
    bad = {
        **{name: str(tmp_path / name) for name in ("none.png", "text.png", "cut.png", "wide.png")},
        "dead URL": "http://127.0.0.1:9/digit.png",
        "too long": str(digit),
        "two marks": str(digit),
    }
    more = {"too long": " again" * 300, "two marks": "<image>"}
    rows = [
        {
            "messages": [{"role": "user", "content": f"<image>{name}?{more.get(name, '')}"}],
            "solution": name,
            "images": [shown],
        }
        for name, shown in (good | bad).items()
    ]
    return write_lines(tmp_path / "rows.jsonl", rows), set(good), set(bad)


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
    assert drawn == good  # the first epoch has five batches of three

    log = (tmp_path / "run/log").read_text(encoding="utf-8")
    assert {row for row in good | bad if f"'<image>{row}?" in log} == bad
    counts = [step["prompts/replaced"] for step in logged_steps(tmp_path / "run/run")]
    assert len(counts) == STEPS
    assert sum(counts) == log.count("takes the place of the whole group") > 0

    # (reward - mean of its group) / (standard deviation of its group + 1e-4), by hand
    advantages = read_records(tmp_path / "run/record", "advantages")
    assert len(advantages) == STEPS * BATCH
    for found in advantages:
        sample_id = SampleId.parse(found["name"])
        rewards = [float(i**2 * (1 + sample_id.group) + sample_id.step) for i in range(GROUP_SIZE)]
        expected = rewards[sample_id.index] - statistics.mean(rewards)
        expected /= statistics.stdev(rewards) + 1e-4
        assert found["advantage"] == pytest.approx(expected, abs=1e-4)
