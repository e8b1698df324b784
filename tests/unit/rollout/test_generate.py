"""One rollout over ranks: its requests with their metadata, and the samples of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutInferRequest,
    RolloutOutput,
    UsageInfo,
    serialize_ndarray,
)

from swift_grpo_ext.ranks import RankGroup, RolloutError
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import answer_of, to_rollout_output
from swift_grpo_ext.rollout.generate import RolloutSettings, begin_turn, generate, plan_requests
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata
from swift_grpo_ext.sampling.rounds import sample_ids_at
from swift_grpo_ext.sampling.seeding import RoundId, SampleId, sample_seed
from tests.rig.arguments import training_arguments
from tests.rig.ranks import ThreadRanks, run_rank_groups

RUN_SEED = 42
ROUND = RoundId("train", 3, 1)
FIRST = SampleId(phase="train", step=3, number=1, group=0, index=0)


def sample_id(group: int, index: int) -> SampleId:
    return replace(FIRST, group=group, index=index)


# --- samples to requests (G1 to G3) ---


def test_every_sample_is_asked_for_once_by_its_group() -> None:
    """Whichever ranks have its samples. If rows of a group differ, each sample is a request (S2,
    S6: vLLM counts a request's seeds up)."""
    rows = ["a", "aab", "", "bbccb", "cdd"]
    ids = iter(sample_ids_at(ROUND, range(12), 3))
    requests, uneven = plan_requests([[(next(ids), row) for row in of_rank] for of_rank in rows])
    assert [(request.first, request.owners) for request in requests] == [
        (sample_id(0, 0), [(0, 0), (1, 0), (1, 1)]),
        (sample_id(1, 0), [(1, 2), (3, 0), (3, 1)]),
        (sample_id(2, 0), [(3, 2)]),
        (sample_id(2, 1), [(3, 3)]),
        (sample_id(2, 2), [(3, 4)]),
        (sample_id(3, 0), [(4, 0)]),
        (sample_id(3, 1), [(4, 1)]),
        (sample_id(3, 2), [(4, 2)]),
    ]
    assert uneven == [sample_id(2, 0), sample_id(3, 0)]


# --- rounds over ranks ---


def request_of(content: str) -> RolloutInferRequest:
    return RolloutInferRequest(messages=[{"role": "user", "content": content}])


def generate_samples(
    samples: Sequence[tuple[int, int]],
    rows: str,
    sharing: Any,
    call_engine: Any,
    make_request: Callable[[int], RolloutInferRequest],
) -> tuple[list[Any], list[SampleId]]:
    """Return the texts of a rank's samples (group, index), and the uneven groups.

    `rows` has one letter for each sample.
    """
    outputs, uneven = generate(
        [sample_id(*sample) for sample in samples],
        list(rows),
        make_request=make_request,
        make_metadata=lambda first, count: RequestMetadata(
            sample_id=first, count=count, run_seed=RUN_SEED, as_arrays=True
        ),
        engine_ranks=sharing,
        call_engine=call_engine,
    )
    return [output.response.choices[0].message.content for output in outputs], uneven


class RecordingEngine:
    """Answers each request as a server does, with the prompt's letter and the sample's seed as
    text; keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, SampleId, int]] = []

    def __call__(
        self, requests: list[RolloutInferRequest], metadatas: list[RequestMetadata]
    ) -> list[Answer]:
        for request, metadata in zip(requests, metadatas, strict=True):
            assert wire.read_metadata(request.data_dict) == metadata
            content = request.messages[0]["content"]
            self.requests.append((content, metadata.sample_id, metadata.count))
        return [
            Answer(
                [
                    completion(text=f"{r.messages[0]['content']}{m.seed_of(k)}")
                    for k in range(m.count)
                ],
                Prompt([1, 2]),
            )
            for r, m in zip(requests, metadatas, strict=True)
        ]


def test_a_group_over_two_ranks_is_one_request_of_rank_0() -> None:
    """Each rank gets its own samples. The first rank of a request makes its row. Rows that differ
    within a group are separate requests."""
    engine = RecordingEngine()
    made: list[tuple[int, int]] = []
    samples_of_ranks = [[(0, 0), (0, 1)], [(0, 2), (1, 0)], [(1, 1), (1, 2)]]
    rows_of_ranks = ["aa", "ab", "bx"]

    def work(ranks: ThreadRanks) -> Any:
        def request(position: int) -> RolloutInferRequest:
            made.append((ranks.rank, position))
            return request_of(rows_of_ranks[ranks.rank][position])

        samples, rows = samples_of_ranks[ranks.rank], rows_of_ranks[ranks.rank]
        return generate_samples(samples, rows, ranks, engine, request)

    outputs = run_rank_groups(3, work)
    assert engine.requests == [
        ("a", sample_id(0, 0), 3),
        *((row, sample_id(1, index), 1) for index, row in enumerate("bbx")),
    ]
    assert sorted(made) == [(0, 0), (1, 1), (2, 0), (2, 1)]
    expected = [
        [
            f"{row}{sample_seed(RUN_SEED, sample_id(*sample))}"
            for row, sample in zip(rows, samples, strict=True)
        ]
        for rows, samples in zip(rows_of_ranks, samples_of_ranks, strict=True)
    ]
    assert [texts for texts, _ in outputs] == expected
    assert [uneven for _, uneven in outputs] == [[sample_id(1, 0)]] * 3


@pytest.mark.parametrize("fault", ["row", "engine"])
def test_a_failure_ends_the_round_on_every_rank(fault: str) -> None:
    """Rank 1 cannot make its row, or rank 0's engine fails."""
    engine = RecordingEngine()

    def work(ranks: ThreadRanks) -> str:
        def request(position: int) -> RolloutInferRequest:
            if fault == "row" and ranks.rank == 1:
                raise OSError("no such image")
            return request_of("a")

        def is_gone(*_: Any) -> Any:
            raise ConnectionError("server 1 is gone")

        call = is_gone if fault == "engine" else engine
        with pytest.raises((ConnectionError, RolloutError)) as failed:
            generate_samples([(ranks.rank, 0)], "a", ranks, call, request)
        return f"{failed.typename}: {failed.value}"

    row = "RolloutError: Requests could not be made. rank 1: OSError: no such image"
    gone = ["ConnectionError: server 1 is gone", "RolloutError: server 1 is gone"]
    assert run_rank_groups(2, work) == ([row] * 2 if fault == "row" else gone)
    assert engine.requests == []


def test_an_engine_that_answers_with_too_few_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"group 0, sample 0: .* 2 samples, and 1 came back"):
        generate_samples(
            [(0, 0), (0, 1)],
            "aa",
            RankGroup(),
            lambda r, m: [Answer([completion()], Prompt([1]))],
            lambda _: request_of("a"),
        )


