"""The one way to change ms-swift, vLLM, transformers or torch.

`@repair` marks each function that changes something for the rest of a process, by `patch`, and
`apply(moment)` makes the repairs of a moment, once. `replaced` and `wrapped` change something for a
block. `tests/upstream/test_patches.py` finds what goes around them. `registry.py` fills the places
that ms-swift has for plugins.
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

T = TypeVar("T", bound=Callable[..., object])


class Moment(Enum):
    """When repairs are made."""

    REGISTRATION = "ms-swift has imported the plugin"
    TRAINING = "a training's arguments are complete, and no model is loaded yet"
    TRAINER = "a trainer is about to be made; it may be connected to servers"
    ENGINE = "a process is about to make an engine"
    REPLICA = "the same, of a server's replica"
    WORKER = "a process holds a worker of an engine, and perhaps no engine"
    SERVER = "`swift rollout` is loaded, and has made no server yet"
    CALLED = "the module that has the object, or the setting, calls the function itself"


MODULES: dict[Moment, tuple[str, ...]] = {
    Moment.REGISTRATION: ("command_line",),
    Moment.TRAINING: ("upstream.models", "upstream.upright", "upstream.rows"),
    Moment.ENGINE: ("upstream.upright", "upstream.rows", "upstream.encoding", "rollout.positions"),
    Moment.REPLICA: ("media.paths",),
    Moment.SERVER: ("rollout.engine", "server.replicas", "server.routes"),
}
"""The modules of `swift_grpo_ext` that hold a moment's repairs. They are imported when it comes, as
they import what they change."""


@dataclass(frozen=True)
class Repair:
    """One lasting change of upstream."""

    function: Callable[..., object]
    moments: tuple[Moment, ...]  # it is made at the first of them that comes
    symptom: str  # what goes wrong without it
    upstream: str  # release and file of the cause
    until: str  # the end of a sentence that begins with "Can go when"
    optional: bool  # a release that lacks what it changes is left as it is


REPAIRS: list[Repair] = []  # of the modules that were imported so far


def repair(
    *moments: Moment, symptom: str, upstream: str, until: str, optional: bool = False
) -> Callable[[T], T]:
    """List a function that changes upstream (`Repair` has the arguments)."""

    def note(function: T) -> T:
        REPAIRS.append(Repair(function, moments, symptom, upstream, until, optional))
        return function

    return note


def apply(moment: Moment) -> None:
    """Make the repairs of a moment that were not made yet, in their order."""
    for name in MODULES.get(moment, ()):
        module = import_module(f"swift_grpo_ext.{name}").__name__
        # Others may be imported too, as those for CPU on a machine with a GPU.
        for each in [each for each in REPAIRS if each.function.__module__ == module]:
            if moment in each.moments:
                make(each.function)


@cache  # once in a process, whichever moment comes first
def make(function: Callable[[], object]) -> bool:
    """Make one repair; False where it is optional and upstream lacks what it changes."""
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
    """Replace attributes of an upstream module, class or object for the rest of this process; raise
    `UnsupportedUpstreamError` where it has none of the name, or one with other parameters."""
    refuse(text for name, value in values.items() if (text := _misfit(owner, name, value)))
    for name, value in values.items():
        setattr(owner, name, value)


def _misfit(owner: object, name: str, value: object) -> str | None:
    label = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    if not hasattr(owner, name):
        return f"{label} is missing"
    old = getattr(owner, name)
    new = value.__func__ if isinstance(value, staticmethod) else value
    # A class is replaced by its like, and the parameters of some builtins cannot be read.
    if inspect.isclass(old) or inspect.isclass(new) or not (callable(old) and callable(new)):
        return None
    text = disagreement(new, old)
    return f"{label} {text}" if text else None


_ABSENT = object()
_replacements: dict[tuple[int, str], dict[object, object]] = {}
"""Values by the owner's id and the attribute's name: the owner's own, then that of each block. An
owner lives as long as its blocks."""

_lock = threading.RLock()  # a block that is garbage-collected may end within another's beginning


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Let an attribute of an upstream module, class or object be `value` within the block. Blocks
    may overlap, and end in any order, in any thread: the one that began last counts."""
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
                delattr(owner, name)  # the class's own is seen again
            else:
                setattr(owner, name, last)
            if len(held) == 1:
                del _replacements[key]


@contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """Let `owner.NAME(...)` be `wrap(original, ...)` within the block."""
    original = getattr(owner, name)

    # A function, not an object: a copied or printed owner must not meet a live hook.
    @wraps(original)
    def replacement(*args: object, **kwargs: object) -> Any:
        return wrap(original, *args, **kwargs)

    with replaced(owner, name, replacement):
        yield
