"""The order of prompts: ms-swift's, as a function of the epoch, so that a resumed run meets it.

TRL's `RepeatSampler` draws each epoch's permutation from a generator that it made itself. A resumed
run makes a new one, and meets the first epoch's order in every epoch (trl 0.29, trainer/utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from trl.trainer.utils import RepeatSampler


class EpochSampler(Sampler[int]):
    """Yields what an uninterrupted `RepeatSampler` would, in the epoch that `epoch` names.

    Args:
        upstream: the `RepeatSampler` whose settings are taken over; a seed of None counts as 0.
        epoch: says which epoch is about to be iterated, from 0; asked at each iteration.
    """

    def __init__(self, upstream: RepeatSampler, epoch: Callable[[], int]) -> None:
        self._num_rows = upstream.num_samples
        self._group_size = upstream.mini_repeat_count
        self._prompts = upstream.batch_size
        # A round serves so many training batches; the loader yields its rows for each of them.
        self._repeats = upstream.repeat_count
        self._seed = (upstream.seed or 0) if upstream.shuffle else None
        self._epoch = epoch
        self.num_batches = int(self._num_rows // self._prompts)
        """Number of generation batches in an epoch; rows that do not fill one are left out."""

    def __len__(self) -> int:
        return self.num_batches * self._prompts * self._group_size * self._repeats

    def __iter__(self) -> Iterator[int]:
        order = self._order(self._epoch())
        for batch in range(self.num_batches):
            yield from self._batch(order, batch) * self._repeats

    def batch(self, epoch: int, batch: int) -> list[int]:
        """Return the indices of one generation batch's rows, each repeated for its group."""
        return self._batch(self._order(epoch), batch)

    def _batch(self, order: torch.Tensor, batch: int) -> list[int]:
        prompts = order[batch * self._prompts : (batch + 1) * self._prompts].tolist()
        return [index for index in prompts for _ in range(self._group_size)]

    def _order(self, epoch: int) -> torch.Tensor:
        if self._seed is None:
            return torch.arange(self._num_rows)
        generator = torch.Generator().manual_seed(self._seed)
        for _ in range(epoch):  # one generator draws all epochs: earlier ones have to be drawn too
            torch.randperm(self._num_rows, generator=generator)
        return torch.randperm(self._num_rows, generator=generator)
