"""What a check has to say, and how the three askers put it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from swift_grpo_ext.sampling.seeding import MAX_GROUP_SIZE

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """An `error` does not run, or trains something else than it says. A `warning` is ignored,
    wasteful or a likely slip. A `note` is worth knowing, and `ok` what holds."""

    level: Level

    setting: str
    """The flag without dashes, with its value where the text is about that; or what else was
    looked at."""

    text: str
    """What is wrong with it, and what was expected."""

    remedy: str = ""
    """What to do; empty where the text says it, or nothing is to be done."""

    def __str__(self) -> str:
        return f"{self.level}: {self.setting}: {self.text} {self.remedy}".rstrip()

    @property
    def sentence(self) -> str:
        """As `swift` says it: the setting as the flag that was typed."""
        is_flag = self.setting.partition(" ")[0].isidentifier() and self.setting[0].islower()
        return f"{'--' * is_flag}{self.setting}: {self.text} {self.remedy}".rstrip()


Findings = Iterator[Finding]

ok = partial(Finding, "ok")
note = partial(Finding, "note")
warning = partial(Finding, "warning")
error = partial(Finding, "error")


def enforce(findings: Iterable[Finding]) -> None:
    """Raise `ValueError` for the first error; log warnings on the way."""
    from swift.utils import get_logger

    for finding in findings:
        if finding.level == "error":
            raise ValueError(finding.sentence)
        if finding.level == "warning":
            get_logger().warning(finding.sentence)


def divisors(number: int, least: int = 2) -> list[int]:
    """From `least` on, up to the largest group."""
    return [n for n in range(least, min(number, MAX_GROUP_SIZE) + 1) if number % n == 0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the known names; empty where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def words(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
