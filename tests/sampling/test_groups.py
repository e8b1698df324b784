"""Samples into requests and back: each its own answer, a group asked for once (SPEC G1 to G4)."""

from __future__ import annotations

import base64
import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from swift_grpo_ext.rollout.wire import RequestMetadata
from swift_grpo_ext.sampling.groups import (
    GroupSlice,
    RequestPlan,
    count_duplicates,
    fingerprint,
    fingerprints,
    group_id,
    make_slices,
    parse_request_id,
    plan_requests,
    request_id,
    sample_ids_at,
    split_by_rank,
)
from swift_grpo_ext.sampling.rounds import Round
from swift_grpo_ext.sampling.seeding import PHASES, SampleId, sample_seed

ROUND = Round(phase="train", step=0, number=0)
PLACE = SampleId(phase="train", step=12, number=0, group=5, index=3)


def group_slice(group: int, index: int, count: int, row: str = "a") -> GroupSlice:
    sample_id = replace(PLACE, step=0, group=group, index=index)
    return GroupSlice(sample_id=sample_id, count=count, fingerprint=row)


class Batch(NamedTuple):
    """A generation batch, cut over ranks."""

    group_size: int
    rows: list[str]
    """The fingerprint of each sample's row."""

    borders: list[int]
    """Where ranks begin and end; ranks may be empty, and cut groups anywhere."""

    @property
    def sample_ids(self) -> list[SampleId]:
        return sample_ids_at(ROUND, range(len(self.rows)), self.group_size)

    @property
    def places_of_ranks(self) -> list[list[SampleId]]:
        return [self.sample_ids[a:b] for a, b in itertools.pairwise(self.borders)]

    @property
    def slices_of_ranks(self) -> list[list[GroupSlice]]:
        return [
            make_slices(self.sample_ids[a:b], self.rows[a:b])
            for a, b in itertools.pairwise(self.borders)
        ]

    @property
    def unequal(self) -> list[SampleId]:
        size = self.group_size
        groups = [self.rows[i : i + size] for i in range(0, len(self.rows), size)]
        pairs = zip(self.sample_ids[::size], groups, strict=True)
        return [sample_id for sample_id, rows in pairs if len(set(rows)) > 1]


@st.composite
def batches(draw: st.DrawFn, *, even: bool = False) -> Batch:
    group_size, num_groups = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    total = group_size * num_groups
    rows_of_groups = st.lists(st.sampled_from("ab"), min_size=num_groups, max_size=num_groups)
    rows = [row for row in draw(rows_of_groups) for _ in range(group_size)]
    if not even:
        for i in draw(st.sets(st.integers(0, total - 1), max_size=3)):
            rows[i] = draw(st.sampled_from("abc"))
    inner = draw(st.lists(st.integers(0, total), max_size=5))
    return Batch(group_size, rows, [0, *sorted(inner), total])


def own_answers(plan: RequestPlan) -> list[list[SampleId]]:
    """Answers that say which samples they are for."""
    return split_by_rank(
        plan.requests, [r.group_slice.sample_ids for r in plan.requests], plan.slices_of_ranks
    )


# --- samples, parts, requests, and back ---


@settings(deadline=None, max_examples=150)
@given(batches(), st.booleans())
def test_every_sample_gets_its_own_answer(batch: Batch, grouped: bool) -> None:
    """G1, for any ranks, rows and groups."""
    assert (
        own_answers(plan_requests(batch.slices_of_ranks, grouped=grouped)) == batch.places_of_ranks
    )


@settings(deadline=None, max_examples=150)
@given(batches(), st.booleans())
def test_every_sample_is_asked_for_once_and_with_its_own_row(batch: Batch, grouped: bool) -> None:
    made = plan_requests(batch.slices_of_ranks, grouped=grouped)
    asked = [
        (p, r.group_slice.fingerprint) for r in made.requests for p in r.group_slice.sample_ids
    ]
    assert asked == list(zip(batch.sample_ids, batch.rows, strict=True))
    for request in made.requests:
        served = [made.slices_of_ranks[rank][number] for rank, number in request.slices]
        assert {piece.fingerprint for piece in served} == {request.group_slice.fingerprint}
        assert [p for piece in served for p in piece.sample_ids] == request.group_slice.sample_ids


@settings(deadline=None)
@given(batches(even=True))
def test_a_group_is_one_request_whatever_the_ranks(batch: Batch) -> None:
    """G2, also where two groups next to each other have equal rows (G1)."""
    made = plan_requests(batch.slices_of_ranks, grouped=True)
    assert [r.group_slice.count for r in made.requests] == [batch.group_size] * len(made.requests)
    assert [r.group_slice.sample_id for r in made.requests] == batch.sample_ids[:: batch.group_size]
    assert made.unequal == []


