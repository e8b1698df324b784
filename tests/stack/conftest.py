"""Trainings and servers that several modules of stack tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.stack import rounds
from tests.stack.processes import rollout_server
from tests.stack.rounds import server_argv, train

STEPS = 6


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rounds")


@pytest.fixture(scope="session")
def rows(assets: Path, folder: Path) -> Path:
    """Two generation batches; one prompt stands in it three times, so that it meets itself."""
    source = assets / "digits/train.jsonl"
    return rounds.write_rows(source, folder / "rows.jsonl", [0, 0, 0, 1, 2, 3])


@pytest.fixture(scope="session")
def reference_folder(assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one colocated rank, 6 rounds: three epochs. One for all of pytest's workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "reference"
    done = folder / "done"
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            train(assets, rows, folder, steps=STEPS)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def reference(reference_folder: Path) -> rounds.Samples:
    return rounds.recorded(reference_folder)


@pytest.fixture(scope="module")  # no longer than they are needed: they hold memory
def servers(assets: Path, folder: Path) -> Iterator[tuple[int, int]]:
    """Ports of a server with one replica and of one with two."""
    one, two = server_argv(assets), server_argv(assets, "--vllm_data_parallel_size", "2")
    with (
        rollout_server(*one, log=folder / "one.log") as port_of_one,
        rollout_server(*two, log=folder / "two.log") as port_of_two,
    ):
        yield port_of_one, port_of_two
