"""Which requests ask for which samples. Pure.

Groups are positional (docs/promises.md, G1): the order in which the sampler repeats prompts makes
them. Prompts are compared only to keep rows that differ out of one request (G3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.sampling.seeding import SampleId


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """One request: samples of one group that follow one another and share a prompt."""

    first: SampleId
    """The first sample; the others have the indices that follow."""

    owners: list[tuple[int, int]]
    """For each sample, in order, the rank that needs it and its position on that rank."""

    @property
    def count(self) -> int:
        """Number of samples: vLLM's `n`."""
        return len(self.owners)


def sample_ids_at(round_: Round, positions: Iterable[int], group_size: int) -> list[SampleId]:
    """Return the ids of samples from their positions in the generation batch.

    Args:
        positions: count over all training ranks, from 0.
    """
    return [
        SampleId(
            phase=round_.phase,
            step=round_.step,
            number=round_.number,
            group=round_.first_group + position // group_size,
            index=position % group_size,
        )
        for position in positions
    ]


def plan_requests(
    samples_of_ranks: Sequence[Sequence[tuple[SampleId, str]]],
) -> tuple[list[GroupRequest], list[SampleId]]:
    """Return the fewest requests for all ranks' samples, and the groups whose rows differ.

    A group that ranks share becomes one request. Where the rows of a group differ (a custom
    sampler's, or a gym's), each of its samples becomes a request of its own.

    Args:
        samples_of_ranks: for each rank, the ids of its samples and their prompts' hashes, in order.

    Returns:
        The requests in the order of ranks and samples, and the ids of the uneven groups.
    """
    prompts: dict[SampleId, set[str]] = {}
    for samples in samples_of_ranks:
        for sample_id, prompt in samples:
            prompts.setdefault(sample_id.group_id, set()).add(prompt)
    uneven = {group: None for group, hashes in prompts.items() if len(hashes) > 1}  # in order
    requests: list[GroupRequest] = []
    for rank, samples in enumerate(samples_of_ranks):
        for position, (sample_id, _) in enumerate(samples):
            last = requests[-1] if requests else None
            follows = last is not None and sample_id == last.first.following(last.count)
            if last is not None and follows and sample_id.group_id not in uneven:
                last.owners.append((rank, position))
            else:
                requests.append(GroupRequest(first=sample_id, owners=[(rank, position)]))
    return requests, list(uneven)
