"""Metrics of a round are their definitions, by independent implementations and examples (D1). The
analyzer turns rounds into rows of the record, verdicts and alarms with their remedies (D2, D3, R4).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations

import numpy as np
import pytest
import sacrebleu
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import Levenshtein

from swift_grpo_ext.diversity import metrics
from swift_grpo_ext.diversity.alarms import alarm_line
from swift_grpo_ext.diversity.analyzer import RoundAnalyzer, verdict_of, worst_groups
from swift_grpo_ext.diversity.collision import CollisionTest, known_logprobs
from swift_grpo_ext.diversity.metrics import (
    extract_answer,
    group_samples,
    outcome_metrics,
    round_metrics,
)
from tests.rig.diversity.samples import LONG, group_of, groups_of, sample
from tests.rig.record.rows import sample_id


def test_a_record_holds_what_was_measured() -> None:
    samples = [
        *(sample(LONG, index=i, step=3, group=4, seed=i, rank=i, replica="r") for i in range(10)),
        *(sample([i], index=i, step=3, group=7, prompt="b") for i in (0, 1)),
        *(sample([5], index=i, step=3, group=8, prompt="c", bits=None) for i in (0, 1)),
        sample([1], step=3, group=9, prompt="d"),
    ]
    healthy, record = RoundAnalyzer(is_greedy=False, seed_mode="sample").analyze(
        [*samples, *group_of([1], [2], [3], [4], step=1, prompt="e")]
    )
    assert (healthy.round.step, healthy.num_samples, healthy.num_pairs) == (1, 4, 6)
    assert (healthy.verdict, healthy.alarm, healthy.remedy) == ("healthy", None, "")
    assert (record.round, record.num_samples, record.num_groups) == (("train", 3, 0), 15, 4)
    assert (record.num_pairs, record.num_earlier_pairs, record.num_untested) == (46, 0, 2)
    assert record.shared_bits == pytest.approx(60, rel=1e-5)
    assert record.metrics == round_metrics(group_samples(samples))
    assert (record.worst_groups, record.remedy) == ([4, 8], "remedy_ignored_seeds")
    (collision,) = record.collisions
    assert collision["samples"][1] == {
        "sample_id": asdict(sample_id(3, group=4, index=1)),
        **{"seed": 1, "rank": 1, "replica": "r"},
    }
    named = [len(collision.pop(name)) for name in ("samples", "earlier")]
    assert (named, collision.pop("num_samples"), collision.pop("kind")) == ([8, 0], 10, "shared")
    log2_p = record.log10_p / math.log10(2)
    assert collision == pytest.approx({"num_tokens": 60, "bits": 60, "log2_p": log2_p}, rel=1e-5)


def test_the_groups_with_most_copies_are_the_worst_and_solved_ones_the_last() -> None:
    ids = [[[1], [1], [2]], [[1], [1], [1]], [[1], [2], [3]], [[1]]]
    groups = groups_of(*ids)
    solved = {sample.sample_id: 1.0 for sample in groups[1]}
    assert worst_groups(groups, [], {}) == [1, 0]
    assert worst_groups(groups, [], solved) == [0, 1]
    assert worst_groups(groups_of(*ids, *[[[1], [1]]] * 3), [], {}) == [1, 4, 5, 6]


def test_verdicts() -> None:
    """One completion for each prompt may solve it; one for nearly all prompts is a collapse."""
    for log2_p, copied, common_mode, solved, verdict in (
        (math.log2(1e-6) - 1e-9, 1.0, 1.0, 0.0, "broken"),
        (math.log2(1e-6), 0.0, 0.0, 0.0, "healthy"),  # not below
        (0.0, 0.98, 0.0, None, "collapse"),
        (0.0, 0.979, 0.89, 0.0, "healthy"),
        (0.0, 0.5, 0.9, 0.0, "collapse"),
        (0.0, 0.49, 1.0, 0.0, "healthy"),
        (0.0, 1.0, 0.25, 0.49, "collapse"),
        (0.0, 1.0, 0.25, 0.5, "healthy"),
        (0.0, 1.0, 0.9, 1.0, "collapse"),
    ):
        found = {"copied_ratio": copied, "common_mode": common_mode}
        found |= {} if solved is None else {"solved": solved}
        for tested in ({"num_pairs": 1}, {"num_earlier_pairs": 1}):
            assert verdict_of(CollisionTest(log2_p=log2_p, **tested), found) == verdict
        untested = "unknown" if verdict == "collapse" else verdict
        assert verdict_of(CollisionTest(log2_p=log2_p), found) == untested


def test_a_long_alarm_names_some_and_the_earlier_round_of_frozen_noise() -> None:
    """It names one of three collisions, and four of five samples. A collapse has its figures."""
    analyzer, groups = (
        RoundAnalyzer(is_greedy=False, seed_mode="sample"),
        groups_of(*[[LONG] * 5] * 3, replica=""),
    )
    (record,) = analyzer.analyze([s for group in groups for s in group])
    assert "sample 3 (rank 0) and 1 more share their first 60" in str(record.alarm)
    assert str(record.alarm).endswith(" (60 bits of surprisal). And 2 more.")
    later = [sample(LONG, step=5, prompt="2", turn=1, rank=1, replica="server 0", seed=5)]
    (frozen,) = analyzer.analyze(later)
    assert (frozen.verdict, frozen.remedy) == ("broken", "remedy_ignored_seeds")
    assert str(frozen.alarm).startswith(
        "diversity: broken randomness in train round 5.0: samples share noise (p = "
    )
    assert ". group 0 sample 0 turn 1 (rank 1, replica 'server 0', seed 5): " in str(frozen.alarm)
    assert "are those of train round 0.0, group 2 sample" in str(frozen.alarm)
    record = replace(record, verdict="collapse", log10_p=-7.5, remedy="remedy_collapse")
    record.metrics |= {"copied_ratio": 0.994, "common_mode": 0.25}
    line = alarm_line(record, 4)
    assert line.startswith("diversity: collapsed policy in train round 0.0, 4 rounds in a row: 99%")
    assert "25% of the prompts" in line
    assert "(p = 3.2e-8). Remedy: if the reward is high" in line


Ids = list[int]
completions = st.lists(st.integers(0, 4), max_size=12)
groups = st.lists(completions, min_size=1, max_size=5)
rounds = st.lists(st.tuples(st.integers(0, 5), groups), min_size=1, max_size=6)
"""Groups with the numbers of their prompts."""

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
@example([(n, [[mode], [mode]]) for n, mode in ((0, 1), (1, 2), (2, 3), (3, 4), (0, 4))])
def test_metrics_are_their_definitions(prompts_and_groups: list[tuple[int, list[Ids]]]) -> None:
    """Rows may come in any order, and twice. Each turn is a group. Of equal prompts the first
    counts."""
    round_ = [group for _, group in prompts_and_groups]
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
        "common_mode": 0.0,
    }
    by_prompt = dict(prompts_and_groups[::-1])
    if len(by_prompt) > 3:
        modes = [Counter(map(tuple, g)).most_common(1)[0] for g in by_prompt.values()]
        counts = Counter(completion for completion, count in modes if count > 1)
        expected["common_mode"] = max(counts.values(), default=0) / len(by_prompt)
    numbered = enumerate(prompts_and_groups)
    rows = [
        row
        for n, (prompt, group) in numbered
        for row in group_of(*group, group=n // 2, turn=n % 2, prompt=f"{prompt}")
    ]
    found = round_metrics(group_samples([*rows[::-1], *rows]))
    expected = {name: value for name, value in expected.items() if value is not None}
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


# --- bounds on the cost (D6), which `scripts/bench/diversity.py --cost-only` measures ---


def test_large_rounds_are_read_by_whole_groups_evenly_spaced() -> None:
    for num_groups, size, num, of_group in ((128, 8, 128, 8), (300, 8, 128, 8), (16, 130, 8, 128)):
        groups = groups_of(*[[[g, i] for i in range(size)] for g in range(num_groups)])
        tokens = [[ids.tolist() for ids in group] for group in metrics.compared_tokens(groups)]
        expected = [[[n * num_groups // num, i] for i in range(of_group)] for n in range(num)]
        assert tokens == expected


def test_beginnings_and_few_pairs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group gets 2 of its 6 pairs: the first one and the middle one, (0, 1) and (1, 2)."""
    ids = list(range(metrics.MAX_TOKENS))
    found = round_metrics(groups_of([[*ids, 1, 2], [*ids, 3]]))
    assert (found["unique_ratio"], found["edit_similarity"], found["length_spread"]) == (1, 1, 0.5)
    monkeypatch.setattr(metrics, "MAX_PAIRS", 4)
    groups = groups_of([[1], [1], [2], [3]], [[4], [4], [4], [5]])
    assert round_metrics(groups)["edit_similarity"] == pytest.approx((0.5 + 1.0) / 2)


