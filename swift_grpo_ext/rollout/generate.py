"""Generates a rollout: makes one request for each group, and assigns completions to samples.

Each rank makes the requests that begin with one of its samples. Requests, with their images, go
only to ranks that call an engine, and samples only to their own rank.
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
    """The settings of a run's requests."""

    def __init__(self, args: RolloutGRPOConfig) -> None:
        self._args = args
        # Whether we make the requests: one for each group, with a seed for each sample.
        self.generates = bool(args.use_vllm and args.rollout_seed_mode == "sample")
        self.run_seed = args.seed if self.generates else None

    def metadata(
        self, sample_id: SampleId, count: int = 1, *, as_arrays: bool = False
    ) -> RequestMetadata:
        """Return the metadata of a request for `count` samples from `sample_id` on."""
        return RequestMetadata(
            sample_id=sample_id,
            count=count,
            run_seed=self.run_seed,
            as_arrays=as_arrays,
            stop_token_ids=tuple(self._args.stop_token_ids),
            include_stop_str_in_output=self._args.include_stop_str_in_output,
        )


def begin_turn(sample: RolloutSample | RolloutInferRequest, scheduler: str | None) -> SampleId:
    """Return the id of a sample, or of a scheduler's request for a later turn. Raise `ValueError`
    for a request without metadata."""
    if not isinstance(sample, RolloutInferRequest):
        return sample.sample_id
    metadata = wire.read_metadata(sample.data_dict)
    if metadata is None:
        raise ValueError(
            f"--multi_turn_scheduler {scheduler}: its `step` returned a "
            f"request without `data_dict['{wire.KEY}']`, from which its seed is made. Return "
            "the request that it received, or a copy with the same `data_dict`."
        )
    metadata = metadata.next_turn()
    # Write it back for the turn after: a scheduler returns this request, or a copy of it.
    wire.write_metadata(sample.data_dict, metadata)
    return metadata.sample_id


class GroupRequest(NamedTuple):
    """A request for consecutive samples of one group with the same prompt."""

    first: SampleId
    owners: list[tuple[int, int]]  # each sample's rank, and its position on that rank


def plan_requests(
    samples_of_ranks: Sequence[Sequence[tuple[SampleId, str]]],
) -> tuple[list[GroupRequest], list[SampleId]]:
    """Return the fewest requests for all ranks' samples, and the groups with several prompts.
    `samples_of_ranks` has the id and prompt hash of each sample.

    A group that spans ranks becomes one request (docs/promises.md, G2). If prompts of a group
    differ (by a custom sampler, or a gym), each of its samples becomes its own request (G3).
    """
    prompts = defaultdict[SampleId, set[str]](set)
    for sample_id, prompt in chain.from_iterable(samples_of_ranks):
        prompts[sample_id.group_id].add(prompt)
    requests: list[GroupRequest] = []
    upcoming = None  # the next sample that could join the last request
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
    engine_ranks: RankGroup,
    call_engine: CallEngine,
) -> tuple[list[RolloutOutput], list[SampleId]]:
    """Return the outputs of this rank's samples, in order, and the groups with several prompts.
    All ranks that share an engine call it together; if one fails, all raise.

    `make_request` takes a sample's position. `make_metadata` takes a request's first sample and its
    number of samples. `call_engine` answers requests with metadata, on ranks that drive an engine.

    Raises:
        RolloutError: another rank failed, or a request could not be made.
        ValueError: an engine returned another number of samples than a request has.
    """
    # A rank that fails still takes part in all collectives: the others would wait for it for
    # --ddp_timeout (18,000,000 s in ms-swift 4.6).
    samples_of_ranks = engine_ranks.all_gather(list(zip(sample_ids, prompt_hashes, strict=True)))
    # Every rank computes the same plan from the same input.
    requests, uneven = plan_requests(samples_of_ranks)

    rows: list[RolloutInferRequest] | str
    try:
        firsts = [request.owners[0] for request in requests]
        rows = [make_request(position) for rank, position in firsts if rank == engine_ranks.rank]
    except Exception as e:  # the rank that drives the engine waits for rows, and raises this
        rows = f"rank {engine_ranks.rank}: {type(e).__name__}: {e}"
    rows_of_ranks = engine_ranks.gather(rows)

    samples: list[list[Answer | None]] | Exception | None = None
    if engine_ranks.drives_engine:
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
            samples = e  # `scatter` raises it: the other ranks wait for their share
    share = engine_ranks.scatter(samples)
    # Each rank builds the outputs of its own samples, to spare rank 0 the work for all.
    return [to_rollout_output(answer) for answer in share], uneven
