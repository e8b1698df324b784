"""Prompts that cannot be encoded leave, and are replaced, as whole groups (SPEC M1). Pure.

ms-swift drops failing samples one by one and appends others at the end, so that later groups hold
several prompts (`BBB AAAA CCCCC`), and advantages compare what has nothing in common.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swift_grpo_ext.sampling.groups import fingerprint, fingerprints
from swift_grpo_ext.sampling.rounds import Round

MAX_CANDIDATES = 10
"""Rows that are tried in the place of one group, as in ms-swift's `max_resample_rounds`."""

_SPAWN_KEY = 0x5245504C  # "REPL": keeps this order apart from the samples' seeds

Row = dict[str, Any]


class NoReplacementError(RuntimeError):
    """A prompt cannot be encoded, and none of the rows that were tried in its place can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaced:
    """A group that was given another prompt."""

    group: int
    """Its number in the generation batch."""

    error: str
    """Why its prompt could not be encoded."""

    row: Row
    """The row that left."""


def candidate_order(seed: int, round_: Round, num_rows: int) -> Iterator[int]:
    """Numbers of the rows to try in a round, each once; the same on all ranks and after a resume.

    A permutation by numpy's PCG64, seeded with `SeedSequence(seed, spawn_key=...)` of the round.
    """
    is_eval = int(round_.phase == "eval")
    key = (_SPAWN_KEY, is_eval, round_.step, round_.number, round_.first_group)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
    return map(int, generator.permutation(num_rows))


def replace_groups(
    rows: Sequence[Row],
    start: int,
    group_size: int,
    *,
    error_of: Callable[[Row], str | None],
    draw: Callable[[int], Callable[[], Row] | None],
    gather: Callable[[Any], list[Any]],
) -> tuple[list[Row], list[Replaced]]:
    """This rank's rows with failing groups replaced, and which of all ranks' groups were.

    Args:
        rows: this rank's, in order; a group may begin on one rank and end on the next.
        start: position of the first of them in the generation batch.
        group_size: G.
        error_of: why a row cannot be encoded; None where it can.
        draw: called on every rank with the number of a candidate in the round, from 0; what it
            returns is called on one rank, and gives the row. None where there are no more.
        gather: gives every rank's value, in the order of ranks, on every rank.

    Raises:
        NoReplacementError: on every rank; names the groups and the causes.
    """
    group_of = [(start + number) // group_size for number in range(len(rows))]
    own_errors: dict[int, tuple[str, Row]] = {}
    # Equal rows of a group are looked at once.
    distinct = dict(zip(zip(group_of, fingerprints(rows), strict=True), rows, strict=True))
    for (group, _), row in distinct.items():
        if group not in own_errors and (error := error_of(row)):
            own_errors[group] = error, row
    failed = _merge(gather(own_errors))
    if not failed:
        return list(rows), []
    # A group's first sample tells who looks at candidates for it.
    own = {group_of[i]: row for i, row in enumerate(rows) if (start + i) % group_size == 0}
    taken = {p for prints in gather(fingerprints(own.values())) for p in prints}
    found = _find(sorted(failed), own, taken, error_of=error_of, draw=draw, gather=gather)
    if len(found) < len(failed):
        causes = "; ".join(f"group {g}: {failed[g][0]}" for g in sorted(failed.keys() - found))
        raise NoReplacementError(
            f"{len(failed)} prompts of the generation batch cannot be encoded, and for "
            f"{len(failed) - len(found)} of them {MAX_CANDIDATES} other rows were tried in vain "
            f"({causes}). Correct the data set, or raise --max_length."
        )
    pairs = zip(rows, group_of, strict=True)
    whole = [copy.deepcopy(found[group]) if group in found else row for row, group in pairs]
    return whole, [Replaced(group=g, error=failed[g][0], row=failed[g][1]) for g in sorted(failed)]


def _find(
    failed: Sequence[int],
    own: Container[int],
    taken: set[str],
    *,
    error_of: Callable[[Row], str | None],
    draw: Callable[[int], Callable[[], Row] | None],
    gather: Callable[[Any], list[Any]],
) -> dict[int, Row]:
    """For failed groups, rows that can be encoded; none of the batch, where there are others."""
    found: dict[int, Row] = {}
    # A data set that is hardly larger than the batch has to repeat a prompt.
    for avoided in (taken, frozenset[str]()):
        drawn = 0
        for _ in range(MAX_CANDIDATES):
            rows: dict[int, Row] = {}
            for group in (group for group in failed if group not in found):
                make, drawn = draw(drawn), drawn + 1
                row = make() if make and group in own else None
                if row and fingerprint(row) not in avoided and error_of(row) is None:
                    rows[group] = row
            found.update(_merge(gather(rows)))
            taken.update(map(fingerprint, found.values()))
            if len(found) == len(failed):
                return found
    return found


def _merge(of_ranks: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """One value a group; of a group on several ranks the first rank's."""
    return {group: value for values in reversed(of_ranks) for group, value in values.items()}