@settings(deadline=None, max_examples=150)
@given(batches())
def test_rows_that_differ_are_asked_for_singly(batch: Batch) -> None:
    """G3: only in the groups where they differ, and those are named."""
    made = plan_requests(batch.slices_of_ranks, grouped=True)
    assert made.unequal == batch.unequal
    for request in made.requests:
        is_uneven = group_id(request.group_slice.sample_id) in batch.unequal
        assert request.group_slice.count == (1 if is_uneven else batch.group_size)


@settings(deadline=None)
@given(batches())
def test_without_grouping_every_sample_is_a_request(batch: Batch) -> None:
    made = plan_requests(batch.slices_of_ranks, grouped=False)
    assert [r.group_slice.sample_id for r in made.requests] == batch.sample_ids
    assert {r.group_slice.count for r in made.requests} == {1}
    assert made.unequal == batch.unequal


@settings(deadline=None)
@given(batches(), st.booleans())
def test_seeds_do_not_depend_on_ranks_rows_and_requests(batch: Batch, grouped: bool) -> None:
    """S2 and S6: sample k of a request draws with the seed that its own place has."""
    made = plan_requests(batch.slices_of_ranks, grouped=grouped)
    seeds = []
    for request in made.requests:
        asked = request.group_slice
        metadata = RequestMetadata(
            sample_id=asked.sample_id, count=asked.count, run_seed=42, packed=True
        )
        seeds.append([metadata.seed_of(k) for k in range(asked.count)])
    answered = split_by_rank(made.requests, seeds, made.slices_of_ranks)
    expected = [[sample_seed(42, p) for p in sample_ids] for sample_ids in batch.places_of_ranks]
    assert answered == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_the_same_requests_for_every_number_of_ranks(num_ranks: int) -> None:
    """12 samples in groups of 4: with 6 ranks a group stands on two, with 2 one is cut in half."""
    share = 12 // num_ranks
    batch = Batch(4, list("aaaabbbbaaaa"), [share * rank for rank in range(num_ranks + 1)])
    requests = [r.group_slice for r in plan_requests(batch.slices_of_ranks, grouped=True).requests]
    assert requests == [
        group_slice(0, 0, 4, "a"),
        group_slice(1, 0, 4, "b"),
        group_slice(2, 0, 4, "a"),
    ]


def test_a_rank_with_its_own_engine_asks_for_its_part() -> None:
    """G2 in colocation: a group of 4 on two ranks is one request on each."""
    batch = Batch(4, list("aaaa"), [0, 2, 4])
    alone = [plan_requests([slices], grouped=True) for slices in batch.slices_of_ranks]
    assert [[r.group_slice for r in made.requests] for made in alone] == [
        [group_slice(0, 0, 2)],
        [group_slice(0, 2, 2)],
    ]


@pytest.mark.parametrize(
    ("group_size", "rows", "expected"),
    [
        (2, "", []),
        (1, "aa", [group_slice(0, 0, 1), group_slice(1, 0, 1)]),
        (4, "aaaa", [group_slice(0, 0, 4)]),
        (2, "aaaa", [group_slice(0, 0, 2), group_slice(1, 0, 2)]),
        (4, "aaba", [group_slice(0, 0, 2), group_slice(0, 2, 1, "b"), group_slice(0, 3, 1)]),
    ],
)
def test_fold_by_example(group_size: int, rows: str, expected: list[GroupSlice]) -> None:
    assert make_slices(sample_ids_at(ROUND, range(len(rows)), group_size), list(rows)) == expected


@pytest.mark.parametrize(
    "changes", [{"turn": 1}, {"step": 1}, {"number": 1}, {"phase": "eval"}, {"group": 1}]
)
def test_samples_of_other_rounds_and_turns_stay_apart(changes: dict[str, Any]) -> None:
    first = SampleId(phase="train", step=0, number=0, group=0, index=0)
    second = replace(first, index=1, **changes)
    made = plan_requests([make_slices([first, second], ["a", "a"])], grouped=True)
    assert [r.group_slice.sample_id for r in made.requests] == [first, second]
    assert made.unequal == []


def test_conversations_that_ended_leave_a_gap() -> None:
    """In a later turn, samples 0, 1 and 3 of a group of 4 go on, with equal rows."""
    turn = [replace(PLACE, index=index, turn=1) for index in (0, 1, 3)]
    made = plan_requests([make_slices(turn, ["a"] * 3)], grouped=True)
    assert [(r.group_slice.sample_id.index, r.group_slice.count) for r in made.requests] == [
        (0, 2),
        (3, 1),
    ]
    assert own_answers(made) == [turn]


def test_requests_name_the_slices_of_ranks_in_order() -> None:
    batch = Batch(4, list("aaaabbcb"), [0, 3, 6, 8])
    made = plan_requests(batch.slices_of_ranks, grouped=True)
    assert [r.slices for r in made.requests] == [
        ((0, 0), (1, 0)),
        ((1, 1),),
        ((1, 2),),
        ((2, 0),),
        ((2, 1),),
    ]