# --- settings and turns ---


@pytest.mark.parametrize(
    ("changes", "run_seed"),
    [({}, 42), ({"rollout_seed_mode": "engine"}, None), ({"use_vllm": False}, None)],
)
def test_settings_of_a_run(changes: dict[str, Any], run_seed: int | None) -> None:
    stops = {"stop_token_ids": [7, 8], "include_stop_str_in_output": False}
    found = RolloutSettings(training_arguments(**stops, **changes))
    assert found.generates == (run_seed is not None)
    assert found.metadata(sample_id(0, 1), 3, as_arrays=True) == RequestMetadata(
        sample_id=sample_id(0, 1),
        count=3,
        run_seed=run_seed,
        as_arrays=True,
        stop_token_ids=(7, 8),
        include_stop_str_in_output=False,
    )


def test_a_first_turn_is_the_sample_and_a_later_one_counts_on() -> None:
    """The request of turn 3 comes with the metadata of turn 2."""
    first: Any = SimpleNamespace(sample_id=sample_id(0, 0))
    assert begin_turn(first, None) == sample_id(0, 0)
    request = RolloutInferRequest(messages=[])
    metadata = RolloutSettings(training_arguments()).metadata(sample_id(0, 0))
    wire.write_metadata(request.data_dict, metadata)
    turns = [begin_turn(request, None) for _ in range(3)]
    assert turns == [replace(sample_id(0, 0), turn=turn) for turn in (1, 2, 3)]
    last = wire.read_metadata(request.data_dict)
    assert last is not None
    assert (last.sample_id, last.seed_of(0)) == (turns[-1], sample_seed(42, turns[-1]))


