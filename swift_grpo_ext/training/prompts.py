"""Which prompts a round holds: how many, which on this rank, and others for those that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from swift.utils import get_logger

from swift_grpo_ext.checks.rows import encode_prompt, encoding_error, question_of
from swift_grpo_ext.rollout.rank_group import RankGroup
from swift_grpo_ext.sampling.replacement import Row, candidate_order, replace_groups
from swift_grpo_ext.sampling.rounds import Round, RoundClock

logger = get_logger()

MOST_LOOKED_AT = 256
"""Rows whose lengths are looked at when a training starts; one with an image of 1,024 px takes
about 20 ms."""


def round_clock(args: Any, num_rows: int, sequence_parallel_size: int) -> RoundClock:
    """How many training batches make a step, a round and an epoch.

    Args:
        args: of the training, once ms-swift's trainer has adjusted them.
        num_rows: of the training set.
    """
    per_round = args.steps_per_generation * sequence_parallel_size * args.num_iterations
    num_rounds = num_rows // (args.generation_batch_size // args.num_generations)
    return RoundClock(
        batches_per_step=args.gradient_accumulation_steps,
        batches_per_round=per_round,
        batches_per_epoch=max(num_rounds, 1) * per_round,
        max_resamples=args.max_resample_times if args.dynamic_sample else 0,
    )


def rank_rows(indices: Sequence[int], ranks: RankGroup, *, sharing: int = 1) -> Sequence[int]:
    """This rank's share of a generation batch, which ranks divide evenly and in order.

    Args:
        sharing: ranks next to one another that run one engine; theirs all together.
    """
    share = len(indices) // ranks.size
    first = ranks.rank - ranks.rank % sharing
    return indices[share * first : share * (first + sharing)]


def replace_failing_prompts(
    rows: Sequence[Row],
    *,
    others: Any,
    round_: Round,
    group_size: int,
    seed: int,
    template: Any,
    ranks: RankGroup,
) -> tuple[list[Row], list[int]]:
    """This rank's rows with other prompts in the place of those that cannot be encoded, by whole
    groups, and which groups of the generation batch, of all ranks. Rank 0 warns of each.

    Args:
        rows: this rank's, in order.
        others: the data set from which other prompts come.
        round_: that is about to be drawn.
        seed: `--seed`, which decides with the round in what order other rows are tried.

    Raises:
        NoReplacementError: on every rank; see `replace_groups`.
    """
    order = list(candidate_order(seed, round_, len(others)))

    def candidate(number: int) -> Callable[[], Row] | None:
        return (lambda: others[order[number]]) if number < len(order) else None

    sizes = ranks.all_gather(len(rows))
    kept, replaced = replace_groups(
        rows,
        start=sum(sizes[: ranks.rank]),
        group_size=group_size,
        error_of=lambda row: encoding_error(template, row),
        draw=candidate,
        gather=ranks.all_gather,
    )
    for group in replaced if ranks.rank == 0 else ():
        logger.warning(
            f"{round_.phase} round {round_.step}.{round_.number}, group "
            f"{round_.first_group + group.group}: the row that asks "
            f"{question_of(group.row)!r} cannot be encoded ({group.error}); another prompt "
            "takes the place of the whole group (--truncation_strategy delete)."
        )
    return kept, [group.group for group in replaced]


def tell_long_prompts(template: Any, rows: Sequence[Row], *, use_vllm: bool) -> None:
    """Log how many of the first rows are longer than `--max_length`, and what becomes of such rows.

    Args:
        template: ms-swift's, of the training; changed within the call only.
        rows: the training set. Media are loaded, as in a rollout; rows that fail are not counted.
        use_vllm: rollouts count a medium as one token where vLLM draws and prompts are cut.
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
    fate = (
        "rollouts cut them on the left, and training reads what the rollout has seen"
        if is_cut
        else "another prompt takes the place of such a group"
    )
    tell = logger.warning if num_long else logger.info
    tell(
        f"--max_length {max_length}: {num_long} of {num_looked_at} rows that were looked at have "
        f"longer prompts (the longest: {max(lengths, default=0)} tokens); {fate} "
        f"(--truncation_strategy {'left' if is_cut else 'delete'})."
    )
