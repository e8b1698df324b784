"""Fixtures for all tests, their order, and the shards of `tests/extra`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run of the suite; `--hypothesis-profile=default` looks for others.
# No bound in seconds: other processes of the machine would break it.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parents[1]
NUM_SHARDS = 10
DURATIONS = ROOT / "tests/durations.json"
"""Seconds by file. `KEEP_DURATIONS=1`, which CI sets, writes those of a run."""

measured: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"run only one of {NUM_SHARDS} shards of tests/extra: this number, modulo {NUM_SHARDS}"
    parser.addoption("--extra-shard", type=int, metavar="NUMBER", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the shard; begin with the files that take longest."""
    extra = [item for item in items if item.path.is_relative_to(ROOT / "tests/extra")]
    if (number := config.getoption("--extra-shard")) is not None:
        others = [item for i, item in enumerate(extra) if (i - number) % NUM_SHARDS]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    items.sort(key=lambda item: -seconds.get(str(item.path.relative_to(ROOT)), 0))  # stable


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    measured[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "KEEP_DURATIONS" not in os.environ or hasattr(session.config, "workerinput"):
        return
    known = json.loads(DURATIONS.read_text(encoding="utf-8"))
    known |= {file: round(seconds) for file, seconds in measured.items()}
    kept = {f: known[f] for f in sorted(known) if known[f] and (ROOT / f).exists()}
    DURATIONS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


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
