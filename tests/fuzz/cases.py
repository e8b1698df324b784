"""How many cases a fuzz test tries, how long one may take, and values as data sets have them.

FUZZ_CASES=10000 pytest tests/fuzz
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("FUZZ_CASES", "50"))
"""Of each test."""

SECONDS = 10
"""After which a case counts as one that hangs; the slowest take some milliseconds."""

fuzz = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class HangError(Exception):
    pass


@contextmanager
def no_hang() -> Iterator[None]:
    """Raise `HangError` within the block if it takes longer than `SECONDS`."""

    def alarm(*_: Any) -> None:
        raise HangError(f"still running after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


words = st.text(st.characters(), max_size=8)  # with lone halves of surrogate pairs
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), words, st.sampled_from([0, -1, 2**63, ""])
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3)


json_like = st.recursive(leaves, containers, max_leaves=8)
