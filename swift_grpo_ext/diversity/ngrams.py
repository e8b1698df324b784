"""n-grams of token ids, counted once for all statistics that need them. Pure.

Token ids, not words: they need no tokenizer for each language, and are what the policy draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from swift_grpo_ext.diversity.drawn import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramCounts:
    """How often each sample holds each n-gram, for one n.

    Entries are sorted by n-gram, then by sample, so that the entries of one n-gram in one group
    stand together: a run.
    """

    order: int
    """n."""

    group_of: Ints
    """[samples], the number of each sample's group; not decreasing."""

    ngram: Ints
    """[entries]"""

    sample: Ints
    """[entries]"""

    count: Ints
    """[entries], 1 or more."""

    def totals(self) -> Ints:
        """n-grams of each sample, repetitions included, [samples]."""
        return np.bincount(self.sample, self.count, len(self.group_of)).astype(np.int64)

    def run_starts(self) -> Ints:
        """First entry of each run, [runs]."""
        group = self.group_of[self.sample]
        is_first = np.ones(len(group), bool)
        is_first[1:] = (self.ngram[1:] != self.ngram[:-1]) | (group[1:] != group[:-1])
        return np.flatnonzero(is_first)

    def distinct_of_groups(self, num_groups: int) -> Ints:
        """Different n-grams in each group, [groups]."""
        return np.bincount(self.group_of[self.sample[self.run_starts()]], minlength=num_groups)

    def clipped_matches(self) -> Floats:
        """Of each sample's n-grams, those that another of its group holds too, [samples].

        BLEU's clipped count with the rest of the group as references (Papineni et al. 2002).
        """
        if not len(self.count):
            return np.zeros(len(self.group_of))
        starts = self.run_starts()
        run = np.repeat(np.arange(len(starts)), np.diff([*starts, len(self.count)]))
        most = np.maximum.reduceat(self.count, starts)
        is_most = self.count == most[run]
        alone = np.add.reduceat(is_most.astype(np.int64), starts) == 1
        second = np.maximum.reduceat(np.where(is_most, 0, self.count), starts)
        others = np.where(is_most & alone[run], second[run], most[run])
        clipped = np.minimum(self.count, others)
        return np.bincount(self.sample, clipped, len(self.group_of)).astype(float)

    def unit_vectors(self) -> sparse.csr_matrix:
        """Counts as rows of length 1, [samples, n-grams + 1].

        A sample without any n-gram gets the last column to itself, so that it is like its kind and
        unlike all others.
        """
        num_samples = len(self.group_of)
        num_ngrams = int(self.ngram[-1]) + 1 if len(self.ngram) else 0
        norms = np.sqrt(np.bincount(self.sample, self.count.astype(float) ** 2, num_samples))
        none = np.flatnonzero(norms == 0)
        values = np.concatenate([self.count / norms[self.sample], np.ones(len(none))])
        rows = np.concatenate([self.sample, none])
        columns = np.concatenate([self.ngram, np.full(len(none), num_ngrams)])
        return sparse.csr_matrix((values, (rows, columns)), (num_samples, num_ngrams + 1))


def count_ngrams(
    tokens: Sequence[Ints], group_of: Sequence[int], max_order: int
) -> Iterator[NgramCounts]:
    """Counts for n = 1 to `max_order`.

    Args:
        tokens: of each sample.
        group_of: the number of each sample's group, not decreasing.
    """
    groups = np.asarray(group_of, np.int64)
    lengths = np.array([len(ids) for ids in tokens], np.int64)
    flat = np.concatenate([np.zeros(0, np.int64), *tokens])
    sample = np.repeat(np.arange(len(tokens)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(flat))  # tokens to the end
    vocabulary, first = np.unique(flat, return_inverse=True)
    number = first
    for order in range(1, max_order + 1):
        if order > 1:  # an n-gram is an (n-1)-gram and the token behind it
            number = number[:-1] * len(vocabulary) + first[order - 1 :]
            number = np.unique(number, return_inverse=True)[1]
        whole = left[: len(number)] >= order
        keys = number[whole] * len(tokens) + sample[: len(number)][whole]
        entries, counts = np.unique(keys, return_counts=True)
        ngram, owner = np.divmod(entries, max(len(tokens), 1))
        yield NgramCounts(order=order, group_of=groups, ngram=ngram, sample=owner, count=counts)
