"""A group is one request, whichever ranks have its samples, and each rank gets its own samples (G1,
G2, G3, S2, S6). Samples have every column of the data set, and the turns of their conversations
(R1, V1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.protocol import RolloutInferRequest, UsageInfo, serialize_ndarray
from swift.rl_core.data import GRPOSample

from swift_grpo_ext.media.pictures import Picture, picture_of
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import answer_of, to_rollout_output
from swift_grpo_ext.rollout.conversation import (
    Conversation,
    Turn,
    attach_turns,
    name_server,
    read_turns,
    write_turns,
)
from swift_grpo_ext.rollout.generate import RolloutSettings, begin_turn, generate, plan_requests
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata, WireError
from swift_grpo_ext.sampling.rounds import sample_ids_at
from swift_grpo_ext.sampling.seeding import RoundId, SampleId, sample_seed
from swift_grpo_ext.training.trainer import RolloutGRPOTrainer
from tests.rig.arguments import training_arguments
from tests.rig.ranks import ThreadRanks, run_rank_groups

RUN_SEED = 42
COMPLETION = Completion(
    text="two",
    token_ids=[5, 6, 7],
    logprobs=[-0.5, -1.0, -0.25],
    finish_reason="stop",
    stop_reason="o",
    seed=9,
    replica="replica 1",
)
PROMPT = Prompt([1, 2], np.arange(6, dtype=np.int32).reshape(3, 2))


def sample_id(group: int, index: int) -> SampleId:
    return SampleId(phase="train", step=3, number=1, group=group, index=index)


def test_every_sample_is_asked_for_once_by_its_group() -> None:
    """If rows of a group differ, each sample is a request: vLLM counts a request's seeds up."""
    rows = ["a", "aab", "", "bbccb", "cdd"]
    ids = iter(sample_ids_at(RoundId("train", 3, 1), range(12), 3))
    requests, uneven = plan_requests([[(next(ids), row) for row in of_rank] for of_rank in rows])
    assert [(request.first, request.owners) for request in requests] == [
        (sample_id(0, 0), [(0, 0), (1, 0), (1, 1)]),
        (sample_id(1, 0), [(1, 2), (3, 0), (3, 1)]),
        *((sample_id(2, index), [(3, 2 + index)]) for index in range(3)),
        *((sample_id(3, index), [(4, index)]) for index in range(3)),
    ]
    assert uneven == [sample_id(2, 0), sample_id(3, 0)]


# --- rounds over ranks ---

Sample = tuple[int, int, str]  # group, index in the group, and the row's one letter


class Round:
    """A round over ranks, whose engine answers with the prompt's letter and the sample's seed as
    text. Rank `refusing` cannot make its rows; the engine may fail, or leave out samples."""

    def __init__(
        self,
        *samples_of_ranks: Sequence[Sample],
        refusing: int | None = None,
        error: Exception | None = None,
        left_out: int = 0,
    ) -> None:
        self.requests: list[tuple[str, SampleId, int]] = []
        self.made: list[tuple[int, int]] = []  # rank and position of each row that was made
        self._of_ranks, self._refusing = samples_of_ranks, refusing
        self._error, self._left_out = error, left_out

    def outcomes(self) -> list[Any]:
        """Return each rank's texts and uneven groups, or its error."""
        return run_rank_groups(len(self._of_ranks), self._work)

    def _work(self, ranks: ThreadRanks) -> Any:
        samples = self._of_ranks[ranks.rank]

        def request(position: int) -> RolloutInferRequest:
            self.made.append((ranks.rank, position))
            if ranks.rank == self._refusing:
                raise OSError("no such image")
            row = samples[position][2]
            return RolloutInferRequest(messages=[{"role": "user", "content": row}])

        try:
            outputs, uneven = generate(
                [sample_id(group, index) for group, index, _ in samples],
                [row for _, _, row in samples],
                make_request=request,
                make_metadata=RolloutSettings(training_arguments()).metadata,
                engine_ranks=ranks,
                call_engine=self._call_engine,
            )
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return [output.response.choices[0].message.content for output in outputs], uneven

    def _call_engine(
        self, requests: list[RolloutInferRequest], metadatas: list[RequestMetadata]
    ) -> list[Answer]:
        if self._error:
            raise self._error
        answers = []
        for request, metadata in zip(requests, metadatas, strict=True):
            assert wire.read_metadata(request.data_dict) == metadata
            row = request.messages[0]["content"]
            self.requests.append((row, metadata.sample_id, metadata.count))
            seeds = [metadata.seed_of(k) for k in range(metadata.count - self._left_out)]
            samples = [replace(COMPLETION, text=f"{row}{seed}") for seed in seeds]
            answers.append(Answer(samples, Prompt([1, 2])))
        return answers


