"""Fixtures for all rooms."""

import pytest
from swift.utils import get_logger
from swift.utils.logger import warning_set


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of ms-swift's logger; warnings that are logged once are reset."""
    messages: list[str] = []
    warning_set.clear()
    monkeypatch.setattr(get_logger(), "warning", messages.append)
    return messages
