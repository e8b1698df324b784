"""Makes a row for each sample's score. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from swift_grpo_ext.record.tables import Fate, RewardRow
from swift_grpo_ext.sampling.seeding import RoundId, SampleId

if TYPE_CHECKING:
    from swift.rl_core.data import GRPOBatch

    from swift_grpo_ext.rollout.sample import RolloutSample

SHOWN_GAP = 0.05  # nats; smaller gaps of tokens, which most are, are not recorded
MOST_GAPS = 64  # of a completion: only its greatest gaps are recorded


class RewardRecorder:
    """Makes the rows of this rank's samples, with the reward functions' names and weights."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        self._names = []  # a repeated name gets a number: `Accuracy`, `Accuracy_2`
        for number, name in enumerate(names):
            count = names[: number + 1].count(name)
            self._names.append(f"{name}_{count}" if count > 1 else name)
        self._weights = weights
        self._generated: dict[SampleId, RewardRow] = {}
        self._replaced_groups: set[tuple[RoundId, int]] = set()

    def replaced(self, round_: RoundId, groups: Iterable[int]) -> None:
        """Record the groups of a round that got other prompts."""
        self._replaced_groups.update((round_, group) for group in groups)

    def generated(
        self, samples: Sequence[RolloutSample], values: Sequence[Sequence[float]]
    ) -> None:
        """Record scored samples, which dynamic sampling may still drop. `values` are
        [samples][functions], NaN where a function gave none."""
        for sample, row_values in zip(samples, values, strict=True):
            row = self._row(sample, row_values, fate="dropped")
            self._generated[row.sample_id] = row

    def record(
        self,
        samples: Sequence[RolloutSample],
        values: Sequence[Sequence[float]],
        *,
        fate: Fate,
        extras: Mapping[SampleId, Mapping[str, Any]],
    ) -> list[RewardRow]:
        """Return the rows of a round that is over, dropped samples included. `fate` applies to
        `samples`, which this rank keeps. `values` has the form of `generated`'s, and `extras` is
        the result of `training_scores`."""
        # Rounds that dynamic sampling adds end together with the round that they fill up.
        rows, self._generated = self._generated, {}
        for sample, row_values in zip(samples, values, strict=True):
            row = self._row(sample, row_values, fate=fate, **extras.get(sample.sample_id, {}))
            rows[row.sample_id] = row
        rounds = {name.round for name in rows}  # groups of the next round may be replaced already
        self._replaced_groups = {g for g in self._replaced_groups if g[0] not in rounds}
        return [*rows.values()]

    def _row(
        self, sample: RolloutSample, values: Sequence[float], *, fate: Fate, **extras: Any
    ) -> RewardRow:
        sample_id = sample.sample_id
        known = [None if math.isnan(value) else float(value) for value in values]
        weighted = zip(known, self._weights, strict=True)
        terms = [value * weight for value, weight in weighted if value is not None]
        return RewardRow(
            sample_id=sample_id,
            reward=sum(terms) if terms else None,
            rewards=list(zip(self._names, known, strict=True)),
            truncated=bool(sample.is_truncated),
            replaced=(sample_id.round, sample_id.group) in self._replaced_groups,
            fate=fate,
            **extras,
        )


def scores_of_ranks(rows_of_ranks: Iterable[Sequence[RewardRow]]) -> list[RewardRow]:
    """Return the row of each sample once, in the order of samples."""
    # With dynamic sampling, one rank may generate a sample and another one train on it: that sample
    # was not dropped. The last row of a sample counts.
    rows = sorted(chain(*rows_of_ranks), key=lambda row: row.fate != "dropped")
    scores = {row.sample_id: row for row in rows}
    return [scores[name] for name in sorted(scores)]


def training_scores(
    samples: Sequence[RolloutSample],
    micro_batches: Sequence[tuple[Sequence[RolloutSample], GRPOBatch]],
) -> dict[SampleId, dict[str, Any]]:
    """Return `advantage` (of GRPO), `gap_mean`, `gap_max` and `gaps` of this rank's samples, as far
    as known. Each micro-batch has its samples, and its tensors of [samples, tokens]."""
    scores: dict[SampleId, dict[str, Any]] = {}
    for sample in samples:
        advantage = getattr(sample, "advantages", None)
        known = {} if advantage is None else {"advantage": float(advantage)}
        scores[sample.sample_id] = known
    for chunk, batch in micro_batches:
        rollout, training = batch.rollout_per_token_logps, batch.old_per_token_logps
        if rollout is None or training is None:
            continue
        gaps = (training - rollout).abs().float().detach().cpu().numpy()
        trained = batch.completion_mask.bool().cpu().numpy()
        for sample, row, mask in zip(chunk, gaps, trained, strict=True):
            own = row[mask]  # gaps of the tokens that are trained on
            mean = float(own.mean()) if len(own) else 0.0
            # With sequence parallelism a micro-batch has other ranks' samples too.
            score = scores.get(sample.sample_id, {})
            score.update(gap_mean=mean, gap_max=float(own.max(initial=0.0)))
            # `response_token_ids` has token ids, or a list of ids for each turn. If the mask leaves
            # tokens out, the positions of the others in the completion are unknown.
            turns = sample.response_token_ids
            if len(own) == sum(1 if isinstance(turn, int) else len(turn) for turn in turns):
                shown = sorted(np.flatnonzero(own >= SHOWN_GAP), key=lambda at: -own[at])
                score["gaps"] = [(int(at), float(own[at])) for at in sorted(shown[:MOST_GAPS])]
    return scores
