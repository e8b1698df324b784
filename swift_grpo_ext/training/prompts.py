"""Replaces prompts that cannot be encoded, as whole groups (docs/promises.md, M1).

ms-swift drops failing samples one by one and appends others at the end. Later groups then mix
prompts (`BBB AAAA CCCCC`), and advantages compare samples of different prompts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from swift.infer_engine.protocol import RolloutInferRequest
from swift.utils import get_logger

from swift_grpo_ext.checks.rows import RowError, encoding_fault, name_of, row_fault
from swift_grpo_ext.ranks import RankGroup
from swift_grpo_ext.sampling.prompt_hash import prompt_hash
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from swift_grpo_ext.upstream.patches import wrapped

if TYPE_CHECKING:
    from swift.template import Template

    from swift_grpo_ext.rollout.sample import RolloutSample

logger = get_logger()
Row = dict[str, Any]  # a row of the data set after ms-swift's preprocessing: `messages`, `images`

# Candidate rows tried for each failing group, like ms-swift's `max_resample_rounds`.
MAX_CANDIDATES = 10
_STREAM = 0x5245504C  # "REPL": makes this random stream differ from the samples' seeds


def replace_failing_prompts(
    rows: Sequence[Row],
    *,
    others: Sequence[Row],  # the data set that replacements are taken from
    round_: RoundId,
    first_group: int,  # the number in `round_` of the batch's first group
    group_size: int,
    seed: int,  # `--seed`; seed and round determine the order of the candidates
    ranks: RankGroup,
    error_of: Callable[[Row], str | None],  # returns why a row cannot be encoded
) -> tuple[list[Row], list[int]]:
    """Replace groups if their prompt cannot be encoded. Return this rank's rows, and the numbers of
    all replaced groups in the generation batch. Every rank calls it with its own rows, and raises
    ValueError if no candidate can be encoded."""
    # A group may begin on one rank and end on the next. All branches depend on gathered values, so
    # that every rank makes the same gathers.
    start = sum(ranks.all_gather(len(rows))[: ranks.rank])
    group_of = [(start + position) // group_size for position in range(len(rows))]
    # Each distinct row of a group is checked once.
    distinct = dict(zip(zip(group_of, map(prompt_hash, rows), strict=True), rows, strict=True))
    failed_here: dict[int, tuple[str, Row]] = {}
    for (group, _), row in distinct.items():
        if group not in failed_here and (error := error_of(row)):
            failed_here[group] = error, row
    # Reversed: if several ranks have rows of a group, the first rank's failure is kept.
    by_rank = reversed(ranks.all_gather(failed_here))
    failed = {group: failure for failures in by_rank for group, failure in failures.items()}
    if not failed:
        return list(rows), []

    found: dict[int, Row] = {}
    if ranks.rank == 0:  # decides for all ranks: a row may fail on some ranks only
        # Each group continues after the last group's rows, so that no two get the same row.
        numbers = cycle(candidate_order(seed, round_, first_group, len(others)))
        for group in sorted(failed):
            for number in islice(numbers, MAX_CANDIDATES):
                if not error_of(others[number]):
                    found[group] = others[number]
                    break
    found = ranks.all_gather(found)[0]
    if missing := sorted(failed.keys() - found.keys()):
        causes = "; ".join(f"group {group}: {failed[group][0]}" for group in missing)
        raise ValueError(
            f"{len(failed)} prompts of the generation batch cannot be encoded, and for "
            f"{len(missing)} of them {MAX_CANDIDATES} other rows were tried in vain "
            f"({causes}). Correct the data set, or raise --max_length or --vllm_max_model_len."
        )
    for group, (error, row) in sorted(failed.items()) if ranks.rank == 0 else ():
        logger.warning(
            f"{round_}, group {first_group + group}: {name_of(row)} cannot be encoded ({error}); "
            "another prompt takes the place of the whole group (--truncation_strategy delete)."
        )
    pairs = zip(rows, group_of, strict=True)
    # Copies: ms-swift modifies the messages of each sample in place.
    whole = [copy.deepcopy(found[group]) if group in found else row for row, group in pairs]
    return whole, sorted(failed)


def named_request(
    sample: RolloutSample | RolloutInferRequest,
    samples2requests: Callable[[list[Any]], list[RolloutInferRequest]],
    placeholders: Collection[str],
) -> RolloutInferRequest:
    """Return the request of a sample, made by ms-swift's `samples2requests`. Raise `RowError` if
    the row is invalid: the engine's own error would not name the row."""
    is_row = not isinstance(sample, RolloutInferRequest)  # else a later turn
    if is_row and (fault := row_fault(sample, placeholders)):
        raise RowError(sample, fault)
    try:
        return samples2requests([sample])[0]
    except Exception as e:  # ms-swift's conversion raises dacite's exceptions
        raise RowError(sample, encoding_fault(sample, e)) from e


@contextmanager
def named_rows(template: Template) -> Iterator[None]:
    """Within the block, turn errors of `template.encode` into a `RowError` that names the row."""

    def encode(upstream: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return upstream(inputs, *args, **kwargs)
        except Exception as e:  # templates, processors and media loaders raise many kinds
            raise RowError(inputs, encoding_fault(inputs, e)) from e

    with wrapped(template, "encode", encode):
        yield


def candidate_order(seed: int, round_: RoundId, first_group: int, num_rows: int) -> list[int]:
    """Return the rows to try as replacements, in order; a resumed run gets the same order."""
    is_eval = int(round_.phase == "eval")
    key = (seed, _STREAM, is_eval, round_.step, round_.number, first_group)
    order: list[int] = np.random.default_rng(key).permutation(num_rows).tolist()
    return order


def warn_uneven(uneven: Sequence[SampleId]) -> None:
    """Warn once about groups with different rows (G3)."""
    if uneven:
        logger.warning_once(
            f"{len(uneven)} groups hold rows that differ, the first in {uneven[0]}: their samples "
            "are requested one by one, and advantages compare different prompts. A custom sampler "
            "must repeat each row --num_generations times.",
            hash_id="uneven_groups",
        )


def warn_duplicates(hashes_of_ranks: Sequence[Sequence[str]], sample: SampleId) -> None:
    """Warn once if the generation batch of `sample` has a prompt twice (G4)."""
    hashes = [*chain.from_iterable(hashes_of_ranks)]
    if num_duplicates := len(hashes) - len({*hashes}):
        logger.warning_once(
            f"{sample.round}: {num_duplicates} of {len(hashes)} prompts of the generation batch "
            "are duplicates, media included. Each copy is a group of its own, with its own noise.",
            hash_id="duplicates",
        )
