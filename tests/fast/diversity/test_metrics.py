"""Metrics of a round are their definitions, by independent implementations and examples (D1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from swift_grpo_ext.diversity import metrics
from swift_grpo_ext.diversity.collision import known_logprobs
from swift_grpo_ext.diversity.metrics import (
    extract_answer,
    group_samples,
    outcome_metrics,
    round_metrics,
)
from tests.rig.diversity.samples import group_of, groups_of, sample

Ids = list[int]
completions = st.lists(st.integers(0, 4), max_size=12)
rounds = st.lists(st.lists(completions, min_size=1, max_size=5), min_size=1, max_size=4)


likeness = Levenshtein.normalized_similarity

# --- from the definitions, with other libraries than the module ---


def ngrams(ids: Ids, n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))


def cosine(a: Counter[tuple[int, ...]], b: Counter[tuple[int, ...]]) -> float:
    if not a or not b:
        return float(not a and not b)
    dot = sum(a[g] * b[g] for g in a)
    return float(dot / np.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values())))


def vendi(group: Sequence[Ids]) -> float:
    kernels = [[[cosine(ngrams(a, n), ngrams(b, n)) for b in group] for a in group] for n in (1, 2)]
    eigenvalues = np.linalg.eigvals(np.mean(kernels, axis=0) / len(group)).real
    eigenvalues = eigenvalues[eigenvalues > 1e-12]
    return float(np.exp(-(eigenvalues * np.log(eigenvalues)).sum()))


def self_bleu(group: Sequence[Ids]) -> list[float]:
    bleu = sacrebleu.BLEU(tokenize="none", effective_order=True)
    texts = [" ".join(f"t{i}" for i in ids) for ids in group]
    return [
        bleu.sentence_score(text, texts[:i] + texts[i + 1 :]).score / 100
        for i, text in enumerate(texts)
    ]


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


@settings(deadline=None, max_examples=200)
@given(rounds)
def test_metrics_are_their_definitions(round_: list[list[Ids]]) -> None:
    several = [g for g in round_ if len(g) > 1]
    num_different = [len(set(map(tuple, g))) for g in round_]
    all_ids = [ids for group in round_ for ids in group]
    grams = [[sum((ngrams(ids, n) for ids in g), Counter()) for g in round_] for n in (1, 2, 3)]
    expected = {
        "unique_ratio": sum(num_different) / len(all_ids),
        "groups_with_duplicates": mean([float(len(set(map(tuple, g))) < len(g)) for g in several]),
        "copied_ratio": sum(len(g) - d for g, d in zip(round_, num_different, strict=True))
        / max(sum(len(g) - 1 for g in round_), 1),
        "length_spread": mean([float(np.std([len(ids) for ids in g])) for g in several]),
        "surprisal": float(np.log(2)) if any(all_ids) else None,
        "edit_similarity": mean(
            [float(np.mean([likeness(a, b) for a, b in combinations(g, 2)])) for g in several]
        ),
        **{
            f"distinct_{n}": mean([len(c) / c.total() for c in counts if c])
            for n, counts in enumerate(grams, 1)
        },
        "self_bleu": mean([score for g in several for score in self_bleu(g)]),
        "vendi": mean([vendi(g) for g in several]),
        "distinct_answers": 1.0,
    }
    found = round_metrics([group_of(*g, group=i) for i, g in enumerate(round_)])
    assert found.pop("common_mode") == 0  # one prompt
    expected = {name: value for name, value in expected.items() if value is not None}
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    backwards = round_metrics([group_of(*g[::-1], group=i) for i, g in enumerate(round_[::-1])])
    backwards.pop("common_mode")
    assert backwards == pytest.approx(found)


@pytest.mark.parametrize(
    ("modes", "expected"),
    [((1, 1, 1, 2), 0.75), ((1, 1, 1), 0.0), ((1, 2, 3, 4, 4, 4), 0.25), ((1, 2, 3, 4), 0.25)],
)
def test_common_mode(modes: tuple[int, ...], expected: float) -> None:
    """The share of prompts with one and the same most frequent completion. Fewer than 4 prompts
    give 0; equal prompts count once."""
    groups = groups_of(*[[[m], [m], [9 + g]] for g, m in enumerate(modes)])
    for group in groups[4:]:
        group[0] = replace(group[0], fingerprint="0")
    assert round_metrics(groups)["common_mode"] == expected
    assert round_metrics(groups_of(*[[[1], [2]]] * 4))["common_mode"] == 0.0


# --- bounds on the cost (D6), which `scripts/bench/diversity.py --cost-only` measures ---


@pytest.mark.parametrize(
    ("num_groups", "size", "compared", "of_group"),
    [(128, 8, 128, 8), (129, 8, 128, 8), (300, 8, 128, 8), (16, 130, 8, 128)],
)
def test_large_rounds_are_read_by_whole_groups_evenly_spaced(
    num_groups: int, size: int, compared: int, of_group: int
) -> None:
    groups = groups_of(*[[[g, i] for i in range(size)] for g in range(num_groups)])
    tokens = metrics.compared_tokens(groups)
    expected = [[[n * num_groups // compared, i] for i in range(of_group)] for n in range(compared)]
    assert [[ids.tolist() for ids in of_one] for of_one in tokens] == expected


def test_beginnings_and_few_pairs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group gets 2 of its 6 pairs: the first one and the middle one, (0, 1) and (1, 2)."""
    ids = list(range(metrics.MAX_TOKENS))
    found = round_metrics(groups_of([[*ids, 1, 2], [*ids, 3]]))
    assert (found["unique_ratio"], found["edit_similarity"], found["length_spread"]) == (1, 1, 0.5)
    monkeypatch.setattr(metrics, "MAX_PAIRS", 4)
    groups = groups_of([[1], [1], [2], [3]], [[4], [4], [4], [5]])
    assert round_metrics(groups)["edit_similarity"] == pytest.approx((0.5 + 1.0) / 2)


