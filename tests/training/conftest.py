"""Fixtures for the tests of the training."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from swift.utils import get_logger
from swift.utils.logger import warning_set


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What ms-swift's logger warns of, as it comes; what is said once was not said yet."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    warning_set.clear()
    handler = Keep(logging.WARNING)
    get_logger().addHandler(handler)
    yield messages
    get_logger().removeHandler(handler)
