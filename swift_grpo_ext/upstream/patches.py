"""Patches ms-swift, vLLM, transformers and torch. No other module may patch them.

A repair is a function that patches something, by `patch`, for the rest of a process. Its docstring
names the symptom without it, the cause upstream (release and file), and when it can go. `@repair`
registers it, and `apply(phase)` makes it. Other modules call repairs that need an object or a
setting. `replaced` and `wrapped` patch something for a block. `tests/unit/upstream/test_patches.py`
fails on any other change of upstream's modules and classes. `registry.py` uses ms-swift's own
plugin registries.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache, wraps
from importlib import import_module
from typing import Any, TypeVar

from swift_grpo_ext.upstream.contract import disagreement, refuse

T = TypeVar("T", bound=Callable[[], object])


class PatchPhase(Enum):
    """The phases of a process at which repairs are applied."""

    REGISTRATION = "ms-swift has imported the plugin"
    TRAINING = "a training's arguments are complete, and no model is loaded yet"
    TRAINER = "a trainer is about to be created; it may be connected to servers"
    ENGINE = "a process is about to create an engine"
    REPLICA = "a server's replica is about to create its engine"
    WORKER = "a process has an engine's worker, and possibly no engine"
    SERVER = "`swift rollout` is loaded, and has not created a server"


# The modules of `swift_grpo_ext` with the repairs of each phase. They are imported in that phase,
# since they import the code that they patch.
MODULES: dict[PatchPhase, tuple[str, ...]] = {
    PatchPhase.REGISTRATION: ("command_line",),
    PatchPhase.TRAINING: ("upstream.models", "upstream.encoding", "upstream.rows"),
    PatchPhase.ENGINE: ("upstream.encoding", "upstream.rows", "rollout.positions"),
    PatchPhase.REPLICA: ("media.paths",),
    PatchPhase.SERVER: ("rollout.engine", "server.routes"),
}


@dataclass(frozen=True)
class Repair:
    """One lasting change of upstream."""

    function: Callable[[], object]
    phases: tuple[PatchPhase, ...]  # `apply` makes it in the first of these
    optional: bool  # `make` skips it, with a warning, if a release lacks the patched code


REPAIRS: list[Repair] = []  # of all modules imported so far


def repair(*phases: PatchPhase, optional: bool = False) -> Callable[[T], T]:
    """Register a function that patches upstream; `Repair` documents the arguments."""

    def register(function: T) -> T:
        REPAIRS.append(Repair(function, phases, optional))
        return function

    return register


def apply(phase: PatchPhase) -> None:
    """Apply the repairs of a phase that were not applied yet, in order."""
    for name in MODULES.get(phase, ()):
        module = import_module(f"swift_grpo_ext.{name}").__name__
        # `REPAIRS` may have others, such as those for CPU on a machine with a GPU.
        for each in [each for each in REPAIRS if each.function.__module__ == module]:
            if phase in each.phases:
                make(each.function)


@cache  # once in a process, in the first of its phases
def make(function: Callable[[], object]) -> bool:
    """Apply one repair. Return False if it is optional and upstream lacks the patched code."""
    [each] = [each for each in REPAIRS if each.function is function]
    try:
        function()
    except (AttributeError, ImportError) as e:
        if not each.optional:
            raise
        from swift.utils import get_logger

        get_logger().warning(f"{function.__name__} is left out: {e}")
        return False
    return True


def patch(owner: object, **values: object) -> None:
    """Replace attributes of an upstream module, class or object for the rest of this process. Raise
    `UnsupportedUpstreamError` if an attribute is missing or has other parameters."""
    # All are checked before any is set: a refused patch changes nothing.
    refuse(text for name, value in values.items() if (text := _misfit(owner, name, value)))
    for name, value in values.items():
        setattr(owner, name, value)


def _misfit(owner: object, name: str, value: object) -> str | None:
    label = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    if not hasattr(owner, name):
        return f"{label} is missing"
    old = getattr(owner, name)
    new = value.__func__ if isinstance(value, staticmethod) else value
    # Classes are not compared, and some builtins have no signature.
    if inspect.isclass(old) or inspect.isclass(new) or not (callable(old) and callable(new)):
        return None
    text = disagreement(new, old)
    return f"{label} {text}" if text else None


_ABSENT = object()
# By an owner's id and an attribute: the original value, then the value of each open block. Blocks
# keep their owner alive, so that no other object gets its id.
_replacements: dict[tuple[int, str], dict[object, object]] = {}
_lock = threading.RLock()  # reentrant: garbage collection may end a block while another begins


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute of an upstream module, class or object to `value` within the block."""
    # Blocks may overlap, and end in any order and thread: the last one that was opened counts.
    key, block = (id(owner), name), object()
    with _lock:
        held = _replacements.setdefault(key, {None: vars(owner).get(name, _ABSENT)})
        held[block] = value
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            del held[block]
            last = next(reversed(held.values()))
            if last is _ABSENT:
                delattr(owner, name)  # uncovers the attribute of the class
            else:
                setattr(owner, name, last)
            if len(held) == 1:
                del _replacements[key]


@contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """Make `owner.NAME(...)` call `wrap(original, ...)` within the block."""
    original = getattr(owner, name)

    # A plain function: copying or printing the owner must not copy or print a hook object.
    @wraps(original)
    def replacement(*args: object, **kwargs: object) -> Any:
        return wrap(original, *args, **kwargs)

    with replaced(owner, name, replacement):
        yield
