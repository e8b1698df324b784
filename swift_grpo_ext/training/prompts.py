"""Which prompts a round holds: duplicates are told, and failing ones are replaced as whole groups.

ms-swift drops failing samples one by one and appends others at the end, so that later groups hold
several prompts (`BBB AAAA CCCCC`), and advantages compare what has nothing in common. Here a group
leaves whole and another comes whole (docs/promises.md, M1).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from swift.utils import get_logger

from swift_grpo_ext.checks.rows import encode_prompt, encoding_error, question_of
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.sampling.prompt_hash import count_duplicates, prompt_hash, prompt_hashes
from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.sampling.seeding import SampleId

if TYPE_CHECKING:
    from swift.template import Template

logger = get_logger()
T = TypeVar("T")
Row = dict[str, Any]
"""A row of the data set, as ms-swift has mapped it: `messages`, `images` ..."""

MAX_CANDIDATES = 10
"""Rows that are tried in the place of one group, as in ms-swift's `max_resample_rounds`."""

MOST_LOOKED_AT = 256
"""Rows whose lengths are looked at when a training starts; one with an image of 1,024 px takes
about 20 ms."""

_SPAWN_KEY = 0x5245504C  # "REPL": keeps this order apart from the samples' seeds


class NoReplacementError(RuntimeError):
    """A prompt cannot be encoded, and none of the rows that were tried in its place can."""


def replace_failing_prompts(
    rows: Sequence[Row],
    *,
    others: Sequence[Row],
    round_: Round,
    group_size: int,
    seed: int,
    template: Template,
    ranks: RankGroup,
) -> tuple[list[Row], list[int]]:
    """Put other prompts in the place of those that cannot be encoded, by whole groups.

    Every rank calls it with its rows; a group may begin on one rank and end on the next. Rank 0
    warns of each group.

    Args:
        rows: this rank's, in order.
        others: the data set from which other prompts come.
        round_: the round that is about to be generated.
        seed: `--seed`, which decides with the round in what order other rows are tried.

    Returns:
        This rank's rows, and the numbers of the replaced groups in the generation batch, of all
        ranks.

    Raises:
        NoReplacementError: on every rank; names the groups and the causes.
    """
    start = sum(ranks.all_gather(len(rows))[: ranks.rank])
    group_of = [(start + position) // group_size for position in range(len(rows))]
    # Equal rows of a group are looked at once.
    distinct = dict(zip(zip(group_of, prompt_hashes(rows), strict=True), rows, strict=True))
    failed_here: dict[int, tuple[str, Row]] = {}
    for (group, _), row in distinct.items():
        if group not in failed_here and (error := encoding_error(template, row)):
            failed_here[group] = error, row
    failed = _merge(ranks.all_gather(failed_here))
    if not failed:
        return list(rows), []

    # The rank of a group's first sample looks at candidates for it.
    begun = {group_of[i]: row for i, row in enumerate(rows) if (start + i) % group_size == 0}
    taken = {h for hashes in ranks.all_gather(prompt_hashes(begun.values())) for h in hashes}
    order = candidate_order(seed, round_, len(others))
    found: dict[int, Row] = {}

    def find(avoided: set[str]) -> None:
        """Try rows for the groups that have none yet; each candidate goes to one group."""
        left = iter(order)
        for _ in range(MAX_CANDIDATES):
            found_here: dict[int, Row] = {}
            for group in (group for group in sorted(failed) if group not in found):
                number = next(left, None)
                row = others[number] if number is not None and group in begun else None
                if row and prompt_hash(row) not in avoided and not encoding_error(template, row):
                    found_here[group] = row
            found.update(_merge(ranks.all_gather(found_here)))
            taken.update(map(prompt_hash, found.values()))
            if len(found) == len(failed):
                return

    find(taken)
    if len(found) < len(failed):  # a data set hardly larger than the batch has to repeat a prompt
        find(set())
    if len(found) < len(failed):
        causes = "; ".join(f"group {g}: {failed[g][0]}" for g in sorted(failed.keys() - found))
        raise NoReplacementError(
            f"{len(failed)} prompts of the generation batch cannot be encoded, and for "
            f"{len(failed) - len(found)} of them {MAX_CANDIDATES} other rows were tried in vain "
            f"({causes}). Correct the data set, or raise --max_length."
        )
    for group, (error, row) in sorted(failed.items()) if ranks.rank == 0 else ():
        logger.warning(
            f"{round_.phase} round {round_.step}.{round_.number}, group "
            f"{round_.first_group + group}: the row that asks {question_of(row)!r} cannot be "
            f"encoded ({error}); another prompt takes the place of the whole group "
            "(--truncation_strategy delete)."
        )
    pairs = zip(rows, group_of, strict=True)
    whole = [copy.deepcopy(found[group]) if group in found else row for row, group in pairs]
    return whole, sorted(failed)


def candidate_order(seed: int, round_: Round, num_rows: int) -> list[int]:
    """Return the numbers of the rows to try in a round; the same on all ranks and after a resume.

    A permutation by numpy's PCG64, seeded with `SeedSequence(seed, spawn_key=...)` of the round.
    """
    is_eval = int(round_.phase == "eval")
    key = (_SPAWN_KEY, is_eval, round_.step, round_.number, round_.first_group)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key)))
    order: list[int] = generator.permutation(num_rows).tolist()
    return order


