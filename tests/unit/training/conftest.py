"""Fixtures for the tests of the training."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from swift.utils import get_logger
from swift.utils.logger import warning_set


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """The warnings of ms-swift's logger; warnings that are logged once are reset."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    warning_set.clear()
    handler = Keep(logging.WARNING)
    get_logger().addHandler(handler)
    yield messages
    get_logger().removeHandler(handler)
