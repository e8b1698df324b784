"""Restores ms-swift's registry of schedulers after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from swift.rollout.multi_turn import multi_turns


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(multi_turns)
    yield
    multi_turns.clear()
    multi_turns.update(before)
