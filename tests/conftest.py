"""Fixtures for all tests."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run of the suite; `--hypothesis-profile=default` looks for others.
# No bound in seconds: other processes of the machine would break it.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parents[1]
LONG_FILES = [
    *("launch", "turns_served", "scenarios", "servers", "stop_training", "invariance"),
    *("failures", "pairs", "turns", "distillation"),
    *("options", "sharded", "resume", "replay", "training", "selftest", "stops"),
    "../test_launch_script",
    *("../diversity/test_real_runs", "adapters", "router_replay", "placeholders", "tool_call"),
    *("bad_data", "api_key", "mixed_rows", "wrong_weights"),
]
"""Files of `tests/stack` in the order in which pytest's workers get them: long ones first. Files
that take much memory are apart, since they would wait for one another."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = ROOT / "tests/stack"
    names = [name if "/" in name else f"test_{name}" for name in LONG_FILES]
    order = {(folder / f"{name}.py").resolve(): i for i, name in enumerate(names)}
    items.sort(key=lambda item: order.get(item.path, len(order)))  # stable: others keep theirs


# --- a line every 10 seconds while pytest's workers import torch, ms-swift and vLLM ---

collected = threading.Event()


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no" and not hasattr(
        session.config, "workerinput"
    ):
        threading.Thread(target=show_collection, args=[session], daemon=True).start()


def show_collection(session: pytest.Session) -> None:
    start, writer = time.monotonic(), session.config.get_terminal_writer()
    while not collected.wait(10):
        writer.line(f"  {time.monotonic() - start:3.0f} s: importing and collecting tests")
        writer.flush()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished() -> None:
    collected.set()


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of the tiny model and the digits, made by `scripts/test.sh`."""
    folder = Path(os.environ.get("ASSETS", ROOT / ".assets")).resolve()
    if not (folder / "tiny_vlm" / "config.json").is_file():
        pytest.fail(f"{folder} holds no tiny model: run `bash scripts/test.sh`, which makes it")
    return folder
