"""Yields prompts in ms-swift's order, computed from the epoch.

TRL's `RepeatSampler` draws each epoch's permutation from one generator. A resumed run makes a new
generator, and repeats the order of the first epoch (trl 0.29, trainer/utils.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

if TYPE_CHECKING:
    from trl.trainer.utils import RepeatSampler


class EpochSampler(Sampler[int]):
    """Yields the indices that an uninterrupted `RepeatSampler` with the settings of `upstream`
    would yield. `epoch` returns the epoch of an iteration, from 0."""

    def __init__(self, upstream: RepeatSampler, epoch: Callable[[], int]) -> None:
        self._upstream, self._epoch = upstream, epoch
        # Generation batches of an epoch; rows that do not fill one are left out.
        self.num_batches: int = upstream.num_samples // upstream.batch_size

    def __len__(self) -> int:
        return len(self._upstream)

    def __iter__(self) -> Iterator[int]:
        for rows in self._batches(self._epoch()).tolist():
            # The loader yields a round's rows for each training batch that it serves.
            yield from rows * self._upstream.repeat_count

    def batch(self, epoch: int, batch: int) -> list[int]:
        """Return the indices of one generation batch's rows, each repeated for its group."""
        return list(self._batches(epoch)[batch].tolist())

    def _batches(self, epoch: int) -> torch.Tensor:
        """Return the indices of an epoch's rows [generation batches, samples]."""
        upstream = self._upstream
        order = torch.arange(upstream.num_samples)
        if upstream.shuffle:
            generator = torch.Generator().manual_seed(upstream.seed or 0)
            for _ in range(epoch + 1):  # the epochs before draw from the same generator
                order = torch.randperm(upstream.num_samples, generator=generator)
        prompts = order[: self.num_batches * upstream.batch_size].view(-1, upstream.batch_size)
        return prompts.repeat_interleave(upstream.mini_repeat_count, dim=1)
