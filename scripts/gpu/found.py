"""A case finds comparisons with their bounds, and rows of figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Row = Mapping[str, str | int | float | None]
"""Figures of a table, by column."""


@dataclass(frozen=True)
class Comparison:
    """A number that must not be larger than its bound."""

    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Return whether it is within its bound, which what is not a number never is."""
        return self.error <= self.bound


@dataclass
class Found:
    """One case has found these."""

    comparisons: list[Comparison] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    not_tried: str = ""
    """Why there is nothing to say: what is not installed, or what the package leaves alone."""