def test_a_group_over_two_ranks_is_one_request_of_rank_0() -> None:
    """Each rank gets its own samples. The first rank of a request makes its row."""
    samples_of_ranks = [
        [(0, 0, "a"), (0, 1, "a")],
        [(0, 2, "a"), (1, 0, "b")],
        [(1, 1, "b"), (1, 2, "x")],
    ]
    one = Round(*samples_of_ranks)
    expected = [
        [f"{row}{sample_seed(RUN_SEED, sample_id(group, index))}" for group, index, row in samples]
        for samples in samples_of_ranks
    ]
    assert one.outcomes() == [(texts, [sample_id(1, 0)]) for texts in expected]
    assert one.requests == [
        ("a", sample_id(0, 0), 3),
        *((row, sample_id(1, index), 1) for index, row in enumerate("bbx")),
    ]
    assert sorted(one.made) == [(0, 0), (1, 1), (2, 0), (2, 1)]


FEW = "train round 3.1, group 0, sample 0: the request was for 2 samples, and 1 came back."


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (
            {"refusing": 1},
            ["RolloutError: Requests could not be made. rank 1: OSError: no such image"] * 2,
        ),
        ({"error": ConnectionError("gone")}, ["ConnectionError: gone", "RolloutError: gone"]),
        ({"left_out": 1}, [f"ValueError: {FEW}", f"RolloutError: {FEW}"]),
    ],
)
def test_a_failure_ends_the_round_on_every_rank(faults: Any, expected: list[str]) -> None:
    assert Round([(0, 0, "a"), (0, 1, "a")], [(1, 0, "a")], **faults).outcomes() == expected


def test_a_first_turn_is_the_sample_and_a_later_one_counts_on() -> None:
    """The request of turn 3 comes with the metadata of turn 2; one without is refused."""
    first: Any = SimpleNamespace(sample_id=sample_id(0, 0))
    assert begin_turn(first, None) == sample_id(0, 0)
    request = RolloutInferRequest(messages=[])
    with pytest.raises(ValueError, match=r"--multi_turn_scheduler mine: its `step` returned "):
        begin_turn(request, "mine")
    metadata = RolloutSettings(training_arguments()).metadata(sample_id(0, 0))
    wire.write_metadata(request.data_dict, metadata)
    turns = [begin_turn(request, None) for _ in range(3)]
    assert turns == [replace(sample_id(0, 0), turn=turn) for turn in (1, 2, 3)]
    assert wire.read_metadata(request.data_dict) == replace(metadata, sample_id=turns[-1])


def test_a_completion_becomes_what_the_trainer_reads() -> None:
    arrays = {"token_ids": np.array([5, 6, 7]), "logprobs": np.array([-0.5, -1.0, -0.25])}
    answer = Answer([replace(COMPLETION, **arrays)], PROMPT)
    output = to_rollout_output(answer)
    [choice] = output.response.choices
    assert {type(i) for i in choice.token_ids} == {int}  # rank 0 hands a server's arrays on
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "two")
    assert (choice.finish_reason, choice.token_ids) == ("stop", [5, 6, 7])
    assert (choice.logprobs, choice.routed_experts) == (None, None)
    assert output.rollout_logprobs == [[-0.5, -1.0, -0.25]]
    assert output.rollout_infos == {"seed": 9, "replica": "replica 1", "stop_reason": "o"}
    assert output.response.prompt_token_ids == [1, 2]
    assert output.response.usage == UsageInfo(2, 3, 5)
    assert answer_of(output) is answer
    experts = np.arange(6).reshape(3, 2)
    bare = replace(COMPLETION, logprobs=None, routed_experts=serialize_ndarray(experts))
    output = to_rollout_output(Answer([bare], PROMPT))
    assert output.rollout_logprobs == []
    assert np.array_equal(output.response.choices[0].routed_experts, experts)


# --- turns ---

CROP = Image.effect_noise((40, 30), 60).convert("RGB")
SEVEN, PICTURE = Picture("七.png"), picture_of(CROP)


def note(
    conversation: Conversation,
    *contents: Any,
    images: Any = (),
    completion: Completion = COMPLETION,
) -> None:
    """Record a turn that is asked with these messages."""
    roles = ("user", "assistant", "user", "assistant", "assistant")
    pairs = zip(roles, contents, strict=False)
    asked = RolloutInferRequest(messages=[{"role": role, "content": c} for role, c in pairs])
    asked.images = [*images]
    number = len(conversation.turns)
    turn = Turn(replace(sample_id(2, 0), turn=number), PROMPT, completion, f"print {number}")
    conversation.record(asked, replace(turn, engine_seconds=1.0, tool_seconds=2.0))


