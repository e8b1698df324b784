"""The one way to change ms-swift, vLLM or transformers for the rest of a process.

`patch` refuses what no table of `pins.py` lists (`tests/upstream/test_patches.py` finds assignments
that go around it). Whoever calls it says *Symptom*, *Upstream* (release and file) and *Can go when*
in its docstring; `grep -rn " patch(" swift_grpo_ext` finds them all. What is changed for the time
of a block, or on an object that is ours, needs no `patch`; nor do the places that ms-swift has for
plugins, which `registry.py` fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import ModuleType

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import Pin, mismatch

PINNED = frozenset(".".join(str(pin).split(".")[-2:]) for pin in (*pins.ALL, *pins.UNVERIFIED))
"""Each as `Class.name` or `module.name`, the module without the packages around it."""


def patch(owner: ModuleType | type, **values: object) -> None:
    """Replace attributes of an upstream module or class for the rest of this process.

    Raises:
        LookupError: no pin names one of them.
    """
    for name, value in values.items():
        pinned = f"{owner.__name__.rpartition('.')[2]}.{name}"
        if pinned not in PINNED:
            raise LookupError(f"{pinned} stands in no table of {pins.__name__}; list it there.")
        setattr(owner, name, value)


def repair(table: Iterable[Pin]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a repair once, and only where a release has the names that it is made of."""

    def guard(make: Callable[[], None]) -> Callable[[], None]:
        @cache
        @wraps(make)
        def make_once() -> None:
            if not any(map(mismatch, table)):
                make()

        return make_once

    return guard
