"""Fixtures for all tests, their order, and the shards of `tests/extra`."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The same examples in every run of the suite; `--hypothesis-profile=default` looks for others.
# No bound in seconds: other processes of the machine would break it.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parents[1]
NUM_SHARDS = 10
DURATIONS = ROOT / "tests/durations.json"
"""Seconds by block. `KEEP_DURATIONS=1`, which CI sets, writes those of a run."""

measured: Counter[str] = Counter()


def block_of(nodeid: str) -> str:
    """Return the name of the tests that one worker runs in a row, because they share fixtures: a
    file, or in `tests/extra` the tests of a file with one first parameter, such as a family of
    models. A test without parameters is a block there."""
    file, _, test = nodeid.partition("::")
    name, _, parameters = test.removesuffix("]").partition("[")
    return f"{file}::{parameters.partition('-')[0] or name}" if "/extra/" in file else file


def pytest_addoption(parser: pytest.Parser) -> None:
    text = f"run only one of {NUM_SHARDS} shards of tests/extra: this number, modulo {NUM_SHARDS}"
    parser.addoption("--extra-shard", type=int, metavar="NUMBER", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the shard; begin with the blocks that take longest."""
    blocks = {item: block_of(item.nodeid) for item in items}
    known = json.loads(DURATIONS.read_text(encoding="utf-8"))
    seconds = {block: known.get(block, 30 if "::" in block else 0) for block in blocks.values()}
    order = sorted(seconds, key=lambda block: (-seconds[block], block))
    if (number := config.getoption("--extra-shard")) is not None:
        shards: list[Counter[str]] = [Counter() for _ in range(NUM_SHARDS)]
        for block in order:  # each goes to the shard with the fewest seconds
            if "::" in block:
                min(shards, key=Counter.total)[block] = seconds[block]
        others = {block for block in order if "::" in block} - shards[number % NUM_SHARDS].keys()
        config.hook.pytest_deselected(items=[item for item in items if blocks[item] in others])
        items[:] = [item for item in items if blocks[item] not in others]
    items.sort(key=lambda item: order.index(blocks[item]))  # stable


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each block to one of pytest's workers, whatever `--dist` is."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = block_of
    return scheduler


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    measured[block_of(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "KEEP_DURATIONS" not in os.environ or hasattr(session.config, "workerinput"):
        return
    known = json.loads(DURATIONS.read_text(encoding="utf-8"))
    known |= {block: round(seconds) for block, seconds in measured.items()}
    blocks = [block for block in sorted(known) if known[block] and block == block_of(block)]
    kept = {b: known[b] for b in blocks if (ROOT / b.partition("::")[0]).exists()}
    DURATIONS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of the tiny model and the digits, made by `scripts/test.sh`."""
    folder = Path(os.environ.get("ASSETS", ROOT / ".assets")).resolve()
    if not (folder / "tiny_vlm" / "config.json").is_file():
        pytest.fail(f"{folder} holds no tiny model: run `bash scripts/test.sh`, which makes it")
    return folder
