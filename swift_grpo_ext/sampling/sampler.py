"""The order of prompts: ms-swift's, as a function of the epoch.

TRL's `RepeatSampler` draws each epoch's permutation from a generator that it made itself. A resumed
run makes a new one, and begins with the first epoch's order again (trl 0.29, trainer/utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from trl.trainer.utils import RepeatSampler


class EpochSampler(Sampler[int]):
    """Yields what an uninterrupted `RepeatSampler` with the settings of `upstream` would. Each
    iteration asks `epoch` for its epoch, from 0."""

    def __init__(self, upstream: RepeatSampler, epoch: Callable[[], int]) -> None:
        self._num_rows = upstream.num_samples
        self._group_size = upstream.mini_repeat_count
        self._prompts = upstream.batch_size
        # The loader yields a round's rows for each training batch that it serves.
        self._repeats = upstream.repeat_count
        self._seed = (upstream.seed or 0) if upstream.shuffle else None
        self._epoch = epoch
        # Generation batches of an epoch; rows that do not fill one are left out.
        self.num_batches: int = self._num_rows // self._prompts

    def __len__(self) -> int:
        return self.num_batches * self._prompts * self._group_size * self._repeats

    def __iter__(self) -> Iterator[int]:
        for prompts in self._batches(self._epoch()):
            yield from prompts.repeat_interleave(self._group_size).tolist() * self._repeats

    def batch(self, epoch: int, batch: int) -> list[int]:
        """Return the indices of one generation batch's rows, each repeated for its group."""
        return list(self._batches(epoch)[batch].repeat_interleave(self._group_size).tolist())

    def _batches(self, epoch: int) -> torch.Tensor:
        order = torch.arange(self._num_rows)
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed)
            for _ in range(epoch + 1):  # the epochs before draw from the same generator
                order = torch.randperm(self._num_rows, generator=generator)
        return order[: self.num_batches * self._prompts].view(self.num_batches, self._prompts)
