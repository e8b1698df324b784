"""The metrics against independent implementations, by example, and on bad input."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_grpo_ext.diversity import metrics
from swift_grpo_ext.diversity.metrics import extract_answer, round_metrics
from swift_grpo_ext.diversity.sample import Sample, group_samples, sample_from_row
from tests.diversity.samples import group_of, row_of, sample

Ids = list[int]
completions = st.lists(st.integers(0, 4), max_size=12)
rounds = st.lists(st.lists(completions, min_size=1, max_size=5), min_size=1, max_size=4)


def groups_of(round_: Sequence[Sequence[Ids]]) -> list[list[Sample]]:
    return [group_of(*group, group=number) for number, group in enumerate(round_)]


# --- written from the definitions, with other means than the module ---


def ngrams(ids: Ids, n: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids[i : i + n]) for i in range(len(ids) - n + 1))


def edit_distance(a: Ids, b: Ids) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def expected_distinct(round_: Sequence[Sequence[Ids]], n: int) -> float | None:
    counts = [sum((ngrams(ids, n) for ids in group), Counter()) for group in round_]
    return mean([len(c) / c.total() for c in counts if c])


def expected_similarity(round_: Sequence[Sequence[Ids]]) -> float | None:
    def similarity(a: Ids, b: Ids) -> float:
        return 1 - edit_distance(a, b) / max(len(a), len(b)) if a or b else 1.0

    groups = [[similarity(a, b) for a, b in combinations(g, 2)] for g in round_ if len(g) > 1]
    return mean([sum(pairs) / len(pairs) for pairs in groups])


def expected_self_bleu(round_: Sequence[Sequence[Ids]]) -> float | None:
    bleu = sacrebleu.BLEU(tokenize="none", effective_order=True)
    scores = []
    for group in round_:
        texts = [" ".join(f"t{i}" for i in ids) for ids in group]
        for number in range(len(texts) if len(texts) > 1 else 0):
            others = texts[:number] + texts[number + 1 :]
            scores.append(bleu.sentence_score(texts[number], others).score / 100)
    return mean(scores)


def expected_vendi(round_: Sequence[Sequence[Ids]]) -> float | None:
    def cosine(a: Counter[tuple[int, ...]], b: Counter[tuple[int, ...]]) -> float:
        if not a or not b:
            return float(not a and not b)
        dot = sum(a[g] * b[g] for g in a)
        return float(dot / np.sqrt(sum(v * v for v in a.values()) * sum(v * v for v in b.values())))

    scores = []
    for group in round_:
        if len(group) > 1:
            kernels = [[[cosine(ngrams(a, n), ngrams(b, n)) for b in group] for a in group]
                       for n in (1, 2)]  # fmt: skip
            eigenvalues = np.linalg.eigvals(np.mean(kernels, axis=0) / len(group)).real
            eigenvalues = eigenvalues[eigenvalues > 1e-12]
            scores.append(float(np.exp(-(eigenvalues * np.log(eigenvalues)).sum())))
    return mean(scores)


@settings(deadline=None, max_examples=200)
@given(rounds)
def test_metrics_are_their_definitions(round_: list[list[Ids]]) -> None:
    found = round_metrics(groups_of(round_))
    several = [g for g in round_ if len(g) > 1]
    distinct = [len(set(map(tuple, g))) for g in round_]
    all_ids = [ids for group in round_ for ids in group]
    expected = {
        "unique_ratio": sum(distinct) / len(all_ids),
        "groups_with_duplicates": mean([float(len(set(map(tuple, g))) < len(g)) for g in several]),
        "copied_ratio": sum(len(g) - d for g, d in zip(round_, distinct, strict=True))
        / max(sum(len(g) - 1 for g in round_), 1),
        "common_mode": 0.0,
        "length_spread": mean([float(np.std([len(ids) for ids in g])) for g in several]),
        "surprisal": float(np.log(2)) if any(all_ids) else None,
        "edit_similarity": expected_similarity(round_),
        **{f"distinct_{n}": expected_distinct(round_, n) for n in (1, 2, 3)},
        "self_bleu": expected_self_bleu(round_),
        "vendi": expected_vendi(round_),
        "distinct_answers": 1.0,
    }
    expected = {name: value for name, value in expected.items() if value is not None}
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(rounds)
def test_metrics_do_not_depend_on_the_order_of_groups_and_samples(round_: list[list[Ids]]) -> None:
    backwards = [group[::-1] for group in round_[::-1]]
    assert round_metrics(groups_of(backwards)) == pytest.approx(round_metrics(groups_of(round_)))


def common_mode(groups: list[list[Sample]]) -> float:
    return round_metrics(groups)["common_mode"]


def test_common_mode() -> None:
    """Most prompts get one completion; prompts that stand twice count once."""

    def round_of(*modes: int) -> list[list[Sample]]:
        return [
            group_of([m], [m], [9 + g], group=g, fingerprint=f"{g}") for g, m in enumerate(modes)
        ]

    assert common_mode(round_of(1, 1, 1, 2)) == 0.75
    assert common_mode(round_of(1, 1, 1)) == 0.0
    assert common_mode(round_of(1, 2, 3, 4) + round_of(1, 1, 1, 1)) == 0.25
    single = [group_of([1], [2], group=g, fingerprint=f"{g}") for g in range(4)]
    assert common_mode(single) == 0.0


def test_extremes() -> None:
    same = round_metrics(groups_of([[[1, 2, 3, 4]] * 4]))
    apart = round_metrics(groups_of([[[i] * 4 for i in range(4)]]))
    assert (same["unique_ratio"], apart["unique_ratio"]) == (0.25, 1.0)
    assert (same["vendi"], apart["vendi"]) == pytest.approx((1.0, 4.0))
    assert (same["edit_similarity"], apart["edit_similarity"]) == (1.0, 0.0)
    assert (same["self_bleu"], same["distinct_1"]) == pytest.approx((1.0, 0.25))


def test_long_completions_are_compared_by_their_beginnings() -> None:
    """The bound on the cost is a rule that anyone can follow, not chance."""
    ids = list(range(metrics.MAX_TOKENS))
    found = round_metrics(groups_of([[[*ids, 1, 2], [*ids, 3]]]))
    assert found["unique_ratio"] == 1.0
    assert found["edit_similarity"] == 1.0
    assert found["length_spread"] == 0.5


def test_64_bits_hold_any_four_tokens_of_a_group() -> None:
    """128 samples of 512 tokens, all different: as many n-grams of each length as there are."""
    tokens = [np.arange(512 * i, 512 * (i + 1), dtype=np.int32) for i in range(128)]
    counts = list(metrics.ngram_counts(tokens))
    assert [c.shape for c in counts] == [(128, 128 * (512 - n)) for n in range(4)]
    assert all((c.data == 1).all() for c in counts)


def test_pairs_are_chosen_evenly() -> None:
    assert metrics.evenly_spaced(range(10), 3) == [0, 3, 6]
    assert metrics.evenly_spaced(range(3), 4) == metrics.evenly_spaced(range(3), 3) == [0, 1, 2]
    assert metrics.evenly_spaced([], 4) == []


def numbered_groups(num_groups: int, size: int) -> list[list[Sample]]:
    return [group_of(*[[g, i] for i in range(size)], group=g) for g in range(num_groups)]


def test_a_large_round_is_read_by_whole_groups_evenly_spaced() -> None:
    compared = metrics.compared_tokens(numbered_groups(300, 8))
    assert [tokens[0][0] for tokens in compared] == [n * 300 // 128 for n in range(128)]
    assert {len(tokens) for tokens in compared} == {8}


def test_of_a_large_group_the_first_samples_are_read() -> None:
    compared = metrics.compared_tokens(numbered_groups(16, 130))
    assert len(compared) == 8  # of 128 samples each
    assert [ids[1] for ids in compared[0]] == list(range(128))
    assert [len(ids) for ids in metrics.compared_tokens([group_of(range(600), [1])])[0]] == [512, 1]


def test_rounds_to_1024_samples_are_read_whole() -> None:
    assert len(metrics.compared_tokens(numbered_groups(128, 8))) == 128
    assert len(metrics.compared_tokens(numbered_groups(129, 8))) == 128
    assert len(metrics.compared_tokens(numbered_groups(2, 128) * 5)) == 8


def test_pairs_of_all_groups_share_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 pairs a group: the first, and the one in the middle, (0, 1) and (1, 2) of 6."""
    monkeypatch.setattr(metrics, "MAX_PAIRS", 4)
    groups = groups_of([[[1], [1], [2], [3]], [[4], [4], [4], [5]]])
    assert round_metrics(groups)["edit_similarity"] == pytest.approx((0.5 + 1.0) / 2)


