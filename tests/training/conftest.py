"""Fixtures for the tests of the training."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from swift.utils import get_logger


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What ms-swift's logger warns of, as it comes."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep(logging.WARNING)
    get_logger().addHandler(handler)
    yield messages
    get_logger().removeHandler(handler)
