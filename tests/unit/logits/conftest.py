"""Fixtures of the tests that pack rows."""

from __future__ import annotations

import pytest

from swift_grpo_ext.logits import proof


@pytest.fixture
def packs_what_saves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "WORTH", 0.0)


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(proof.logger, "warning", lines.append)
    return lines


@pytest.fixture
def informed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(proof.logger, "info", lines.append)
    return lines
