"""Photographs of phones, which lie on their side in their files: both sides see them upright."""

from __future__ import annotations

import base64
import sys
from pathlib import Path

import pytest
from PIL import Image
from PIL.ExifTags import Base

from tests.stack import rounds
from tests.stack.conftest import once
from tests.stack.processes import ROOT, rollout_server
from tests.stack.rounds import client_argv, logged_steps, server_argv, train

sys.path.insert(0, str(ROOT / "scripts"))
from tiny_vlm.families import FAMILIES, make_family

pytestmark = pytest.mark.stack

ROWS = {
    "<image>Upright?": (6,),
    "Which digit?<image>": (8,),
    "<image>Two of them.<image>": (3, 5),
    "<image>Or, said at greater length, which of these two?<image>": (7, 1),
    "<image>Mirrored?": (2,),
    "<image>Upside down?": (4,),
}
"""Questions, and the orientations of what they show."""

NO_CACHE = '{"kv_cache_memory_bytes": 134217728, "mm_processor_cache_gb": 0}'


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Of a random Qwen2.5-VL: both sides agree to 1e-6 there, and the trained digits' to 1e-4."""
    family = FAMILIES["qwen2_5_vl"]
    model = once(tmp_path_factory, "upright", lambda folder: make_family(family, folder, seed=0))
    return ("--model", str(model), "--learning_rate", "2e-3", "--temperature", "1.0")


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
    gaps = [step["rollout_gap/mean"] for step in steps]
    assert max(gaps) < 1e-5, gaps
    log = (folder / "log").read_text(encoding="utf-8")
    assert "EXIF" not in log
    assert "lie further apart than" not in log


@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(("--media_cache_gb", "0"), marks=pytest.mark.extra),
        pytest.param(("--vllm_engine_kwargs", NO_CACHE), marks=pytest.mark.extra),
    ],
    ids=lambda more: more[0] if more else "default",
)
def test_colocated(
    more: tuple[str, ...], argv: tuple[str, ...], assets: Path, rows: Path, tmp_path: Path
) -> None:
    """Whoever holds processed images, or none: vLLM looks for marks again in what it lacks."""
    train(assets, rows, tmp_path / "run", *argv, *more)
    assert_seen_alike(tmp_path / "run")


@pytest.mark.extra
def test_served(argv: tuple[str, ...], assets: Path, rows: Path, tmp_path: Path) -> None:
    with rollout_server(*server_argv(assets), *argv[:2], log=tmp_path / "server.log") as port:
        train(assets, rows, tmp_path / "run", *argv, *client_argv(port))
    assert_seen_alike(tmp_path / "run")