# --- answers and rewards ---


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", ""),
        ("  seven\n", "seven"),
        ("<answer>3</answer> no, <answer> 4\n</answer>", "4"),
        (r"\boxed{1} then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\frac{1}{2", r"\frac{1}{2"),
        ("<answer>3", "<answer>3"),
        (r"<answer>5</answer> \boxed{6}", "5"),
        ("答案：<answer>四</answer>", "四"),
    ],
)
def test_answers(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


outcomes = st.tuples(
    completions,
    st.sampled_from(["<answer>7</answer>", "so <answer> 7 </answer>", "seven"]),
    st.sampled_from([None, 0.0, 0.999, 1.0, 1.5]),  # 1 counts as correct, a little less does not
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(outcomes, min_size=1, max_size=5), max_size=4))
def test_outcomes_are_their_definitions(round_: list[list[tuple[Ids, str, float | None]]]) -> None:
    """Samples without a score, and groups without any, are left out."""
    groups = [
        [sample(ids, index=i, group=g, text=text) for i, (ids, text, _) in enumerate(of_group)]
        for g, of_group in enumerate(round_)
    ]
    rewards = [[reward for *_, reward in of_group] for of_group in round_]
    scores = {
        row.sample_id: reward
        for group, values in zip(groups, rewards, strict=True)
        for row, reward in zip(group, values, strict=True)
        if reward is not None
    }
    known = [[r for r in values if r is not None] for values in rewards]
    several = [values for values in known if len(values) > 1]
    correct = [[o for o in of_group if o[2] is not None and o[2] >= 1] for of_group in round_]
    correct = [of_group for of_group in correct if of_group]
    expected = {
        "equal_rewards": mean([float(len(set(values)) == 1) for values in several]),
        "solved": mean([float(len(set(v)) == 1 and v[0] >= 1) for v in several]),
        "correct_answers": mean([float(len({"7" in o[1] for o in group})) for group in correct]),
        "correct_vendi": mean([vendi([o[0] for o in group]) for group in correct]),
    }
    for k in (1, 2, 4):
        shares = [
            float(np.mean([max(subset) >= 1 for subset in combinations(values, k)]))
            for values in known
            if len(values) >= k
        ]
        expected[f"pass_at_{k}"] = mean(shares)
    defined = {name: value for name, value in expected.items() if value is not None}
    assert outcome_metrics(groups, scores) == pytest.approx(defined)


def test_the_last_turn_stands_for_a_conversation() -> None:
    turns = [
        [sample([1], index=i, turn=turn, text=text) for i, text in enumerate(texts)]
        for turn, texts in enumerate((["same", "same"], ["5", "6"]))
    ]
    scores = {s.sample_id: 1.0 for s in turns[0]}
    for order in (turns, turns[::-1]):
        found = outcome_metrics(order, scores)
        assert (found["correct_answers"], found["pass_at_1"]) == (2.0, 1.0)


# --- bad input ---


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        (None, "None"),
        ([-0.5], "None"),
        ([float("nan")] * 4, "None"),
        ([None] * 4, "None"),
        ([-0.5, None, float("-inf"), -2], "[-0.5, nan, -inf, -2.0]"),
    ],
)
def test_unusable_logprobs_do_not_count(logprobs: list[float] | None, expected: str) -> None:
    row = replace(sample([1, 2, 3, 4]), logprobs=logprobs)
    found = known_logprobs(row)
    assert repr(None if found is None else found.tolist()) == expected
    with_others = round_metrics([[row, sample([5, 6], index=1)]])
    nats = [np.log(2)] * 2 + ([0.5, 2.0] if found is not None else [])
    assert with_others["surprisal"] == pytest.approx(np.mean(nats))
    assert ("surprisal" in round_metrics([[row]])) == (found is not None)


def test_rows_become_groups_by_place_and_once() -> None:
    rows = [sample([1], group=g, index=i) for g in (1, 0) for i in (2, 0, 1)]
    groups = group_samples([*rows, *rows])
    sample_ids = [[(s.sample_id.group, s.sample_id.index) for s in g] for g in groups]
    assert sample_ids == [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]
