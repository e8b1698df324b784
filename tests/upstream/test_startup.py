"""What ms-swift dumps at the start of a training stands in a file, and not on the terminal."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from swift.utils import get_logger

from swift_grpo_ext.upstream.startup import FILE, Fold, fold_dumps, freeze_heap

DUMP = "args: RLHFExtArguments(\nmodel='tiny',\nseed=42,\n)"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What ms-swift's logger prints."""
    printed: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())  # type: ignore[method-assign]
    logger = get_logger()
    before, level = logger.filters[:], logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield printed
    logger.removeHandler(handler)
    logger.setLevel(level)
    logger.filters[:] = before


def test_dumps_go_to_the_folder_of_the_run(tmp_path: Path, lines: list[str]) -> None:
    folder = tmp_path / "output" / "run"
    args = SimpleNamespace(output_dir=None)
    fold_dumps(args)
    args.output_dir = str(folder)  # ms-swift settles it after the plugin was imported
    logger = get_logger()
    logger.info(DUMP)
    logger.info("model: Qwen(\n  (lm_head): Linear()\n)")
    logger.info("model_info: one line")
    logger.info("swift-grpo-ext 0.1\n  seeds: one per sample")
    logger.warning("lr: 1\n2")
    assert lines == [
        f"args: 4 lines, in {folder / FILE}",
        f"model: 3 lines, in {folder / FILE}",
        "model_info: one line",
        "swift-grpo-ext 0.1\n  seeds: one per sample",
        "lr: 1\n2",
    ]
    expected = f"{DUMP}\nmodel: Qwen(\n  (lm_head): Linear()\n)\n"
    assert (folder / FILE).read_text(encoding="utf-8") == expected


def test_a_folder_that_cannot_be_written_leaves_the_dump(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "file").touch()
    fold_dumps(SimpleNamespace(output_dir=str(tmp_path / "file")))
    get_logger().info(DUMP)
    assert lines == [DUMP]


def test_a_second_run_of_a_process_has_its_own_file(tmp_path: Path, lines: list[str]) -> None:
    for name in ("one", "two"):
        fold_dumps(SimpleNamespace(output_dir=str(tmp_path / name)))
        get_logger().info(f"{DUMP} {name}")
    for name in ("one", "two"):
        assert (tmp_path / name / FILE).read_text() == f"{DUMP} {name}\n"
    assert sum(isinstance(f, Fold) for f in get_logger().filters) == 1


def test_who_debugs_sees_all(tmp_path: Path, lines: list[str]) -> None:
    get_logger().setLevel(logging.DEBUG)
    fold_dumps(SimpleNamespace(output_dir=str(tmp_path)))
    get_logger().info(DUMP)
    assert lines == [DUMP]
    assert list(tmp_path.iterdir()) == []


class Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def few_objects() -> Iterator[None]:
    """For the collector to look at: it is quick."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_what_is_alive_is_collected_no_more_and_garbage_goes_before() -> None:
    kept, dropped = Cycle(), Cycle()
    still_there, gone = weakref.ref(kept), weakref.ref(dropped)
    del dropped
    freeze_heap()
    assert gone() is None
    del kept
    gc.collect()
    assert still_there() is not None
