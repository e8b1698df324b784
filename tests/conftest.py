"""Fixtures for all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run of the suite; `--hypothesis-profile=default` looks for others.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder with the tiny model and the digits, which `scripts/test.sh` makes."""
    folder = Path(os.environ.get("ASSETS", ROOT / ".assets")).resolve()
    if not (folder / "tiny_vlm" / "config.json").is_file():
        pytest.fail(f"{folder} holds no tiny model: run `bash scripts/test.sh`, which makes it")
    return folder
