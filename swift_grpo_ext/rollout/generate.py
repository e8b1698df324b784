"""One rollout: samples become requests by groups, and completions return to their samples.

Each rank names the samples that it needs, makes the rows of the requests that begin with one of
them, and gets its own samples back. A row, with its images, travels only to a rank that calls an
engine, and a sample only to its own rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swift.infer_engine.protocol import RolloutInferRequest, RolloutOutput

from swift_grpo_ext.ranks import RankGroup, RolloutError
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import to_rollout_output
from swift_grpo_ext.rollout.wire import Answer, RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId

if TYPE_CHECKING:
    from swift_grpo_ext.config import RolloutGRPOConfig
    from swift_grpo_ext.rollout.sample import RolloutSample


class RolloutSettings:
    """What a run's flags say of its requests."""

    def __init__(self, args: RolloutGRPOConfig) -> None:
        self._args = args
        # Rounds are generated our way, with a seed for each sample and a request for each group;
        # without, requests and seeds are ms-swift's (`--rollout_seed_mode engine`, no vLLM).
        self.generates = bool(args.use_vllm and args.rollout_seed_mode == "sample")
        self.run_seed = args.seed if self.generates else None

    def metadata(
        self, sample_id: SampleId, count: int = 1, *, as_arrays: bool = False
    ) -> RequestMetadata:
        """Return the metadata of a request for `count` samples, the first of them `sample_id`."""
        return RequestMetadata(
            sample_id=sample_id,
            count=count,
            run_seed=self.run_seed,
            as_arrays=as_arrays,
            stop_token_ids=tuple(self._args.stop_token_ids),
            include_stop_str_in_output=self._args.include_stop_str_in_output,
        )


def begin_turn(sample: RolloutSample | RolloutInferRequest, scheduler: str | None) -> SampleId:
    """Return the id of a sample, or of the turn that begins of a multi-turn conversation.

    A later turn comes as a request, whose metadata is moved on to that turn.

    Args:
        scheduler: `--multi_turn_scheduler`, for the error.

    Raises:
        ValueError: a scheduler made a request without metadata.
    """
    if not isinstance(sample, RolloutInferRequest):
        return sample.sample_id
    metadata = wire.read_metadata(sample.data_dict)
    if metadata is None:
        raise ValueError(
            f"--multi_turn_scheduler {scheduler}: its `step` returned a "
            f"request without `data_dict['{wire.KEY}']`, from which its seed is made. Return "
            "the request that it was given, or a copy with the same `data_dict`."
        )
    metadata = metadata.next_turn()
    # The turn after this one is counted from here: a scheduler passes the request on, or a copy.
    wire.write_metadata(sample.data_dict, metadata)
    return metadata.sample_id


# --- groups to requests, completions to samples ---


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """One request: samples of one group that follow one another and share a prompt."""

    first: SampleId
    """The first sample; the others have the indices that follow."""

    owners: list[tuple[int, int]]
    """For each sample, in order, the rank that needs it and its position on that rank."""


def plan_requests(
    samples_of_ranks: Sequence[Sequence[tuple[SampleId, str]]],
) -> tuple[list[GroupRequest], list[SampleId]]:
    """Return the fewest requests for all ranks' samples, and the groups whose rows differ.

    A group that ranks share becomes one request (docs/promises.md, G2). Prompts are compared only
    to keep rows that differ out of one (G3): where those of a group differ (a custom sampler's, or
    a gym's), each of its samples becomes a request of its own.

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
    upcoming = None  # the sample that the last request would go on with
    for rank, samples in enumerate(samples_of_ranks):
        for position, (sample_id, _) in enumerate(samples):
            if sample_id == upcoming and sample_id.group_id not in uneven:
                requests[-1].owners.append((rank, position))
            else:
                requests.append(GroupRequest(first=sample_id, owners=[(rank, position)]))
            upcoming = replace(sample_id, index=sample_id.index + 1)
    return requests, list(uneven)


CallEngine = Callable[
    [list[RolloutInferRequest], list[RequestMetadata]],
    Sequence[Answer],
]
"""Gives an engine, or servers, requests with their metadata; returns each request's answer."""


def generate(
    sample_ids: Sequence[SampleId],
    prompt_hashes: Sequence[str],
    *,
    make_request: Callable[[int], RolloutInferRequest],
    make_metadata: Callable[[SampleId, int], RequestMetadata],
    sharing: RankGroup,
    call_engine: CallEngine,
) -> tuple[list[RolloutOutput], list[SampleId]]:
    """Return the outputs of this rank's samples, in their order, and the groups whose rows differ.

    All ranks that share an engine call it together. A failure of one is raised on each of them.

    Args:
        sample_ids: the samples that this rank needs.
        prompt_hashes: for each sample, the hash of its prompt.
        make_request: makes the request of the sample at a position; called once for each request.
        make_metadata: makes the metadata of a request for so many samples, the first one named.
        sharing: the ranks that share an engine with this one.
        call_engine: called on the ranks that drive an engine.

    Raises:
        RolloutError: another rank failed, or a request could not be made.
        ValueError: an engine returned another number of samples than it was asked for.
    """
    # The ranks meet three times, at `all_gather`, `gather` and `scatter`. Each of them gets there,
    # whatever fails on it in between: others would wait for it as long as --ddp_timeout says,
    # 18,000,000 s by default in ms-swift 4.6.
    samples_of_ranks = sharing.all_gather(list(zip(sample_ids, prompt_hashes, strict=True)))
    # Every rank makes the same plan of the same names, so that no plan has to travel.
    requests, uneven = plan_requests(samples_of_ranks)

    # The rank of a request's first sample makes its row, with the images.
    rows: dict[int, RolloutInferRequest] | str = {}
    try:
        owners = enumerate(request.owners[0] for request in requests)
        rows = {i: make_request(at) for i, (rank, at) in owners if rank == sharing.rank}
    except Exception as e:  # raised by the rank that drives the engine: it waits for these rows
        rows = f"rank {sharing.rank}: {type(e).__name__}: {e}"
    rows_of_ranks = sharing.gather(rows)

    samples: list[list[Answer | None]] | Exception | None = None
    if sharing.drives_engine:
        samples = [[None] * len(rank_samples) for rank_samples in samples_of_ranks]
        try:
            failures = [failure for failure in rows_of_ranks if isinstance(failure, str)]
            if failures:
                raise RolloutError(f"Requests could not be made. {'; '.join(failures)}")
            by_number: dict[int, RolloutInferRequest] = {}
            for rank_rows in rows_of_ranks:
                by_number |= rank_rows if isinstance(rank_rows, dict) else {}
            in_order = [by_number[i] for i in range(len(requests))]
            metadatas = [make_metadata(r.first, len(r.owners)) for r in requests]
            for row, metadata in zip(in_order, metadatas, strict=True):
                wire.write_metadata(row.data_dict, metadata)
            answers = call_engine(in_order, metadatas)
            for request, answer in zip(requests, answers, strict=True):
                if len(answer.completions) != len(request.owners):
                    raise ValueError(
                        f"{request.first}: the request was for {len(request.owners)} samples, and "
                        f"{len(answer.completions)} came back."
                    )
                owned = zip(request.owners, answer.completions, strict=True)
                for (rank, position), completion in owned:
                    samples[rank][position] = Answer([completion], answer.prompt)
        except Exception as e:
            samples = e  # not raised yet: the other ranks wait for their share
    share = sharing.scatter(samples)
    # Each rank makes the outputs of its own samples: rank 0 would make a whole round's alone.
    return [to_rollout_output(answer) for answer in share], uneven
