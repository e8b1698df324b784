"""The check that upstream's names and signatures are those that we extend (`pins.py` lists them).

An unknown ms-swift or vLLM is refused by name, before it can fail deep in a run.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED_SWIFT = SpecifierSet(">=4.5.3,<4.7")
"""As in pyproject.toml. `scripts/compatibility.py` finds it out anew."""


@dataclass(frozen=True)
class Pin:
    """One upstream name that we extend.

    `parameters` are the names in its signature, in order, up to those we know; None where only the
    name counts (an attribute, a registry). `also` are signatures of other supported releases of
    ms-swift. `since` is the first of them that has the name, where older supported ones lack it.
    The module that extends it works with each.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    also: tuple[tuple[str, ...], ...] = ()
    since: str | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class UnsupportedUpstreamError(ImportError):
    """An installed ms-swift or vLLM does not have the hooks that we know."""


def resolve(pin: Pin) -> Any:
    """The object that a pin names; raises `AttributeError` or `ImportError` where it is missing."""
    value: Any = importlib.import_module(pin.module)
    for part in pin.name.split("."):
        get = inspect.getattr_static if inspect.isclass(value) else getattr
        value = get(value, part)
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def mismatch(pin: Pin) -> str | None:
    """What is wrong with a pin, in words; None where it holds."""
    if pin.since is not None and Version(swift_version()) < Version(pin.since):
        return None
    try:
        value = resolve(pin)
    except (AttributeError, ImportError) as e:
        return f"{pin} is missing ({e})"
    if pin.parameters is None:
        return None
    found = tuple(inspect.signature(value).parameters)
    known = (pin.parameters, *pin.also)
    if not any(found[: len(parameters)] == parameters for parameters in known):
        return f"{pin} takes {found}, expected {' or '.join(map(str, known))}"
    return None


def swift_version() -> str:
    """The installed ms-swift's."""
    return importlib.metadata.version("ms-swift")


def verify(pins: Iterable[Pin]) -> None:
    """Raise `UnsupportedUpstreamError` unless the ms-swift and all pins are what we know."""
    check_swift_version(swift_version())
    wrong = [text for pin in pins if (text := mismatch(pin))]
    if wrong:
        raise UnsupportedUpstreamError(
            f"ms-swift {swift_version()} does not have the hooks that swift-grpo-ext extends: "
            f"{'; '.join(wrong)}. {_remedy()}"
        )


def check_swift_version(installed: str) -> None:
    """Raise `UnsupportedUpstreamError` for a ms-swift outside `SUPPORTED_SWIFT`."""
    if not SUPPORTED_SWIFT.contains(installed, prereleases=True):
        raise UnsupportedUpstreamError(
            f"ms-swift {installed} is installed; swift-grpo-ext supports {SUPPORTED_SWIFT}. "
            f"{_remedy()}"
        )


def _remedy() -> str:
    return f"Install a supported one: pip install 'ms-swift{SUPPORTED_SWIFT}'."
