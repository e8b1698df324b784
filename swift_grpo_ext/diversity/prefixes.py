"""Sequences that share prefixes: the inner nodes of their trie. Pure.

Sorting brings sequences that share a prefix next to each other, so that the longest common prefixes
of neighbours say all; no pair is compared but neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from swift_grpo_ext.diversity.drawn import Ints


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """All sequences that begin with one prefix, two or more; no longer one is common to all."""

    members: Ints
    """Numbers of the sequences."""

    length: int
    """Of the prefix, in tokens, 1 or more."""


def shared_prefixes(sequences: Sequence[Ints]) -> Iterator[SharedPrefix]:
    """Each longest prefix that two or more sequences share, with all that share it; inner ones
    before the shorter ones that they continue. Fewer than there are sequences."""
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
    lengths = [common_length(sequences[a], sequences[b]) for a, b in pairwise(order)]
    members = np.array(order, np.int64)
    is_open: list[tuple[int, int]] = []  # length of a prefix, and the first that has it
    for number, length in enumerate([*lengths, 0]):
        first = number
        while is_open and is_open[-1][0] > length:
            closed, first = is_open.pop()
            yield SharedPrefix(members[first : number + 1], closed)
        if length > (is_open[-1][0] if is_open else 0):
            is_open.append((length, first))


def common_length(a: Ints, b: Ints) -> int:
    """Tokens of the longest common prefix."""
    end = min(len(a), len(b))
    differs = a[:end] != b[:end]
    first = int(differs.argmax()) if end else 0
    return first if end and differs[first] else end