def _merge(of_ranks: Sequence[dict[int, T]]) -> dict[int, T]:
    """Return one value a group; of a group on several ranks the first rank's."""
    return {group: value for values in reversed(of_ranks) for group, value in values.items()}


class GroupWarnings:
    """Says once of a run that prompts stand twice in a batch, and that groups hold several prompts.

    Both are told, not refused: each duplicate has its own noise (docs/promises.md, G3 and G4).
    """

    def __init__(self) -> None:
        self._has_told_duplicates = self._has_told_uneven = False

    def tell_duplicates(
        self,
        sample_ids: Sequence[SampleId],
        hashes: Sequence[str],
        all_gather: Callable[[list[str]], list[list[str]]],
    ) -> None:
        """Warn where a generation batch holds a prompt twice; every rank calls it."""
        pairs = zip(sample_ids, hashes, strict=True)
        of_ranks = all_gather([h for sample_id, h in pairs if sample_id.index == 0])
        num_duplicates = count_duplicates(h for hashes in of_ranks for h in hashes)
        if num_duplicates and not self._has_told_duplicates:
            self._has_told_duplicates = True
            logger.warning(
                f"{sample_ids[0]}: {num_duplicates} of {sum(map(len, of_ranks))} prompts of the "
                "generation batch stand in it twice, media included; each is a group of its own, "
                "with its own noise. (Said once.)"
            )

    def tell_uneven(self, uneven: Sequence[SampleId]) -> None:
        """Warn of groups whose rows differ."""
        if uneven and not self._has_told_uneven:
            self._has_told_uneven = True
            logger.warning(
                f"{len(uneven)} groups hold rows that differ, the first in {uneven[0]}: each "
                "sample is a request. Advantages compare the samples of a group; a custom sampler "
                "must repeat each row --num_generations times. (Said once.)"
            )


def tell_long_prompts(template: Template, rows: Sequence[Row], *, use_vllm: bool) -> None:
    """Log how many of the first rows are longer than `--max_length`, and what becomes of such rows.

    Args:
        template: ms-swift's, of the training; changed within the call only.
        rows: the training set. Media are loaded, as in a rollout; rows that fail are not counted.
        use_vllm: rollouts count a medium as one token where vLLM generates and prompts are cut.
    """
    max_length = template.max_length
    if not max_length or max_length >= (template.model_info.max_model_len or 0):
        return  # nobody has set it
    mode = template.mode
    is_cut = template.truncation_strategy == "left"
    num_looked_at, lengths = min(len(rows), MOST_LOOKED_AT), list[int]()
    template.max_length = None
    template.set_mode("vllm" if is_cut and use_vllm else mode)
    try:
        for number in range(num_looked_at):
            with suppress(Exception):  # `check_rows` and the round tell of rows that are broken
                lengths.append(len(encode_prompt(template, rows[number])["input_ids"]))
    finally:
        template.max_length = max_length
        template.set_mode(mode)
    num_long = sum(length > max_length for length in lengths)
    consequence = (
        "rollouts cut them on the left, and training reads what the rollout has seen"
        if is_cut
        else "another prompt takes the place of such a group"
    )
    tell = logger.warning if num_long else logger.info
    tell(
        f"--max_length {max_length}: {num_long} of {num_looked_at} rows that were looked at have "
        f"longer prompts (the longest: {max(lengths, default=0)} tokens); {consequence} "
        f"(--truncation_strategy {'left' if is_cut else 'delete'})."
    )