# --- answers and rewards ---


def test_answers() -> None:
    for text, answer in (
        ("", ""),
        ("  seven\n", "seven"),
        ("<answer>3</answer> no, <answer> 4\n</answer>", "4"),
        (r"\boxed{1} then \boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{\frac{1}{2", r"\frac{1}{2"),
        ("<answer>3", "<answer>3"),
        (r"<answer>5</answer> \boxed{6}", "5"),
    ):
        assert extract_answer(text) == answer


outcomes = st.tuples(
    completions,
    st.sampled_from(["<answer>7</answer>", "so <answer> 7 </answer>", "seven"]),
    st.sampled_from([None, 0.0, 0.999, 1.0, 1.5]),  # 1 counts as correct, a little less does not
)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(outcomes, min_size=1, max_size=5), max_size=4))
def test_outcomes_are_their_definitions(round_: list[list[tuple[Ids, str, float | None]]]) -> None:
    """The last turn stands for a conversation. Samples without a score, and groups without any, are
    left out."""
    last_turns, first_turns, scores = [], [], {}
    for g, of_group in enumerate(round_):
        last_turns.append([])
        first_turns.append(group_of(*[[9]] * len(of_group), group=g, text="another"))
        for i, (ids, text, reward) in enumerate(of_group):
            last_turns[-1].append(sample(ids, index=i, group=g, turn=1, text=text))
            scores |= {} if reward is None else {sample_id(group=g, index=i): reward}
    rewards = [[reward for *_, reward in of_group] for of_group in round_]
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
    for turns in (first_turns + last_turns, last_turns + first_turns):
        assert outcome_metrics(turns, scores) == pytest.approx(defined)


def test_unusable_logprobs_do_not_count() -> None:
    nan, row = float("nan"), sample([1, 2, 3, 4])
    for logprobs in (None, [-0.5], [nan] * 4, [None] * 4):
        none = replace(row, logprobs=logprobs)  # type: ignore[arg-type]
        assert known_logprobs(none) is None
        assert "surprisal" not in round_metrics([[none]])
    some = replace(row, logprobs=[-0.5, None, float("-inf"), -2])  # type: ignore[list-item]
    np.testing.assert_equal(known_logprobs(some), [-0.5, nan, float("-inf"), -2.0])
    found = round_metrics([[some, sample([5, 6], index=1)]])
    assert found["surprisal"] == pytest.approx(np.mean([0.5, 2.0, np.log(2), np.log(2)]))