def test_a_scheduler_that_makes_its_own_request_is_refused() -> None:
    message = r"--multi_turn_scheduler mine: its `step` returned .* the same `data_dict`"
    with pytest.raises(ValueError, match=message):
        begin_turn(RolloutInferRequest(messages=[]), "mine")


# --- outputs in ms-swift's form ---


def completion(**fields: Any) -> Completion:
    values = {
        **{"text": "two", "token_ids": [5, 6, 7], "logprobs": [-0.5, -1.0, -0.25]},
        **{"finish_reason": "stop", "stop_reason": "o", "seed": 9, "replica": "replica 1"},
    }
    return Completion(**(values | fields))


def test_a_completion_becomes_what_the_trainer_reads() -> None:
    positions = np.zeros((3, 2), dtype=np.int32)
    served = completion(token_ids=np.array([5, 6, 7]), logprobs=np.array([-0.5, -1.0, -0.25]))
    output = to_rollout_output(Answer([served], Prompt([1, 2], positions)))
    [choice] = output.response.choices
    assert {type(i) for i in choice.token_ids} == {int}  # rank 0 hands a server's arrays on
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "two")
    assert (choice.finish_reason, choice.token_ids) == ("stop", [5, 6, 7])
    assert (choice.logprobs, choice.routed_experts) == (None, None)
    assert output.rollout_logprobs == [[-0.5, -1.0, -0.25]]
    assert output.rollout_infos == {"seed": 9, "replica": "replica 1", "stop_reason": "o"}
    assert output.response.prompt_token_ids == [1, 2]
    assert answer_of(output) == ([served], Prompt([1, 2], positions))
    assert output.response.usage == UsageInfo(2, 3, 5)
    experts = np.arange(6).reshape(3, 2)
    served = completion(logprobs=None, routed_experts=serialize_ndarray(experts))
    output = to_rollout_output(Answer([served], Prompt([1])))
    assert output.rollout_logprobs == []
    assert np.array_equal(output.response.choices[0].routed_experts, experts)


def test_an_upstream_response_has_a_completion_for_each_choice() -> None:
    """As a server answers another client; log-probabilities of other tokens are none."""
    content = {"content": [{"logprob": -0.5}]}
    choices = [
        ChatCompletionResponseChoice(1, ChatMessage("assistant", "a"), "stop", content, [5]),
        ChatCompletionResponseChoice(0, ChatMessage("assistant", "b"), "length", content, [5, 6]),
    ]
    response = ChatCompletionResponse("m", choices, UsageInfo(1, 2, 3), prompt_token_ids=[1])
    infos = {"seed": 9, "replica": "replica 1", "stop_reason": "o"}
    answer = answer_of(RolloutOutput(response=response, rollout_infos=infos))
    assert answer.prompt == Prompt([1])
    first, second = answer.completions
    assert first == completion(text="a", token_ids=[5], logprobs=[-0.5], seed=10)
    assert (second.seed, second.logprobs, second.finish_reason) == (9, None, "length")
    [unseeded, _] = answer_of(RolloutOutput(response=response)).completions
    assert (unseeded.seed, unseeded.replica, unseeded.stop_reason) == (None, "", None)
