"""Defines findings of checks, and how `swift` acts on them."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Level = Literal["ok", "note", "skipped", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One result of a check. `error`: the run fails, or trains something else than the setting
    means. `warning`: the setting is ignored, wasteful or probably a mistake. `skipped`: it was not
    checked."""

    level: Level
    setting: str  # a flag without dashes, perhaps with its value; or another subject
    text: str  # the fault, and the expected form
    remedy: str = ""

    @property
    def sentence(self) -> str:
        """Return setting, text and remedy, with dashes before a flag."""
        is_flag = self.setting.partition(" ")[0].isidentifier() and self.setting[0].islower()
        dashes = "--" if is_flag else ""
        return f"{dashes}{self.setting}: {self.text} {self.remedy}".rstrip()


Findings = Iterator[Finding]

ok = partial(Finding, "ok")
note = partial(Finding, "note")
skipped = partial(Finding, "skipped")
warning = partial(Finding, "warning")
error = partial(Finding, "error")


class SettingsError(ValueError):
    """A mistake of the user. If nothing catches it, its text is printed without a traceback."""


def hide_tracebacks() -> None:
    """Print an uncaught `SettingsError` without its traceback, and once on each machine."""
    show = sys.excepthook

    def show_alone(kind: Any, raised: BaseException, trace: Any) -> None:
        if not isinstance(raised, SettingsError):
            show(kind, raised, trace)
        # All ranks have the same settings.
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            # torch's own hook prefixes `sys.stderr` with the rank.
            print(f"error: {raised}", file=sys.__stderr__)

    sys.excepthook = show_alone


_listeners: list[Callable[[Finding], None]] = []


@contextmanager
def collected(report: Callable[[Finding], None]) -> Iterator[None]:
    """Within the block, `enforce` calls `report` with each finding and raises nothing, so that
    `check` goes on after an error."""
    _listeners.append(report)
    try:
        yield
    finally:
        _listeners.remove(report)


def enforce(findings: Iterable[Finding]) -> None:
    """Raise `SettingsError` for the first error; log warnings on the way."""
    from swift.utils import get_logger

    for finding in findings:
        if _listeners:
            _listeners[-1](finding)
        elif finding.level == "error":
            raise SettingsError(finding.sentence)
        elif finding.level == "warning":
            get_logger().warning(finding.sentence)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the nearest known name; "" if none is near."""
    near = difflib.get_close_matches(name, known)
    return f"did you mean {near[0]}?" if near else ""
