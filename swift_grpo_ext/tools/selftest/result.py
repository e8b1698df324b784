"""What a check found. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["holds", "does not hold", "could not be tried"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One promise on one topology."""

    name: str = ""
    """Of the check; the worker fills it in, and `topology` and `seconds`."""

    topology: str = ""
    status: Status
    values: dict[str, Any] = field(default_factory=dict)
    """What was measured, as JSON takes it; units stand in the names."""

    reason: str = ""
    """Why it does not hold, or could not be tried."""

    remedy: str = ""
    seconds: float = 0.0


def judged(values: dict[str, Any], faults: Sequence[str], remedy: str = "") -> Result:
    """`holds` where there are no faults; they are the reason where there are."""
    if not faults:
        return Result(status="holds", values=values)
    return Result(status="does not hold", values=values, reason="; ".join(faults), remedy=remedy)


def untried(reason: str, remedy: str = "", **fields: Any) -> Result:
    return Result(status="could not be tried", reason=reason, remedy=remedy, **fields)


def exit_status(results: Sequence[Result]) -> int:
    """1 where a promise is broken, 2 where none could be tried, else 0."""
    statuses = {result.status for result in results}
    if "does not hold" in statuses:
        return 1
    return 0 if "holds" in statuses else 2
