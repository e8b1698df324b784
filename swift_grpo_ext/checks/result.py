"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["green", "yellow", "red"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the report."""

    check: str
    """What was looked at."""

    status: Status

    found: str
    """In words, with the values seen."""

    remedy: str = ""
    """What to do; empty where nothing is to be done."""


def green(check: str, found: str) -> Result:
    return Result(check=check, status="green", found=found)


def yellow(check: str, found: str, remedy: str = "") -> Result:
    return Result(check=check, status="yellow", found=found, remedy=remedy)


def red(check: str, found: str, remedy: str) -> Result:
    return Result(check=check, status="red", found=found, remedy=remedy)
