"""Checks that upstream has the APIs that we extend: methods that our classes override
(`verify_overrides`), attributes that `patches.py` replaces (`patch`), and names that we call
(`verify`, from `pins.py`). A release that lacks one is rejected. Untried releases get a warning.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from types import CodeType
from typing import Any

from packaging.version import Version

# Releases that trainings were tried with (docs/support.md, `scripts/compatibility.py`).
TRIED = {
    "ms-swift": ("4.6.0",),
    "vllm": ("0.23.0", "0.25.1", "0.32.0"),
    "transformers": ("5.12.1", "5.19.0"),
}

PACKAGE = __name__.partition(".")[0]


class UnsupportedUpstreamError(ImportError):
    """The installed ms-swift or vLLM lacks an API that we extend."""


def mismatch(pin: str) -> str | None:
    """Describe how an upstream API differs from its pin (`pins.py` has the form); None if equal."""
    place, *parameters = pin.split()
    module, _, path = place.partition(":")
    try:
        value = attrgetter(path)(importlib.import_module(module))
    except (AttributeError, ImportError) as e:
        return f"{place} is missing ({e})"
    # Further parameters after the pinned ones must have defaults, which is not checked.
    found = [*inspect.signature(value).parameters] if parameters else []
    if found[: len(parameters)] != parameters:
        return f"{place} takes {tuple(found)}, expected {tuple(parameters)}"
    return None


def _function(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def disagreement(ours: Callable[..., Any], theirs: Callable[..., Any]) -> str | None:
    """Describe why our function cannot replace upstream's; None if it can."""
    known, takes_any = _parameters(inspect.signature(theirs))
    # By default, `signature` of a function with `@wraps` shows the wrapped one's parameters.
    own, own_takes_any = _parameters(inspect.signature(ours, follow_wrapped=False))
    names = [parameter.name for parameter in known]
    for place, parameter in enumerate(own):
        if place == 0 and names[:1] in (["self"], ["cls"]):
            continue
        is_behind = place >= len(names) and takes_any
        by_name = parameter.kind == parameter.KEYWORD_ONLY and parameter.name in names
        if not (is_behind or by_name or names[place : place + 1] == [parameter.name]):
            return f"takes {tuple(names)}, expected {tuple(p.name for p in own)}"
    # Ours may lack the last parameters if it takes `*args` or `**kwargs`, or if they have defaults.
    left = [p.name for p in known[len(own) :] if p.default is p.empty]
    return f"takes {', '.join(left)} too" if left and not own_takes_any else None


def _parameters(signature: inspect.Signature) -> tuple[list[inspect.Parameter], bool]:
    """Return the named parameters, and whether there are `*args` or `**kwargs`."""
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return named, len(named) < len(parameters)


def override_mismatches(cls: type) -> list[str]:
    """Describe each method of `cls` and our bases of it that cannot override upstream's."""
    bases = [c for c in cls.__mro__ if not _is_ours(c) and c is not object]
    wrong = []
    for number, owner in enumerate(cls.__mro__):
        for name, value in vars(owner).items() if _is_ours(owner) else ():
            own = _function(value)
            if name.startswith("__") or not inspect.isfunction(own):
                continue
            base = next((c for c in bases if name in vars(c)), None)
            if base is None:
                # A method that calls `super()` under its own name was meant to override.
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
    """Return whether a function, or a function nested in it, uses all of these names."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return {*names} <= {*code.co_names} or any(_uses(each, *names) for each in inner)


def verify(pins: Iterable[str]) -> None:
    """Raise `UnsupportedUpstreamError` unless upstream has all of these APIs."""
    refuse(text for pin in pins if (text := mismatch(pin)))


def verify_overrides(*classes: type) -> None:
    """Raise `UnsupportedUpstreamError` unless upstream has the methods that classes override."""
    refuse(text for cls in classes for text in override_mismatches(cls))


def refuse(wrong: Iterable[str]) -> None:
    """Raise `UnsupportedUpstreamError` if there is any difference."""
    if texts := list(dict.fromkeys(wrong)):
        names = ", ".join(f"{name} {version}" for name, version in tried_packages().items())
        tried = "; ".join(f"{name} {', '.join(known)}" for name, known in TRIED.items())
        raise UnsupportedUpstreamError(
            f"{names}: these do not have the hooks that swift-grpo-ext extends: "
            f"{'; '.join(texts)}. Install releases that were tried: {tried}."
        )


def tried_packages() -> dict[str, str]:
    """Return the installed versions of the packages that `TRIED` lists."""
    versions: dict[str, str] = {}
    # Reads only these distributions, as every process of a training or server runs this at start.
    for name in TRIED:
        for distribution in (name, f"{name}-cpu"):  # vLLM's build for CPU has this name
            with suppress(importlib.metadata.PackageNotFoundError):
                versions.setdefault(name, importlib.metadata.version(distribution))
    return versions


def untried(installed: Mapping[str, str]) -> list[str]:
    """Describe the packages in untried releases, each with the nearest tried ones."""
    untried_releases = []
    for name, text in installed.items():
        known, version = TRIED[name], Version(text)
        release = Version(version.base_version)  # without the parts of builds and post-releases
        if release in map(Version, known) and not version.is_prerelease:
            continue
        before = [v for v in known if Version(v) <= release][-1:]
        after = [v for v in known if Version(v) > release][:1]
        untried_releases.append(f"{name} {text} (nearest: {' and '.join(before + after)})")
    return untried_releases
