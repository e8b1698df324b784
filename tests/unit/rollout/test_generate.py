"""A group is one request, whichever ranks have its samples, and each rank gets its own samples (G1,
G2, G3, S2, S6). Samples have the turns of their conversations (V1)."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    RolloutInferRequest,
    UsageInfo,
    serialize_ndarray,
)

from swift_grpo_ext.media.pictures import Picture, picture_of
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.rollout.answers import answer_of, to_rollout_output
from swift_grpo_ext.rollout.conversation import (
    Conversation,
    Conversations,
    Turn,
    attach_turns,
    between_turns,
    name_server,
    read_turns,
    servers_turns,
    write_turns,
)
from swift_grpo_ext.rollout.generate import RolloutSettings, begin_turn, generate
from swift_grpo_ext.rollout.sample import RolloutSample
from swift_grpo_ext.rollout.wire import Answer, Completion, Prompt, RequestMetadata, WireError
from swift_grpo_ext.sampling.rounds import sample_ids_at
from swift_grpo_ext.sampling.seeding import RoundId, SampleId, sample_seed
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


Sample = tuple[SampleId, str]  # the row is one letter


def row_of(sample: Sample) -> RolloutInferRequest:
    return RolloutInferRequest(messages=[{"role": "user", "content": sample[1]}])


def play(samples_of_ranks: Sequence[list[Sample]], make_row: Any, call_engine: Any) -> list[Any]:
    """Return each rank's texts and uneven groups, or its error."""

    def work(ranks: ThreadRanks) -> Any:
        samples = samples_of_ranks[ranks.rank]
        try:
            outputs, uneven = generate(
                [name for name, _ in samples],
                [row for _, row in samples],
                make_request=lambda position: make_row(samples[position]),
                make_metadata=RolloutSettings(training_arguments()).metadata,
                engine_ranks=ranks,
                call_engine=call_engine,
            )
        except Exception as e:
            return f"{type(e).__name__}: {e}"
        return [output.response.choices[0].message.content for output in outputs], uneven

    return run_rank_groups(len(samples_of_ranks), work)


def test_every_sample_is_asked_for_once_by_its_group() -> None:
    """The first rank of a request makes its row, and each rank gets its own samples. If rows of a
    group differ, each sample is a request: vLLM counts a request's seeds up."""
    made: list[Sample] = []
    asked: list[tuple[SampleId, str, int]] = []

    def make_row(sample: Sample) -> RolloutInferRequest:
        made.append(sample)
        return row_of(sample)

    def echo(row: RolloutInferRequest, metadata: RequestMetadata) -> Answer:
        assert wire.read_metadata(row.data_dict) == metadata
        letter, seeds = row.messages[0]["content"], map(metadata.seed_of, range(metadata.count))
        asked.append((metadata.sample_id, letter, metadata.count))
        return Answer([replace(COMPLETION, text=f"{letter}{seed}") for seed in seeds], PROMPT)

    ids = iter(sample_ids_at(RoundId("train", 3, 1), range(12), 3))
    rows = ["a", "aab", "", "bbccb", "cdd"]
    samples_of_ranks = [[(next(ids), row) for row in of_rank] for of_rank in rows]
    uneven = [sample_id(2, 0), sample_id(3, 0)]
    assert play(samples_of_ranks, make_row, lambda *asked: [*map(echo, *asked)]) == [
        ([f"{row}{sample_seed(RUN_SEED, name)}" for name, row in samples], uneven)
        for samples in samples_of_ranks
    ]
    assert asked == [
        *((sample_id(group, 0), row, 3) for group, row in enumerate("ab")),
        *((sample_id(2, index), row, 1) for index, row in enumerate("ccb")),
        *((sample_id(3, index), row, 1) for index, row in enumerate("cdd")),
    ]
    assert sorted(made) == [(name, row) for name, row, _ in asked]


