"""What a rule has to say, and the words for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule has to say."""

    level: Level
    setting: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.setting}: {self.text}"


Findings = Iterator[Finding]


def error(setting: str, text: str) -> Finding:
    return Finding(level="error", setting=setting, text=text)


def warning(setting: str, text: str) -> Finding:
    return Finding(level="warning", setting=setting, text=text)


def note(setting: str, text: str) -> Finding:
    return Finding(level="note", setting=setting, text=text)


def divisors(number: int, least: int = 2) -> list[int]:
    """From `least` on, up to the largest group."""
    return [n for n in range(least, min(number, MAX_GROUP_SIZE) + 1) if number % n == 0]


def words(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def shown(value: Any) -> str:
    return "not set" if value is None else repr(value)
