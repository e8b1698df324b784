"""How each sample scored, and what became of it: one row beside the sample log's. Pure.

Rows are written when a round is scored and its advantages are known. Rounds that dynamic sampling
added are written with the round that they served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.row import make_table
from swift_grpo_ext.sampling.groups import sample_ids_at
from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.sampling.seeding import SampleId

Fate = Literal["trained", "dropped", "evaluated"]

SHOWN_GAP = 0.05
"""Nats from which on a token's gap is recorded: most lie below, so that they cost little."""

MOST_GAPS = 64
"""Of a completion: the greatest."""

REWARDS = make_table(
    "rewards",
    {
        "reward": pa.float32(),
        "rewards": pa.map_(pa.utf8(), pa.float32()),
        "advantage": pa.float32(),
        "gap_mean": pa.float32(),
        "gap_max": pa.float32(),
        "truncated": pa.bool_(),
        "replaced": pa.bool_(),
        "fate": pa.utf8(),
        "gaps": pa.map_(pa.int32(), pa.float32()),
    },
    nullable=("reward", "advantage", "gap_mean", "gap_max", "gaps"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRow:
    """How one sample scored."""

    sample_id: SampleId
    """Its name; all turns of a conversation share one score."""

    reward: float | None
    """Sum of the functions' values, weighted by `--reward_weights`; before the KL term of
    `--kl_in_reward`. None without a value."""

    rewards: Sequence[tuple[str, float | None]]
    """Each reward function's name and value; None where it gave none."""

    advantage: float | None = None
    """None where the sample was dropped."""

    gap_mean: float | None = None
    """Mean |training - rollout| log-probability over the completion's tokens, in nats; None where
    one of them is unknown, with sequence parallelism, and where the sample was dropped."""

    gap_max: float | None = None
    """The largest of these, in nats."""

    truncated: bool
    """Whether the length limit ended the completion."""

    replaced: bool
    """Whether its prompt replaced one that could not be encoded."""

    gaps: Sequence[tuple[int, float]] | None = None
    """Position in the completion and gap in nats of the tokens whose gap is `SHOWN_GAP` or more,
    at most `MOST_GAPS`; None where gaps are unknown, and where the positions are, in conversations
    with tokens of the environment."""

    fate: Fate
    """`dropped`: dynamic sampling left it out."""


class RewardRecorder:
    """Writes how this rank's samples scored, once their round is over."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        """Args: of the reward functions, in the order of the values. A name that comes again gets
        its number: `Accuracy`, `Accuracy_2`."""
        repeats = [names[: i + 1].count(name) for i, name in enumerate(names)]
        pairs = zip(names, repeats, strict=True)
        self._names = [f"{name}_{count}" if count > 1 else name for name, count in pairs]
        self._weights = weights
        self._drawn: dict[SampleId, RewardRow] = {}
        self._replaced_groups: set[SampleId] = set()

    def replaced(self, round_: Round, groups: Iterable[int]) -> None:
        """These groups of the generation batch that comes next got other prompts."""
        self._replaced_groups.update(sample_ids_at(round_, groups, 1))

    def drawn(self, samples: Sequence[Any], values: Sequence[Sequence[float]]) -> None:
        """Dynamic sampling has scored samples that this rank drew, and may drop them.

        Args:
            samples: ms-swift's.
            values: [samples][functions]; NaN where a function gave none.
        """
        rows = [self._row(*pair, fate="dropped") for pair in zip(samples, values, strict=True)]
        self._drawn.update((row.sample_id, row) for row in rows)

    def record(
        self,
        sample_log: SampleLog | None,
        samples: Sequence[Any],
        values: Sequence[Sequence[float]],
        *,
        fate: Fate,
        extras: Mapping[SampleId, Mapping[str, Any]],
        all_gather: Callable[[Any], list[Any]],
    ) -> list[RewardRow]:
        """Write the scores of a round that is over, and return them; all ranks call it.

        Args:
            sample_log: the log of the samples, of the same session; None for none.
            samples: ms-swift's, those that this rank goes on with.
            values: as for `drawn`.
            fate: of these samples.
            extras: by sample: `advantage`, `gap_mean`, `gap_max` and `gaps`, as far as known.
            all_gather: gives every rank's value; called only where dynamic sampling drew.
        """
        rows: dict[SampleId, RewardRow] = {}
        for sample, row_values in zip(samples, values, strict=True):
            row = self._row(sample, row_values, fate=fate, **extras.get(sample.sample_id, {}))
            rows[row.sample_id] = row
        if self._drawn:  # on all ranks or on none
            kept = {name for names in all_gather(list(rows)) for name in names}
            rows |= {name: row for name, row in self._drawn.items() if name not in kept}
        self._drawn = {}
        rounds = {name.round for name in rows}  # of the next, groups may be replaced already
        self._replaced_groups = {g for g in self._replaced_groups if g.round not in rounds}
        in_order = [rows[name] for name in sorted(rows)]
        if sample_log is not None:
            sample_log.append(in_order, REWARDS)
        return in_order

    def _row(self, sample: Any, values: Sequence[float], *, fate: Fate, **extras: Any) -> RewardRow:
        sample_id: SampleId = sample.sample_id
        known = [None if math.isnan(value) else float(value) for value in values]
        weighted = zip(known, self._weights, strict=True)
        terms = [value * weight for value, weight in weighted if value is not None]
        return RewardRow(
            sample_id=sample_id,
            reward=sum(terms) if terms else None,
            rewards=list(zip(self._names, known, strict=True)),
            truncated=bool(sample.is_truncated),
            replaced=sample_id.group_id in self._replaced_groups,
            fate=fate,
            **extras,
        )


def training_scores(
    samples: Sequence[Any], chunks: Sequence[Sequence[Any]], batches: Sequence[Any]
) -> dict[SampleId, dict[str, Any]]:
    """Return what training adds to a sample's score: `RewardRecorder.record`'s `extras`.

    Args:
        samples: ms-swift's, with their `advantages`.
        chunks: the samples of each micro-batch.
        batches: the micro-batches, ms-swift's `GRPOBatch` with tensors [samples, tokens].
    """
    scores: dict[SampleId, dict[str, Any]] = {
        sample.sample_id: {"advantage": float(sample.advantages)} for sample in samples
    }
    for chunk, batch in zip(chunks, batches, strict=True):
        rollout, training = batch.rollout_per_token_logps, batch.old_per_token_logps
        if rollout is None or training is None:
            continue
        difference = (training - rollout).abs().float() * batch.completion_mask
        means = difference.sum(1) / batch.completion_mask.sum(1).clamp(min=1)
        for sample, mean, largest in zip(
            chunk, means.tolist(), difference.amax(1).tolist(), strict=True
        ):
            scores[sample.sample_id].update(gap_mean=mean, gap_max=largest)
        counts = batch.completion_mask.sum(1).tolist()
        for sample, count, gaps in zip(
            chunk, counts, _greatest_gaps(difference, batch.completion_mask), strict=True
        ):
            if count == sum(map(_num_tokens, sample.response_token_ids)):
                scores[sample.sample_id]["gaps"] = gaps
    return scores


def _num_tokens(ids: int | Sequence[int]) -> int:
    """Of a turn; ms-swift has a lone turn's ids as they are, too."""
    return 1 if isinstance(ids, int) else len(ids)


def _greatest_gaps(difference: Any, mask: Any) -> list[list[tuple[int, float]]]:
    """Of each sample, `RewardRow.gaps`.

    Args:
        difference: tensor of [samples, tokens], in nats; 0 outside the mask.
        mask: of the completion's tokens.
    """
    values, places = difference.topk(min(MOST_GAPS, difference.shape[1]), dim=1)
    positions = (mask.cumsum(1) - 1).gather(1, places)
    rows = zip(positions.tolist(), values.tolist(), strict=True)
    return [
        sorted((at, gap) for at, gap in zip(*row, strict=True) if gap >= SHOWN_GAP) for row in rows
    ]
