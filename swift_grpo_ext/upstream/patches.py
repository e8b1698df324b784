"""Every change that we make to ms-swift, vLLM, transformers or torch, and the one way to make it.

`@repair` marks each function that changes something for the rest of a process. It says what
goes wrong without the change, where upstream's cause lies, and when the change can go.
`apply(moment)` makes the repairs of a moment, once: `MODULES` names the modules that hold them.

`patch` is what these functions change upstream with; it refuses what upstream does not have, or
calls with other parameters. `replaced` and `wrapped` change something for a block.
`tests/upstream/test_patches.py` finds what goes around them. The places that ms-swift has for
plugins need no patch: `registry.py` fills them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, MutableMapping
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
    DETERMINISM = "the same, with --full_determinism true"
    TRAINER = "a trainer is about to be made; it may be connected to servers"
    ENGINE = "a process is about to make an engine"
    REPLICA = "the same, of a server's replica"
    WORKER = "a process holds a worker of an engine, and perhaps no engine"
    SERVER = "`swift rollout` is loaded, and has made no server yet"
    CALLED = "the module that has the object, or the setting, calls the function itself"


MODULES: dict[Moment, tuple[str, ...]] = {
    Moment.REGISTRATION: ("command_line",),
    Moment.TRAINING: ("upstream.models", "upstream.upright", "upstream.rows"),
    Moment.DETERMINISM: ("upstream.determinism",),
    Moment.ENGINE: (
        *("upstream.upright", "upstream.rows", "upstream.encoding"),
        "rollout.positions",
    ),
    Moment.REPLICA: ("media.paths",),
    Moment.SERVER: ("rollout.engine", "server.replicas", "server.routes"),
}
"""Each moment's modules within `swift_grpo_ext`. They are imported when it comes, and not before:
they import this module, and what they change."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """One lasting change of upstream."""

    function: Callable[..., object]
    """The function that makes it."""

    moments: tuple[Moment, ...]
    """It is made at the first of them that comes."""

    symptom: str
    """What goes wrong without it."""

    upstream: str
    """Release and file of the cause."""

    until: str
    """When it can go: the end of a sentence that begins with "Can go when"."""

    optional: bool
    """A release that lacks what it changes has another cause, or none: it is left as it is."""


REPAIRS: list[Repair] = []
"""Those of the modules that were imported so far."""


def repair(
    *moments: Moment, symptom: str, upstream: str, until: str, optional: bool = False
) -> Callable[[T], T]:
    """List a function, or a class, that changes upstream (`Repair` has the arguments)."""

    def note(function: T) -> T:
        REPAIRS.append(
            Repair(
                function=function,
                moments=moments,
                symptom=symptom,
                upstream=upstream,
                until=until,
                optional=optional,
            )
        )
        return function

    return note


def apply(moment: Moment) -> None:
    """Make the repairs of a moment that were not made yet, in their order."""
    for name in MODULES.get(moment, ()):
        module = import_module(f"swift_grpo_ext.{name}").__name__
        # Other modules may have been imported too: those for CPU are, on a machine with a GPU.
        for each in [each for each in REPAIRS if each.function.__module__ == module]:
            if moment in each.moments:
                make(each.function)


@cache  # once in a process, whichever moment comes first
def make(function: Callable[[], object]) -> bool:
    """Make one repair, and return whether it was made."""
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
    """Replace attributes of an upstream module, class or object for the rest of this process.

    Raises:
        UnsupportedUpstreamError: upstream has no such attribute, or a function with other
            parameters.
    """
    refuse(text for name, value in values.items() if (text := _misfit(owner, name, value)))
    for name, value in values.items():
        setattr(owner, name, value)


def patch_entry(registry: MutableMapping[str, Any], name: str, value: object) -> None:
    """Replace an entry of an upstream registry for the rest of this process."""
    registry[name] = value


def _misfit(owner: object, name: str, value: object) -> str | None:
    kind = owner if hasattr(owner, "__name__") else type(owner)
    label = f"{getattr(kind, '__name__', kind)}.{name}"
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
_replacements: dict[tuple[int, str], list[object]] = {}
"""By the owner's id and the attribute's name: what the owner itself had, then what each block that
has not ended put there. An owner lives as long as its blocks."""

_lock = threading.RLock()  # a block that is garbage-collected may end within another's beginning


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Let an attribute of an upstream module, class or object be `value` within the block.

    Blocks may overlap, and end in any order, in any thread: the attribute is that of the block
    which began last, and in the end what it was.
    """
    key = id(owner), name
    with _lock:
        held = _replacements.setdefault(key, [vars(owner).get(name, _ABSENT)])
        held.append(value)
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            # Of two blocks with one value, either may end first: they are alike.
            del held[max(i for i, each in enumerate(held) if each is value)]
            if held[-1] is _ABSENT:
                delattr(owner, name)  # the class's own is seen again
            else:
                setattr(owner, name, held[-1])
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