@pytest.mark.parametrize("answer", [["x"], ["x", "y", "z"], []])
def test_an_answer_with_another_count_is_refused(answer: list[str]) -> None:
    """M6: the sample is named."""
    made = plan_requests([[group_slice(0, 0, 2)], [group_slice(1, 0, 2)]], grouped=True)
    message = (
        r"train round 0\.0, group 1, sample 0: the request was for 2 samples, and "
        rf"{len(answer)} came back"
    )
    with pytest.raises(ValueError, match=message):
        split_by_rank(made.requests, [["x", "y"], answer], made.slices_of_ranks)


@pytest.mark.parametrize("answers", [[], [["x", "y"]] * 2])
def test_another_number_of_answers_is_refused(answers: list[list[str]]) -> None:
    made = plan_requests([[group_slice(0, 0, 2)]], grouped=True)
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is (shorter|longer)"):
        split_by_rank(made.requests, answers, made.slices_of_ranks)


def test_places_count_on_over_ranks_and_eval_batches() -> None:
    round_ = Round(phase="eval", step=7, number=1, first_group=10)
    found = [
        (p.phase, p.step, p.number, p.group, p.index) for p in sample_ids_at(round_, [3, 4, 5], 2)
    ]
    assert found == [("eval", 7, 1, 11, 1), ("eval", 7, 1, 12, 0), ("eval", 7, 1, 12, 1)]


# --- names ---

sample_ids = st.builds(
    SampleId,
    phase=st.sampled_from(PHASES),
    step=st.integers(0, 10**6),
    number=st.integers(0, 20),
    group=st.integers(0, 10**5),
    index=st.integers(0, 10**4),
)


def test_a_name_by_example() -> None:
    assert request_id(PLACE) == "train-12.0-5-3"
    assert parse_request_id("eval-7.1-0-15") == SampleId(
        phase="eval", step=7, number=1, group=0, index=15
    )


@settings(deadline=None)
@given(sample_ids)
def test_a_name_tells_its_place(sample_id: SampleId) -> None:
    assert parse_request_id(request_id(sample_id)) == sample_id