@pytest.mark.parametrize("fault", ["row", "engine", "answers"])
def test_a_failure_ends_the_round_on_every_rank(fault: str) -> None:
    def make_row(sample: Sample) -> RolloutInferRequest:
        if fault == "row" and sample[1] == "b":
            raise OSError("no such image")
        return row_of(sample)

    def call_engine(*_: Any) -> list[Answer]:
        if fault == "engine":
            raise ConnectionError("gone")
        return [Answer([COMPLETION], PROMPT)] * 2

    few = "train round 3.1, group 0, sample 0: the request was for 2 samples, and 1 came back."
    expected = {
        "row": ["RolloutError: Requests could not be made. rank 1: OSError: no such image"] * 2,
        "engine": ["ConnectionError: gone", "RolloutError: gone"],
        "answers": [f"ValueError: {few}", f"RolloutError: {few}"],
    }
    samples_of_ranks = [[(sample_id(0, 0), "a"), (sample_id(0, 1), "a")], [(sample_id(1, 0), "b")]]
    assert play(samples_of_ranks, make_row, call_engine) == expected[fault]


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
    # ms-swift's own engine has log-probabilities in dictionaries.
    choice.logprobs = {"content": [{"logprob": p} for p in arrays["logprobs"].tolist()]}
    theirs = ChatCompletionResponse("m", [choice], UsageInfo(2, 3, 5), prompt_token_ids=[1, 2])
    lists = {name: values.tolist() for name, values in arrays.items()}
    expected = Answer([replace(COMPLETION, **lists)], Prompt([1, 2]))
    assert answer_of(output.model_copy(update={"response": theirs})) == expected
    experts = np.arange(6).reshape(3, 2)
    bare = replace(COMPLETION, logprobs=None, routed_experts=serialize_ndarray(experts))
    output = to_rollout_output(Answer([bare], PROMPT))
    assert output.rollout_logprobs == []
    assert np.array_equal(output.response.choices[0].routed_experts, experts)


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


def test_each_turn_shows_what_was_added_for_it_on_each_side() -> None:
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

    # A server's turns come as they were; those of another version are refused.
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


def test_turns_have_the_names_of_their_row() -> None:
    """A server's images have no names; without the plugin it sends the last turn only."""
    sample = RolloutSample(messages=[{"role": "user", "content": "<image>?"}], images=["七.png"])
    sample.sample_id, sample.prompt_hash = sample_id(2, 0), "own"
    outputs = [to_rollout_output(Answer([COMPLETION], PROMPT)) for _ in range(3)]
    for output, content in zip(outputs, ("<image>?", "replaced"), strict=False):
        note(conversation := Conversation(), content)
        write_turns(output, conversation.turns)
    turns = servers_turns([sample] * 3, outputs, RUN_SEED)
    own, replaced = (sample_id(2, 0), "own", [SEVEN]), (sample_id(2, 0), "print 0", [SEVEN])
    assert [(t.sample_id, t.fingerprint, t.media) for [t] in turns] == [own, replaced, own]
    assert servers_turns([sample], outputs[1:], RUN_SEED) == [[], []]  # several of one sample
    kept = Conversations(None, has_scheduler=False)  # type: ignore[arg-type]
    answered = [*sample.messages, {"role": "assistant", "content": "two"}]
    later = RolloutInferRequest(messages=[*answered, {"role": "user", "content": "!"}])
    between_turns(later).tool_seconds = 3.0
    for turn, row in enumerate((sample, later)):
        names = [replace(sample_id(2, 0), turn=turn)]
        kept.record([row], outputs[2:], names, ["own"], turn + 1.5)
    [[one, two]] = kept.take([sample], outputs[2:])
    assert (one.media, one.engine_seconds, one.tool_seconds) == ([SEVEN], 1.5, 0.0)
    assert (two.engine_seconds, two.tool_seconds) == (2.5, 3.0)
    assert [m["content"] for m in two.messages] == ["!"]
