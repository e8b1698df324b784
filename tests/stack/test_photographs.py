"""Photographs of phones, which lie on their side in their files: both sides see them upright."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from PIL import Image
from PIL.ExifTags import Base

from tests.stack import rounds
from tests.stack.processes import rollout_server
from tests.stack.rounds import client_argv, logged_steps, server_argv, train

pytestmark = pytest.mark.stack

LEARNING = ("--learning_rate", "1e-4", "--temperature", "1.0")
"""Slowly: the tiny model's logits grow with faster steps, and their rounding does."""

ROWS = {
    "<image>Upright?": (6,),
    "Which digit?<image>": (8,),
    "<image>Two of them.<image>": (3, 5),
    "<image>Or, said at greater length, which of these two?<image>": (7, 1),
    "<image>Mirrored?": (2,),
    "<image>Upside down?": (4,),
}
"""Questions, and the orientations of what they show."""


@pytest.fixture
def rows(assets: Path, tmp_path: Path) -> Path:
    """Rows of 112 x 56 pixels, as files and as base64."""
    rows = rounds.digits(assets, range(len(ROWS)))
    for number, (row, question) in enumerate(zip(rows, ROWS, strict=True)):
        [digit] = row["images"]
        row["messages"], row["images"] = [{"role": "user", "content": question}], []
        for orientation in ROWS[question]:
            exif = Image.Exif()
            exif[Base.Orientation] = orientation
            path = tmp_path / f"{number}-{orientation}.{('jpg', 'png', 'webp')[number % 3]}"
            Image.open(digit).convert("RGB").crop((0, 28, 112, 84)).save(path, exif=exif)
            text = base64.b64encode(path.read_bytes()).decode()
            row["images"].append(text if number % 2 else str(path))
    return rounds.write_lines(tmp_path / "rows.jsonl", rows)


def assert_seen_alike(folder: Path) -> None:
    steps = logged_steps(folder / "run")
    assert len(steps) == 3
    gaps = {name: [step[f"rollout_gap/{name}"] for step in steps] for name in ("mean", "canary")}
    assert max(*gaps["mean"], *gaps["canary"]) < 1e-5, gaps
    log = (folder / "log").read_text(encoding="utf-8")
    assert "EXIF" not in log
    assert "rank 0 does not sample" not in log


@pytest.mark.parametrize(
    "argv",
    [
        (),
        pytest.param(("--media_cache_gb", "0"), marks=pytest.mark.extra),
        pytest.param(("--vllm_engine_kwargs", "NO_CACHE"), marks=pytest.mark.extra),
    ],
    ids=lambda argv: argv[0] if argv else "default",
)
def test_colocated(argv: tuple[str, ...], assets: Path, rows: Path, tmp_path: Path) -> None:
    """Whoever holds processed images, or none: vLLM looks for marks again in what it lacks."""
    no_cache = '{"kv_cache_memory_bytes": 134217728, "mm_processor_cache_gb": 0}'
    argv = tuple(no_cache if value == "NO_CACHE" else value for value in argv)
    train(assets, rows, tmp_path / "run", *LEARNING, *argv)
    assert_seen_alike(tmp_path / "run")


@pytest.mark.extra
def test_served(assets: Path, rows: Path, tmp_path: Path) -> None:
    with rollout_server(*server_argv(assets), log=tmp_path / "server.log") as port:
        train(assets, rows, tmp_path / "run", *LEARNING, *client_argv(port))
    assert_seen_alike(tmp_path / "run")


@pytest.mark.extra
def test_without_vllm(assets: Path, rows: Path, tmp_path: Path) -> None:
    preset = rounds.without_vllm(tmp_path)
    finished = rounds.run_training(assets, rows, tmp_path / "run", *LEARNING, preset=preset)
    assert finished.returncode == 0, finished.cause
    assert_seen_alike(tmp_path / "run")
