"""Names rounds by the optimizer step at which a round begins, and its number in that step.

A name depends only on the number of training batches before the round. A resumed run therefore
names its rounds like the uninterrupted run, even from the middle of a round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swift_grpo_ext.sampling.seeding import RoundId, SampleId

if TYPE_CHECKING:
    from swift.rlhf_trainers import GRPOConfig


def sample_ids_at(
    round_: RoundId, positions: Iterable[int], group_size: int, *, first_group: int = 0
) -> list[SampleId]:
    """Return the ids of samples from their positions in the generation batch, over all ranks
    (docs/promises.md, G1). `first_group` is the number of the batch's first group: an evaluation
    numbers groups over its batches, so that seeds do not depend on the batch size."""
    return [
        SampleId(**round_._asdict(), group=first_group + p // group_size, index=p % group_size)
        for p in positions
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundClock:
    """Turns counts of training batches into names of rounds, and optimizer steps into counts."""

    batches_per_step: int  # `gradient_accumulation_steps`
    batches_per_round: int  # `steps_per_generation * num_iterations`: training batches of a round
    batches_per_epoch: int  # a multiple of `batches_per_round`; the last step may have fewer
    max_resamples: int = 0  # rounds that dynamic sampling may add to one round

    @classmethod
    def of(cls, args: GRPOConfig, num_rows: int, sequence_parallel_size: int) -> RoundClock:
        """Return the clock of a training, from `args` as ms-swift's trainer has adjusted them."""
        # Count like ms-swift (4.6, grpo_trainer.py, `_prepare_inputs`): ranks that share sequences
        # process the samples of all these ranks one after the other.
        per_round = args.steps_per_generation * sequence_parallel_size * args.num_iterations
        num_rounds = num_rows // (args.generation_batch_size // args.num_generations)
        return cls(
            batches_per_step=args.gradient_accumulation_steps,
            batches_per_round=per_round,
            # Rows that do not fill a generation batch are left out. With fewer rows than one batch,
            # an epoch is one round.
            batches_per_epoch=max(num_rounds, 1) * per_round,
            max_resamples=args.max_resample_times if args.dynamic_sample else 0,
        )

    def batches_at(self, step: int) -> int:
        """Return how many training batches were taken before optimizer step `step`."""
        epochs, steps = divmod(step, self._steps_per_epoch)
        return epochs * self.batches_per_epoch + steps * self.batches_per_step

    def epoch_of_step(self, step: int) -> int:
        return step // self._steps_per_epoch

    def generation_batch_before(self, batch: int) -> tuple[int, int]:
        """Return the epoch and number of the generation batch that precedes the one of training
        batch `batch`. The first one is preceded by the last of epoch 0."""
        rounds_per_epoch = self.batches_per_epoch // self.batches_per_round
        epoch, number = divmod(batch // self.batches_per_round - 1, rounds_per_epoch)
        return max(epoch, 0), number

    def round_at(self, batch: int) -> RoundId:
        """Return the round that serves training batch `batch`, counted over all epochs from 0."""
        epoch, batch_in_epoch = divmod(batch, self.batches_per_epoch)
        first = batch_in_epoch - batch_in_epoch % self.batches_per_round
        step = first // self.batches_per_step
        # A round begins at each multiple of `batches_per_round`: count those before the step.
        rounds_before = -(-step * self.batches_per_step // self.batches_per_round)
        number = first // self.batches_per_round - rounds_before
        return RoundId("train", epoch * self._steps_per_epoch + step, number)

    @property
    def _steps_per_epoch(self) -> int:
        return -(-self.batches_per_epoch // self.batches_per_step)


class RoundNames:
    """Names the rounds of a run as they begin. An evaluation is one round, in several batches."""

    def __init__(self, clock: RoundClock) -> None:
        self.clock = clock
        self.current = RoundId("train", 0, 0)
        self._evaluation = RoundId("eval", -1, 0)  # before the first
        self._first_group = 0  # of an evaluation's next batch

    def begin_training(self, batch: int, *, ahead: bool = False) -> None:
        """Begin the round that serves training batch `batch`, or `ahead` of it the next one."""
        batch += self.clock.batches_per_round if ahead else 0
        self.current = self.clock.round_at(batch)

    def added(self, number: int) -> tuple[RoundId, int]:
        """Return the name of the round that dynamic sampling adds to the current one as the
        `number`-th, and the number of its batch in the order of resampling."""
        clock, (_, step, regular) = self.clock, self.current
        # Reserve as many numbers as each regular round may need, after those of regular rounds: a
        # resumed run cannot know how often earlier rounds were resampled.
        regular_rounds = -(-clock.batches_per_step // clock.batches_per_round)  # of a step, at most
        added = regular * clock.max_resamples + number
        position = step * regular_rounds * clock.max_resamples + added
        return RoundId("train", step, regular_rounds + added), position

    def begin_evaluation(self, step: int) -> None:
        """Begin an evaluation of one data set; a step may have several."""
        number = self._evaluation.number + 1 if step == self._evaluation.step else 0
        self._evaluation, self._first_group = RoundId("eval", step, number), 0

    def upcoming(self, *, training: bool) -> tuple[RoundId, int]:
        """Return the round that is about to be generated, and the first group of its batch."""
        return (self.current, 0) if training else (self._evaluation, self._first_group)

    def take_batch(self, num_groups: int, *, training: bool) -> tuple[RoundId, int]:
        """Return the result of `upcoming`, and advance an evaluation to its next batch."""
        taken = self.upcoming(training=training)
        if not training:
            self._first_group += num_groups
        return taken