def shown(conversation: Conversation) -> list[tuple[list[Any], list[Picture]]]:
    """Return the contents and the media that each turn added."""
    return [([m["content"] for m in turn.messages], turn.media) for turn in conversation.turns]


def test_each_turn_shows_what_was_added_for_it() -> None:
    conversation = Conversation()
    note(conversation, "<image>?", images=["七.png"])
    note(conversation, "<image>?", "3", "<image>no", images=["七.png", CROP])
    # ms-swift leaves an empty answer for a template to go on from.
    note(conversation, "<image>?", "3", "<image>no", "4, but", "", images=["七.png", CROP])
    # A scheduler that starts over with fewer messages.
    note(conversation, "<image>!", images=[CROP])
    assert shown(conversation) == [
        (["<image>?"], [SEVEN]),
        (["<image>no"], [PICTURE]),
        ([], []),
        (["<image>!"], [PICTURE]),
    ]
    assert PICTURE.webp is not None
    # Media in parts are media: the record does not have their content as text.
    note(in_parts := Conversation(), first := [{"type": "image", "image": "七.png"}])
    later = [{"type": "text", "text": "Look: "}, {"type": "image", "image": CROP}]
    note(in_parts, first, "3", later)
    assert shown(in_parts) == [(["<image>"], [SEVEN]), (["Look: <image>"], [PICTURE])]


def test_a_sample_has_what_its_conversations_end_says() -> None:
    """Seed and replica are the last answer's. A turn without room has none, and no stop."""
    note(conversation := Conversation(), "?")
    no_room = replace(COMPLETION, token_ids=[], stop_reason=None, seed=8)
    note(conversation, "?", "3", "no", completion=no_room)
    for is_conversation, infos in (
        (True, {"num_turns": 2, "seed": 9, "replica": "replica 1", "stop_reason": None}),
        (False, {"num_turns": 2}),
    ):
        sample = RolloutSample(messages=[], rollout_infos={"num_turns": 2})
        attach_turns(sample, conversation.turns, is_conversation=is_conversation)
        assert [prompt.token_ids for prompt in sample.rollout_prompts] == [[1, 2]]
        assert sample.rollout_infos == infos


def test_turns_come_from_a_server_as_they_were() -> None:
    """Turns of another version are refused."""
    conversation = Conversation()
    note(conversation, "<image>?", images=["七.png"])
    note(conversation, "<image>?", "3", "<image>no", images=["七.png", CROP])
    output = to_rollout_output(Answer([COMPLETION], PROMPT))
    plain = dict(output.rollout_infos)
    message = conversation.turns[1].messages[0]
    message["found"] = {7}  # a scheduler may put any object into a message
    write_turns(output, conversation.turns)
    message["found"] = "{7}"
    output.rollout_infos = json.loads(json.dumps(output.rollout_infos))  # as HTTP carries them
    name_server(output, "server 1 (http://a)")
    other = deepcopy(output)
    for came, was in zip(read_turns(output, run_seed=42), conversation.turns, strict=True):
        assert list(came.completion.token_ids) == [5, 6, 7]
        assert came.completion.seed == sample_seed(42, was.sample_id)
        assert came.completion.replica == "server 1 (http://a) replica 1"
        assert came.prompt.token_ids == PROMPT.token_ids
        assert np.array_equal(came.prompt.positions, PROMPT.positions)
        assert replace(came, completion=COMPLETION, prompt=PROMPT) == was
    assert output.rollout_infos == plain
    assert read_turns(output, run_seed=42) == []  # a server without us
    other.rollout_infos["swift_grpo_ext.turns"]["version"] = 1
    with pytest.raises(WireError, match=r"server 1 .* speaks version 1 of swift-grpo-ext's"):
        read_turns(other, run_seed=42)


ROW = {
    "messages": [{"role": "user", "content": "Which digit?"}],
    **{"sample_id": 12, "prompt_hash": "a", "rollout_prompts": ["b"]},
}


def test_columns_stay_columns_whatever_they_are_called() -> None:
    [sample] = RolloutGRPOTrainer.to_samples(RolloutGRPOTrainer, [ROW])
    assert type(sample) is RolloutSample
    assert sample.to_reward_row() == GRPOSample.from_row(ROW).to_reward_row()
    assert not hasattr(sample, "sample_id")
    assert not sample.rollout_prompts
    sample.sample_id = sample_id(2, 0)
    assert vars(deepcopy(sample)) == vars(sample)