@pytest.mark.parametrize(
    "name",
    [
        "",
        "train-12.0-5",
        "train-12-5-3",
        "train-12.0-5-3-1",
        "train-12.0-5--3",
        "Train-12.0-5-3",
        "test-12.0-5-3",
        "train-12.0-5-3\n",
        " train-12.0-5-3",
        "chatcmpl-6f1d2c",
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is no name of a sample, such as train-12\.0-5-3"):
        parse_request_id(name)


@pytest.mark.parametrize(
    ("sample_id", "words"),
    [
        (PLACE, "train round 12.0, group 5, sample 3"),
        (replace(PLACE, turn=2), "train round 12.0, group 5, sample 3, turn 2"),
        (replace(PLACE, phase="eval", number=1), "eval round 12.1, group 5, sample 3"),
    ],
)
def test_a_place_in_words(sample_id: SampleId, words: str) -> None:
    assert str(sample_id) == words


# --- prompts ---

MESSAGES = [
    {"role": "system", "content": "你是一个助手"},
    {"role": "user", "content": "<image>哪个数字?"},
]


def image(*pixels: int, mode: str = "L", size: tuple[int, int] = (2, 3)) -> Image.Image:
    made = Image.new(mode, size)
    made.putdata(pixels)
    return made


def in_palette(color: Sequence[int]) -> Image.Image:
    made = Image.new("P", (2, 3))
    made.putpalette(color)
    return made


def as_base64(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


PROMPTS = {
    "words only": {},
    "path": {"images": ["七.png"]},
    "other path": {"images": ["八.png"]},
    "path twice": {"images": ["七.png", "七.png"]},
    "two paths": {"images": ["七.png", "八.png"]},
    "two paths, the other way round": {"images": ["八.png", "七.png"]},
    "video": {"videos": ["七.png"]},
    "audio": {"audios": ["七.png"]},
    "bytes": {"images": [{"bytes": b"\x00\x01", "path": None}]},
    "other bytes": {"images": [{"bytes": b"\x00\x02", "path": None}]},
    "bytes with a path": {"images": [{"bytes": b"\x00\x01", "path": "七.png"}]},
    "bytes cut here": {"images": [b"ab", b"c"]},
    "bytes cut there": {"images": [b"a", b"bc"]},
    "base64": {"images": [as_base64(b"\x00\x01")]},
    "other base64": {"images": [as_base64(b"\x00\x02")]},
    "pixels": {"images": [image(1, 2, 3, 4, 5, 6)]},
    "other pixels": {"images": [image(1, 2, 3, 4, 5, 7)]},
    "pixels in another shape": {"images": [image(1, 2, 3, 4, 5, 6, size=(3, 2))]},
    "pixels in another mode": {"images": [image(1, 2, 3, 4, 5, 6, mode="P")]},
    "palette": {"images": [in_palette([255, 0, 0])]},
    "other palette": {"images": [in_palette([0, 0, 255])]},
    "array": {"images": [np.zeros((2, 3), np.uint8)]},
    "array in another shape": {"images": [np.zeros((3, 2), np.uint8)]},
    "array of another type": {"images": [np.zeros((2, 3), np.int8)]},
    "tools": {"tools": ["search"]},
    "objects": {"objects": {"ref": ["七"], "bbox": [[0, 0, 1, 1]]}},
    "other words": {"messages": [MESSAGES[0], {"role": "user", "content": "<image>哪个数字!"}]},
    "another role": {"messages": [MESSAGES[0], {**MESSAGES[1], "role": "assistant"}]},
    "no system prompt": {"messages": MESSAGES[1:]},
    "thinking": {"chat_template_kwargs": {"enable_thinking": True}},
    "no thinking": {"chat_template_kwargs": {"enable_thinking": False}},
}


def row(**changes: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "solution": "7", **changes}


def test_prompts_that_share_their_words_differ_by_their_media() -> None:
    """G7."""
    prints: dict[str, str] = {}
    for name, changes in PROMPTS.items():
        print_ = fingerprint(row(**changes))
        assert print_ not in prints, f"{name!r} is taken for {prints.get(print_)!r}"
        prints[print_] = name


@pytest.mark.parametrize("name", PROMPTS)
def test_copies_are_the_same_prompt(name: str) -> None:
    prompt = row(**PROMPTS[name])
    assert fingerprint(copy.deepcopy(prompt)) == fingerprint(prompt)
    assert len(fingerprint(prompt)) == 32


@pytest.mark.parametrize("name", PROMPTS)
def test_rows_and_objects_agree(name: str) -> None:
    """A data set's row, and ms-swift's sample made from it, which has few columns as fields."""
    prompt = row(**PROMPTS[name])
    extra = {key: prompt[key] for key in ("solution", "chat_template_kwargs") if key in prompt}
    own = {key: value for key, value in prompt.items() if key not in extra}
    sample = SimpleNamespace(**own, request_id="train-0.0-0-0", extra=extra)
    assert fingerprint(sample) == fingerprint(prompt)


def test_the_order_of_keys_does_not_count() -> None:
    def reverse(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reverse(value[key]) for key in reversed(value)}
        return [reverse(item) for item in value] if isinstance(value, list) else value

    prompt = row(**PROMPTS["bytes with a path"], **PROMPTS["objects"])
    assert list(reverse(prompt)) != list(prompt)
    assert fingerprint(reverse(prompt)) == fingerprint(prompt)


@pytest.mark.parametrize("empty", [None, []])
@pytest.mark.parametrize("field", ["images", "videos", "audios", "tools", "objects"])
def test_no_media_is_no_media(field: str, empty: Any) -> None:
    assert fingerprint(row(**{field: empty})) == fingerprint(row())


def test_what_is_not_the_prompt_does_not_count() -> None:
    assert fingerprint(row(solution="8", add_eos=True)) == fingerprint(row())


def test_half_a_surrogate_pair_is_no_accident() -> None:
    """Some data sets hold them; UTF-8 does not."""
    halves = ["\ud83d", "\ude00"]
    prints = {fingerprint({"messages": [{"role": "user", "content": h}]}) for h in halves}
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("prints", "count"), [("", 0), ("abc", 0), ("aba", 1), ("aaa", 2), ("abab", 2)]
)
def test_duplicates_are_those_that_stand_earlier_too(prints: str, count: int) -> None:
    """G4."""
    assert count_duplicates(prints) == count


def test_fingerprints_of_many_rows_are_those_of_each() -> None:
    image = Image.new("RGB", (4, 4), "red")
    rows = [
        {"messages": [{"role": "user", "content": "a"}], "images": [b"png"]},
        {"messages": [{"role": "user", "content": "a"}], "images": [b"png"]},
        {"messages": [{"role": "user", "content": "a"}], "images": [b"pnG"]},
        {"messages": [{"role": "user", "content": "a"}], "images": [image]},
        {"messages": [{"role": "user", "content": "a"}], "images": [image.copy()]},
        {"messages": [{"role": "user", "content": "a"}], "videos": np.zeros((2, 3))},
        {"messages": [{"role": "user", "content": "a"}], "videos": np.zeros((2, 3))},
        {"messages": [{"role": "user", "content": "a"}], "videos": np.ones((2, 3))},
    ]
    assert fingerprints(rows) == [fingerprint(row) for row in rows]
    assert len(set(fingerprints(rows))) == 5
