"""Makes dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476) take as few waves as possible.

A step trains on the first groups with unequal rewards: those of its own batch, then those of the
rounds that are added to it. ms-swift draws one generation batch after the other, and the engines
wait for the longest answer of each batch. Here the first wave includes as many groups of the added
rounds as are expected to be needed. The kept groups do not depend on the sizes of waves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, groupby
from time import perf_counter
from typing import Any, NamedTuple

import torch
from swift.rlhf_trainers import GRPOTrainer
from swift.rlhf_trainers.utils import get_even_process_data
from swift.utils import get_logger

from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.sampling.sampler import EpochSampler
from swift_grpo_ext.sampling.seeding import RoundId, SampleId
from swift_grpo_ext.sampling.waves import Waves
from swift_grpo_ext.training.rollouts import RolloutTraining

logger = get_logger()


class Scored(NamedTuple):
    """A sample and its rewards."""

    sample: RolloutSample
    values: torch.Tensor  # [reward functions]; NaN if a function gave no reward
    reward: float


class DynamicSampling(RolloutTraining, GRPOTrainer):
    """Adds `--dynamic_sample` to the rollouts of GRPO."""

    # The times of the last wave on this rank.
    _generating_seconds = 0.0
    _scoring_seconds = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batch = self.args.generation_batch_size // self.num_generations  # groups
        # All ranks need equal numbers of a wave's samples: ms-swift gathers their rewards.
        unit = self.ranks.size // math.gcd(self.ranks.size, self.num_generations)
        is_ours = self._settings.generates and not self.args.async_generate
        self._waves = Waves(self._batch, unit, draws_ahead=is_ours)

    # --- a wave: rows, names, completions ---

    def _rollout_samples(self, inputs: list[Any]) -> list[RolloutSample]:
        if not (self.dynamic_sample and self.model.training):
            return super()._rollout_samples(inputs)
        self._num_added = 0  # drawn groups of added rounds
        samples = self._named(inputs, self._rounds.current, 0)
        return self._timed([*samples, *self._next_added(self._waves.first())])

    def _next_added(self, count: int) -> list[RolloutSample]:
        """Return this rank's samples of the next groups of added rounds, with their names."""
        upstream = GRPOTrainer._get_train_sampler(self)
        upstream.seed = (upstream.seed or 0) + 1  # like ms-swift: another order than training's
        sampler = EpochSampler(upstream, lambda: 0)
        samples = []
        last = min(self._num_added + count, self._batch * self.max_resample_times)
        while self._num_added < last:
            number, first = divmod(self._num_added, self._batch)
            round_, position = self._rounds.added(number)
            end = min(self._batch, first + last - self._num_added)
            indices = sampler.batch(*divmod(position, sampler.num_batches))
            wanted = indices[first * self.num_generations : end * self.num_generations]
            samples += self._named(self.rows_of(wanted), round_, first)
            self._num_added += end - first
        return samples

    def rows_of(self, indices: Sequence[int]) -> list[Any]:
        """Return this rank's share of the data set's rows with these indices."""
        share = len(indices) // self.ranks.size
        start = share * self.ranks.rank
        return [self.train_dataset[i] for i in indices[start : start + share]]

    def _named(self, rows: list[Any], round_: RoundId, first: int) -> list[RolloutSample]:
        """Return this rank's rows as samples with ids; all ranks' groups count from `first`."""
        if self.template.truncation_strategy == "raise":
            rows = self.replace_failing(rows, round_, first)
        samples: list[RolloutSample] = self.to_samples(rows)
        self._set_ids(samples, len(samples) * self.ranks.rank, round_, first)
        return samples

    def _timed(self, samples: list[RolloutSample]) -> list[RolloutSample]:
        began = perf_counter()
        samples = self._generate_completions(samples)
        self._generating_seconds = perf_counter() - began
        return samples

    # --- the kept groups ---

    def own_share(self, samples: list[RolloutSample], values: torch.Tensor) -> list[list[float]]:
        """Return this rank's part of all ranks' rewards, [samples][functions]."""
        # Sizes differ from those in `_add_prompt_id_to_inputs` if a scheduler has made several
        # samples of one.
        start = sum(self.ranks.all_gather(len(samples))[: self.ranks.rank])
        return list(values[start : start + len(samples)].tolist())

    def _compute_rewards_per_func(self, samples: list[RolloutSample]) -> torch.Tensor:
        began = perf_counter()
        values = super()._compute_rewards_per_func(samples)
        self._scoring_seconds = perf_counter() - began
        # Record these scores now: groups of equal rewards are dropped next.
        if self.dynamic_sample and self.model.training:
            self._rewards.generated(samples, self.own_share(samples, values))
        return values

    def _dynamic_sampling(
        self, samples: list[RolloutSample], rewards_per_func: torch.Tensor
    ) -> tuple[list[RolloutSample], torch.Tensor]:
        """Return this rank's share of the samples to train on, and all ranks' rewards [samples,
        functions]. If too few groups have unequal rewards, train on the batch, like ms-swift."""
        scored = self._scored_groups(samples, rewards_per_func)
        while len(kept := unequal(scored)) < self._batch:
            more = self._next_added(self._waves.further(self._batch - len(kept)))
            if not more:
                logger.warning(
                    f"--max_resample_times {self.max_resample_times}: {len(kept)} of "
                    f"{len(scored)} groups have unequal rewards, fewer than a batch of "
                    f"{self._batch}. The step trains on the groups of its own round."
                )
                kept = [*scored.values()]
                break
            more = self._timed(more)
            scored |= self._scored_groups(more, self._compute_rewards_per_func(more))
        trained = [*chain.from_iterable(kept[: self._batch])]
        shares = get_even_process_data(self, [each.sample for each in trained])
        return shares, torch.stack([each.values for each in trained])

    def _scored_groups(
        self, samples: list[RolloutSample], values: torch.Tensor
    ) -> dict[SampleId, list[Scored]]:
        """Return all ranks' samples of a wave by group, in the order of their ids."""
        # All ranks use the first rank's seconds, so that their next waves have equal sizes.
        seconds = self._generating_seconds, self._scoring_seconds
        samples_of_ranks, (seconds, *_) = zip(
            *self.ranks.all_gather((samples, seconds)), strict=True
        )
        rewards = (values * self.reward_weights).nansum(1).tolist()
        scored = map(Scored, chain(*samples_of_ranks), values, rewards)
        in_order = sorted(scored, key=lambda each: each.sample.sample_id)
        groups = {
            name: list(group)
            for name, group in groupby(in_order, lambda each: each.sample.sample_id.group_id)
        }
        self._waves.record(len(unequal(groups)), len(groups), *seconds)
        return groups


def unequal(groups: Mapping[SampleId, list[Scored]]) -> list[list[Scored]]:
    """Return the groups with unequal rewards. If a conversation made several samples, the reward of
    the last one counts, like in ms-swift."""
    kept = []
    for group in groups.values():
        rewards = {each.sample.request_id: each.reward for each in group}
        if min(rewards.values()) < max(rewards.values()):
            kept.append(group)
    return kept
