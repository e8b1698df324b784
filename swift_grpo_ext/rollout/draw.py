"""One rollout: samples become requests by groups, and outputs return to their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatMessage,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
    deserialize_ndarray,
)

from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.engine import PackedResponse
from swift_grpo_ext.rollout.rank_group import RankGroup, RolloutError
from swift_grpo_ext.rollout.wire import Completion, Numbers, RequestMetadata
from swift_grpo_ext.sampling.groups import (
    RequestPlan,
    make_slices,
    plan_requests,
    split_by_rank,
)
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.stops.templates import StoppedChoice, record_stop_reason


class ServedSample(NamedTuple):
    """A sample as rank 0 read it; the rank that it belongs to makes its output."""

    completion: Completion
    prompt_token_ids: list[int]


Sample: TypeAlias = RolloutOutput | ServedSample
Generate = Callable[[list[RolloutInferRequest], list[RequestMetadata]], Sequence[list[Sample]]]
"""Calls an engine: requests and their metadata to one list of samples each."""


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """The samples that this rank needs, and how to request them."""

    sample_ids: Sequence[SampleId]
    fingerprints: Sequence[str]
    """Of the samples' rows."""

    request: Callable[[int], RolloutInferRequest]
    """Makes the request of the sample with that number on this rank; one call for each request."""

    metadata: Callable[[SampleId, int], RequestMetadata]
    """Of a request for so many samples, the first of them named."""

    grouped: bool
    """Whether a group may be one request."""


def draw(
    rank_batch: RankBatch, rank_group: RankGroup, generate: Generate
) -> tuple[list[RolloutOutput], list[SampleId]]:
    """The outputs of this rank's samples, in their order, and the groups whose rows differ.

    Raises:
        RolloutError: another rank failed to generate.
        ValueError: an engine returned another number of samples than the plan has.
    """
    slices = make_slices(rank_batch.sample_ids, rank_batch.fingerprints)
    plan = plan_requests(rank_group.all_gather(slices), grouped=rank_batch.grouped)
    rows_of_ranks = rank_group.gather(_rows(rank_batch, plan, rank_group.rank))
    outputs: list[list[Sample]] | Exception | None = None
    if rank_group.drives_engine:
        try:
            outputs = _generate(rank_batch, plan, rows_of_ranks, generate)
        except Exception as e:
            outputs = e  # not raised yet: the other ranks wait for their share
    own = rank_group.scatter(outputs)
    return [to_rollout_output(*s) if isinstance(s, ServedSample) else s for s in own], plan.unequal


def _rows(
    rank_batch: RankBatch, plan: RequestPlan, rank: int
) -> dict[int, RolloutInferRequest] | str:
    """This rank's rows, by the number of their slice. A failure comes back as text instead: the
    other ranks wait for the rows."""
    counts = (group_slice.count for group_slice in plan.slices_of_ranks[rank])
    first_samples = list(accumulate(counts, initial=0))
    own = (request.slices[0] for request in plan.requests if request.slices[0][0] == rank)
    try:
        return {number: rank_batch.request(first_samples[number]) for _, number in own}
    except Exception as e:
        return f"rank {rank}: {type(e).__name__}: {e}"


def _generate(
    rank_batch: RankBatch, plan: RequestPlan, rows_of_ranks: list[Any], generate: Generate
) -> list[list[Sample]]:
    failures = [rows for rows in rows_of_ranks if isinstance(rows, str)]
    if failures:
        raise RolloutError(f"Requests could not be made. {'; '.join(failures)}")
    rows = [rows_of_ranks[rank][number] for rank, number in (r.slices[0] for r in plan.requests)]
    slices = [request.group_slice for request in plan.requests]
    metadatas = [rank_batch.metadata(part.sample_id, part.count) for part in slices]
    for row, metadata in zip(rows, metadatas, strict=True):
        wire.write_metadata(row.data_dict, metadata)
    return split_by_rank(plan.requests, generate(rows, metadatas), plan.slices_of_ranks)


def to_rollout_outputs(
    output: RolloutOutput, metadata: RequestMetadata, replica: str
) -> list[RolloutOutput]:
    """A colocated engine's output for one request, as one output for each of its samples."""
    response = output.response
    if isinstance(response, PackedResponse):
        ids = response.prompt_token_ids or []
        return [to_rollout_output(replace(c, replica=replica), ids) for c in response.completions]
    return [
        record_stop_reason(
            RolloutOutput(
                response=replace(response, choices=[replace(choice, index=0)]),
                rollout_infos=_infos(metadata.seed_of(choice.index), replica),
            )
        )
        for choice in response.choices
    ]


def to_rollout_output(completion: Completion, prompt_token_ids: list[int]) -> RolloutOutput:
    """One sample in the form that ms-swift's trainer reads."""
    num_prompt, num_tokens = len(prompt_token_ids), len(completion.token_ids)
    choice = StoppedChoice(
        index=0,
        message=ChatMessage(role="assistant", content=completion.text),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        token_ids=_as_list(completion.token_ids),
        routed_experts=deserialize_ndarray((completion.extra or {}).get("routed_experts")),
    )
    response = ChatCompletionResponse(
        model="",
        choices=[choice],
        usage=UsageInfo(num_prompt, num_tokens, num_prompt + num_tokens),
        prompt_token_ids=prompt_token_ids,
    )
    logprobs = [values] if (values := _as_list(completion.logprobs)) else []
    infos = _infos(completion.seed, completion.replica)
    output = RolloutOutput(response=response, rollout_logprobs=logprobs, rollout_infos=infos)
    return record_stop_reason(output)


def _as_list(numbers: Numbers | None) -> list[Any]:
    return numbers if isinstance(numbers, list) else [] if numbers is None else numbers.tolist()


def _infos(seed: int | None, replica: str) -> dict[str, Any]:
    """A sample's origin, which reward functions see in `rollout_infos`."""
    return {"seed": seed, "replica": replica}
