"""What a check says, and what `swift` does about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "note", "skipped", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    An `error` does not run, or trains something else than it says. A `warning` is ignored, wasteful
    or a likely slip. A `note` is worth knowing, `ok` holds, and what is `skipped` was not looked
    at.
    """

    level: Level

    setting: str
    """The flag without dashes, with its value where the text is about that; or what else was
    looked at."""

    text: str
    """What is wrong with it, and what was expected."""

    remedy: str = ""
    """What to do; empty where the text says it, or nothing is to be done."""

    @property
    def sentence(self) -> str:
        """The whole, with the setting as the flag that was typed."""
        is_flag = self.setting.partition(" ")[0].isidentifier() and self.setting[0].islower()
        dashes = "--" if is_flag else ""
        return f"{dashes}{self.setting}: {self.text} {self.remedy}".rstrip()


Findings = Iterator[Finding]

ok = partial(Finding, "ok")
note = partial(Finding, "note")
skipped = partial(Finding, "skipped")
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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the nearest known name; "" where none is near."""
    near = difflib.get_close_matches(name, known)
    return f"did you mean {near[0]}?" if near else ""
