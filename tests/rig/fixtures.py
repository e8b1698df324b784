"""Trainings and servers that several modules share."""

import base64
import io
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image
from tiny_vlm.families import FAMILIES, Family

from tests.rig import rounds
from tests.rig.rounds import LEARNING, LORA, best_argv, digits, train, write_lines

STEPS = 5
BY_NAME = ("--reward_funcs", "name")
"""Rewards that do not depend on the number of ranks."""

LEARNED_STEPS = 3


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rounds")


@pytest.fixture(scope="session")
def rows(assets: Path, folder: Path) -> Path:
    """Six rows, two generation batches. Three rows are equal, so a batch can hold duplicates."""
    return write_lines(folder / "rows.jsonl", digits(assets, [0, 0, 0, 1, 2, 3]))


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder for all of pytest's workers; the first worker that needs it makes it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    done = folder / "done"
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            assert not folder.exists(), f"{folder}: another worker has failed to make it"
            make(folder)
            done.touch()
    return folder


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    param: Family = request.param
    missing = [package for package in param.needs if find_spec(package) is None]
    if missing:
        pytest.skip(f"not installed, and ms-swift asks for it: {', '.join(missing)}")
    return param


@pytest.fixture(scope="session")
def reference_folder(assets: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A colocated rank generates 5 rounds, two in each epoch."""

    def make(folder: Path) -> rounds.Samples:
        argv = (*BY_NAME, "--rollout_mismatch", "warn")
        return train(assets, rows, folder, *argv, steps=STEPS)

    return once(tmp_path_factory, "reference", make)


@pytest.fixture(scope="session")
def reference(reference_folder: Path) -> rounds.Samples:
    return rounds.recorded(reference_folder)


@pytest.fixture(scope="session")
def learning_rows(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rows, all in each round. One image is base64 text too long for the record."""

    def write(folder: Path) -> None:
        folder.mkdir()
        rows, content = digits(assets, range(3)), io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 256, (56, 56, 3), np.uint8)
        Image.fromarray(noise).save(content, "PNG")
        rows[1]["images"] = [base64.b64encode(content.getvalue()).decode()]
        write_lines(folder / "rows.jsonl", rows)

    return once(tmp_path_factory, "learning-rows", write) / "rows.jsonl"


@pytest.fixture(scope="session")
def learned_full(
    assets: Path, learning_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A colocated rank trains all weights for `LEARNED_STEPS` and saves a checkpoint after each.
    Tests of training, replay and resuming read it."""
    argv = (*LEARNING, *best_argv(learning_rows))
    make = partial(train, assets, learning_rows, steps=LEARNED_STEPS)
    return once(tmp_path_factory, "learned-full", lambda folder: make(folder, *argv))


@pytest.fixture(scope="session")
def learned_lora(
    assets: Path, learning_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same training with LoRA on two ranks, without evaluations."""
    make = partial(train, assets, learning_rows, ranks=2, steps=LEARNED_STEPS)
    return once(tmp_path_factory, "learned-lora", lambda f: make(f, *LEARNING, *LORA))
