"""What a check says, and what `swift` does about it."""

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
    """One result of a check.

    An `error` does not run, or trains something else than it says. A `warning` is ignored, wasteful
    or a likely slip. What is `skipped` was not looked at.
    """

    level: Level
    setting: str  # the flag without dashes, perhaps with its value; or what else was looked at
    text: str  # what is wrong with it, and what was expected
    remedy: str = ""

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


class SettingsError(ValueError):
    """A mistake of the user's. Uncaught, its text is printed alone."""


def hide_tracebacks() -> None:
    """Print a `SettingsError` that ends the process without its traceback, once on each machine:
    all ranks have the same settings."""
    show = sys.excepthook

    def show_alone(kind: Any, raised: BaseException, trace: Any) -> None:
        if not isinstance(raised, SettingsError):
            show(kind, raised, trace)
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            # Not `sys.stderr`, to which torch's own hook has led what it prefixes with the rank.
            print(f"error: {raised}", file=sys.__stderr__)

    sys.excepthook = show_alone


_listeners: list[Callable[[Finding], None]] = []


@contextmanager
def collected(tell: Callable[[Finding], None]) -> Iterator[None]:
    """Have `enforce` hand each finding to `tell` within the block, and raise none: a start that is
    only looked at goes on."""
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)


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
    """Return a question that names the nearest known name; "" where none is near."""
    near = difflib.get_close_matches(name, known)
    return f"did you mean {near[0]}?" if near else ""
