"""One rollout: samples become requests by groups, and completions return to their samples.

Each rank names the samples that it needs, makes the rows of the requests that begin with one of
them, and gets its own samples back. A row, with its images, travels only to a rank that calls an
engine, and a sample only to its own rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatMessage,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
    deserialize_ndarray,
)

from swift_grpo_ext.ranks import RankGroup, RolloutError
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.wire import Completion, Numbers, Prompt, RequestMetadata
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.stops.templates import StoppedChoice, record_stop_reason
from swift_grpo_ext.upstream.encoding import tool_calls

if TYPE_CHECKING:
    from swift.template import Template

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


class ServedSample(NamedTuple):
    """A sample as rank 0 read it from a server; the rank that it belongs to makes its output."""

    completion: Completion
    prompt: Prompt


CallEngine = Callable[
    [list[RolloutInferRequest], list[RequestMetadata]],
    Sequence[list[RolloutOutput] | list[ServedSample]],
]
"""Gives an engine, or servers, requests with their metadata; returns each request's samples."""


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

    samples: list[list[Any]] | Exception | None = None
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
                if len(answer) != len(request.owners):
                    raise ValueError(
                        f"{request.first}: the request was for {len(request.owners)} samples, and "
                        f"{len(answer)} came back."
                    )
                for (rank, position), sample in zip(request.owners, answer, strict=True):
                    samples[rank][position] = sample
        except Exception as e:
            samples = e  # not raised yet: the other ranks wait for their share
    share = sharing.scatter(samples)
    # Each rank makes the outputs of its own samples: rank 0 would make a whole round's alone.
    return [to_rollout_output(*s) if isinstance(s, ServedSample) else s for s in share], uneven


# --- outputs in the form that ms-swift's trainer reads ---


@dataclass
class PromptResponse(ChatCompletionResponse):
    """A response that says where its prompt's tokens stood (`Prompt.positions`)."""

    prompt_positions: NDArray[np.int32] | None = None


@dataclass
class GroupResponse(PromptResponse):
    """The samples of one request, without ms-swift's dictionary for each token."""

    completions: list[Completion] = field(default_factory=list)


@dataclass
class NamedResponse(ChatCompletionResponse):
    """ms-swift's response to another client's request, and who drew it with which seed: choice k
    with `seed + k`."""

    seed: int | None = None
    replica: str = ""


def to_rollout_outputs(
    output: RolloutOutput, metadata: RequestMetadata, replica: str
) -> list[RolloutOutput]:
    """Return an engine's output for one request as one output for each of its samples."""
    response = output.response
    if isinstance(response, GroupResponse):
        prompt = Prompt(response.prompt_token_ids or [], response.prompt_positions)
        named = [replace(completion, replica=replica) for completion in response.completions]
        return [to_rollout_output(completion, prompt) for completion in named]
    # The engine of `--use_vllm false`, which `selftest` asks, answers in ms-swift's form, and so
    # does a server to another client, which may have seeds of its own.
    outputs = []
    first = output.rollout_infos.get("seed", metadata.seed)
    for choice in response.choices:
        infos = {"seed": None if first is None else first + choice.index, "replica": replica}
        single = replace(response, choices=[replace(choice, index=0)])
        outputs.append(record_stop_reason(RolloutOutput(response=single, rollout_infos=infos)))
    return outputs


def to_rollout_output(completion: Completion, prompt: Prompt) -> RolloutOutput:
    """Return one sample; reward functions see its seed and replica in `rollout_infos`."""
    num_prompt, num_tokens = len(prompt.token_ids), len(completion.token_ids)
    choice = StoppedChoice(
        index=0,
        message=ChatMessage(role="assistant", content=completion.text),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        token_ids=_as_list(completion.token_ids),
        routed_experts=deserialize_ndarray(completion.routed_experts),
    )
    response = PromptResponse(
        model="",
        choices=[choice],
        usage=UsageInfo(num_prompt, num_tokens, num_prompt + num_tokens),
        prompt_token_ids=prompt.token_ids,
        prompt_positions=prompt.positions,
    )
    logprobs = [values] if (values := _as_list(completion.logprobs)) else []
    infos = {"seed": completion.seed, "replica": completion.replica}
    output = RolloutOutput(response=response, rollout_logprobs=logprobs, rollout_infos=infos)
    return record_stop_reason(output)


def give_to_scheduler(output: RolloutOutput, template: Template, tools: Any) -> None:
    """Put into an output's choice what ms-swift's schedulers read there: log-probabilities with
    their tokens, and tool calls.

    Args:
        tools: of the row.
    """
    [choice] = output.response.choices
    if output.rollout_logprobs:
        [logprobs] = output.rollout_logprobs
        pairs = zip(choice.token_ids or (), logprobs, strict=True)
        decode = template.tokenizer.decode
        choice.logprobs = {"content": [{"token": decode([i]), "logprob": p} for i, p in pairs]}
    choice.message.tool_calls = tool_calls(template, choice.message.content, tools)


def _as_list(numbers: Numbers | None) -> list[Any]:
    # ms-swift asks whether there are token ids by their truth (rl_core/data.py); arrays have none.
    return numbers if isinstance(numbers, list) else [] if numbers is None else numbers.tolist()
