"""One rollout: samples become requests by groups, and completions return to their samples.

Each rank makes the rows of the requests that begin with one of its samples. A row, with its images,
travels only to a rank that calls an engine, and a sample only to its own rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

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
    """The settings of a run's requests, from its flags."""

    def __init__(self, args: RolloutGRPOConfig) -> None:
        self._args = args
        # A seed for each sample and a request for each group; else both are ms-swift's.
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
    """Return the id of a sample, or of the later turn that a scheduler's request asks for; raise a
    `ValueError` for a request without metadata."""
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
    # The next turn counts from here: a scheduler passes the request on, or a copy.
    wire.write_metadata(sample.data_dict, metadata)
    return metadata.sample_id


class GroupRequest(NamedTuple):
    """Samples of one group that follow one another and share a prompt."""

    first: SampleId
    owners: list[tuple[int, int]]  # for each sample a rank, and the sample's position on that rank


def plan_requests(
    samples_of_ranks: Sequence[Sequence[tuple[SampleId, str]]],
) -> tuple[list[GroupRequest], list[SampleId]]:
    """Return the fewest requests for all ranks' samples, and the groups with several prompts.
    `samples_of_ranks` has the samples' ids and their prompts' hashes.

    A group that ranks share becomes one request (docs/promises.md, G2). Where prompts of a group
    differ (a custom sampler's, or a gym's), each of its samples becomes a request of its own (G3).
    """
    prompts = defaultdict[SampleId, set[str]](set)
    for sample_id, prompt in chain.from_iterable(samples_of_ranks):
        prompts[sample_id.group_id].add(prompt)
    requests: list[GroupRequest] = []
    upcoming = None  # the sample that the last request would go on with
    # Ranks may have samples of several rounds (`training/resampling.py`).
    in_order = sorted(
        (sample_id, rank, position)
        for rank, samples in enumerate(samples_of_ranks)
        for position, (sample_id, _) in enumerate(samples)
    )
    for sample_id, rank, position in in_order:
        if sample_id == upcoming and len(prompts[sample_id.group_id]) == 1:
            requests[-1].owners.append((rank, position))
        else:
            requests.append(GroupRequest(sample_id, [(rank, position)]))
        upcoming = replace(sample_id, index=sample_id.index + 1)
    return requests, [group for group, hashes in prompts.items() if len(hashes) > 1]


CallEngine = Callable[[list[RolloutInferRequest], list[RequestMetadata]], Sequence[Answer]]


def generate(
    sample_ids: Sequence[SampleId],
    prompt_hashes: Sequence[str],
    *,
    make_request: Callable[[int], RolloutInferRequest],
    make_metadata: Callable[[SampleId, int], RequestMetadata],
    sharing: RankGroup,
    call_engine: CallEngine,
) -> tuple[list[RolloutOutput], list[SampleId]]:
    """Return the outputs of this rank's samples, in their order, and the groups with several
    prompts. All ranks that share an engine call it together; one rank's failure is raised on each.

    `make_request` makes the request of the sample at a position, `make_metadata` a request's
    metadata from its first sample and their number. `call_engine` answers requests with metadata,
    on the ranks that drive an engine.

    Raises:
        RolloutError: another rank failed, or a request could not be made.
        ValueError: an engine returned another number of samples than a request has.
    """
    # The ranks meet at `all_gather`, `gather` and `scatter`. A rank that failed in between gets
    # there too: others would wait for it for --ddp_timeout (18,000,000 s in ms-swift 4.6).
    samples_of_ranks = sharing.all_gather(list(zip(sample_ids, prompt_hashes, strict=True)))
    # Every rank makes the same plan of the same names.
    requests, uneven = plan_requests(samples_of_ranks)

    rows: list[RolloutInferRequest] | str
    try:
        firsts = [request.owners[0] for request in requests]
        rows = [make_request(position) for rank, position in firsts if rank == sharing.rank]
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
            rows_left = [iter(rows) for rows in rows_of_ranks if not isinstance(rows, str)]
            in_order = [next(rows_left[request.owners[0][0]]) for request in requests]
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
