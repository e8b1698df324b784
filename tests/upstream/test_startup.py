"""What ms-swift dumps at the start of a training stands in a file, and not on the terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.utils import get_logger

from swift_grpo_ext.upstream.startup import FILE, Fold, fold_dumps

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


def test_dumps_go_to_the_folder_of_each_run(tmp_path: Path, lines: list[str]) -> None:
    for name in ("one", "two"):  # runs of one process
        args: Any = SimpleNamespace(output_dir=None)
        fold_dumps(args)
        args.output_dir = str(tmp_path / name)  # ms-swift settles it after the plugin was imported
        get_logger().info(DUMP)
    get_logger().info("model_info: one line")
    get_logger().warning("lr: 1\n2")
    dumped = [f"args: 4 lines, in {tmp_path / name / FILE}" for name in ("one", "two")]
    assert lines == [*dumped, "model_info: one line", "lr: 1\n2"]
    assert [(tmp_path / name / FILE).read_text() for name in ("one", "two")] == [f"{DUMP}\n"] * 2
    assert sum(isinstance(f, Fold) for f in get_logger().filters) == 1


def test_dumps_are_printed_where_nothing_can_be_written_or_someone_debugs(
    tmp_path: Path, lines: list[str]
) -> None:
    (tmp_path / "file").touch()
    fold_dumps(SimpleNamespace(output_dir=str(tmp_path / "file")))  # type: ignore[arg-type]
    get_logger().info(DUMP)
    get_logger().setLevel(logging.DEBUG)
    fold_dumps(SimpleNamespace(output_dir=str(tmp_path)))  # type: ignore[arg-type]
    get_logger().info(DUMP)
    assert lines == [DUMP] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