def test_the_error_of_a_large_round_is_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of a policy whose entropy wanders; three standard errors at most."""
    rng = np.random.default_rng(0)
    groups = [group_of(*rng.integers(0, 2 + g % 37, (4, 12)).tolist(), group=g) for g in range(200)]
    by_group = [round_metrics([group]) for group in groups]
    exact = round_metrics(groups)
    monkeypatch.setattr(metrics, "MAX_COMPARED_SAMPLES", 240)
    estimated = round_metrics(groups)
    for name in ("distinct_1", "distinct_2", "edit_similarity", "self_bleu", "vendi"):
        spread = float(np.std([found[name] for found in by_group]))
        error = spread * np.sqrt((1 - 60 / 200) / 60)
        assert 0 < abs(estimated[name] - exact[name]) < 3 * error
    assert estimated["unique_ratio"] == exact["unique_ratio"]


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


def test_distinct_answers_are_counted_by_group() -> None:
    texts = ["so <answer>1</answer>", "<answer> 1 </answer>", "2"]
    group = [sample([i], index=i, text=text) for i, text in enumerate(texts)]
    assert round_metrics([group])["distinct_answers"] == 2
    assert round_metrics([group, group[:1]])["distinct_answers"] == 1.5


# --- bad input ---


def test_no_samples_no_metrics() -> None:
    assert round_metrics([]) == {}


def test_one_sample_a_group() -> None:
    found = round_metrics(groups_of([[[1, 2]], [[3]]]))
    assert found["unique_ratio"] == 1.0
    for name in ("vendi", "self_bleu", "edit_similarity", "length_spread"):
        assert name not in found


def test_empty_completions() -> None:
    found = round_metrics(groups_of([[[], [], [1, 2]]]))
    assert found["unique_ratio"] == pytest.approx(2 / 3)
    assert found["edit_similarity"] == pytest.approx(1 / 3)
    assert np.isfinite(list(found.values())).all()
    assert "surprisal" not in round_metrics(groups_of([[[], []]]))


def test_unknown_logprobs_do_not_count() -> None:
    known = sample([1, 2], bits=1.0)
    partly = sample([3, 4], index=1, bits=[float("nan"), 3.0])
    none = sample([5, 6], index=2, bits=None)
    found = round_metrics([[known, partly, none]])
    assert found["surprisal"] == pytest.approx(np.log(2) * 5 / 3)
    assert "surprisal" not in round_metrics([[none]])


def test_huge_ids_and_surrogates() -> None:
    """Token ids are no characters: not those between, and not those above Unicode."""
    found = round_metrics(groups_of([[[0xD800, 0xDFFF], [0xD800, 2**31 - 1]]]))
    assert found["edit_similarity"] == 0.5


@pytest.mark.parametrize("logprobs", [None, [-0.5], [float("nan"), float("nan")], [None, None]])
def test_rows_without_usable_logprobs(logprobs: list[float] | None) -> None:
    row = row_of(sample([1, 2]))
    object.__setattr__(row, "logprobs", logprobs)
    assert sample_from_row(row).logprobs is None


def test_rows_with_some_unusable_logprobs() -> None:
    row = row_of(sample([1, 2**31 - 1, 3, 4]))
    object.__setattr__(row, "logprobs", [-0.5, None, -1e300, -2])
    found = sample_from_row(row)
    assert found.token_ids.tolist() == [1, 2**31 - 1, 3, 4]
    assert found.logprobs is not None
    assert repr(found.logprobs.tolist()) == "[-0.5, nan, -inf, -2.0]"


def test_rows_become_groups_by_place_and_once() -> None:
    rows = [row_of(sample([1], group=g, index=i)) for g in (1, 0) for i in (2, 0, 1)]
    groups = group_samples(map(sample_from_row, [*rows, *rows]))
    sample_ids = [[(s.origin.sample_id.group, s.origin.sample_id.index) for s in g] for g in groups]
    assert sample_ids == [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]


def test_the_core_needs_neither_torch_nor_ms_swift() -> None:
    code = (
        "import sys, swift_grpo_ext.diversity.metrics, swift_grpo_ext.diversity.collision, "
        "swift_grpo_ext.diversity.analyzer, swift_grpo_ext.diversity; "
        "print({'torch', 'swift', 'vllm', 'transformers'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()"
