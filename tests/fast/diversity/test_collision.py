"""The collision test finds shared and repeated noise, and calls independent samples broken no more
often than it promises (D2, R4)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import comb, log2, log10

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc
from scipy.stats import combine_pvalues

from swift_grpo_ext.diversity.collision import (
    MAX_PER_PROMPT,
    CollisionTest,
    Correction,
    PromptMemory,
    collision_test,
    format_p,
    log2_fisher,
    shared_prefixes,
)
from swift_grpo_ext.record.tables import SampleRow
from tests.rig.diversity.samples import LONG, group_of, groups_of, sample


def remembering(samples: Sequence[SampleRow]) -> PromptMemory:
    memory = PromptMemory()
    memory.remember(samples)
    return memory


def flat(groups: Sequence[Sequence[SampleRow]]) -> list[SampleRow]:
    return [sample for group in groups for sample in group]


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8))
def test_shared_prefixes_are_all_there(lists: list[list[int]]) -> None:
    """Against brute force over all prefixes."""
    holders: dict[frozenset[int], int] = {}
    for ids in lists:
        for length in range(1, len(ids) + 1):
            who = frozenset(i for i, o in enumerate(lists) if o[:length] == ids[:length])
            if len(who) > 1:
                holders[who] = max(length, holders.get(who, 0))
    prefixes = list(shared_prefixes([np.array(ids, np.int32) for ids in lists]))
    assert {frozenset(p.members.tolist()): p.length for p in prefixes} == holders
    assert len(prefixes) < len(lists)


# --- the bound ---


def completions_of(weights: Sequence[float]) -> list[tuple[list[int], list[float]]]:
    """Return all completions of a Markov policy, with the probabilities of their tokens: at most 3
    of 3 tokens, of which 0 ends the completion."""
    table = np.array(weights, float).reshape(3, 3) + 1e-3
    table /= table.sum(axis=1, keepdims=True)
    found = {ids[: ids.index(0) + 1] if 0 in ids else ids for ids in product(range(3), repeat=3)}
    steps = [(ids, zip((1, *ids[:-1]), ids, strict=True)) for ids in sorted(found)]
    return [(list(ids), [float(table[before, token]) for before, token in of]) for ids, of in steps]


@settings(deadline=None, max_examples=10)
@given(st.lists(st.floats(0, 1), min_size=9, max_size=9))
def test_bound_holds_exactly_for_every_policy_and_level(weights: list[float]) -> None:
    """P(p <= alpha) <= alpha for each alpha, by the probabilities of all pairs of completions; also
    if the other one comes from another policy, in an earlier round."""
    for is_earlier in (False, True):
        outcomes: list[tuple[float, float]] = []
        others = completions_of(weights[::-1] if is_earlier else weights)
        for (y, q), (z, other_q) in product(completions_of(weights), others):
            now = sample(y, bits=[-log2(x) for x in q])
            before = sample(z, index=1, bits=[-log2(x) for x in other_q])
            own = [now] if is_earlier else [now, before]
            test = collision_test(own, remembering([before] if is_earlier else []))
            outcomes.append((test.log2_p, float(np.prod(q) * np.prod(other_q))))
        assert sum(mass for _, mass in outcomes) == pytest.approx(1)
        for alpha, _ in outcomes:
            mass = sum(mass for log2_p, mass in outcomes if log2_p <= alpha + 1e-6)
            assert mass <= 2**alpha * (1 + 1e-5)


def test_the_number_of_sets_is_exact_and_the_level_is_spent_once() -> None:
    correction = Correction([(8, 5), (3, 0), (3, 0)])
    shared = [comb(8, 2) + 2 * comb(3, 2), comb(8, 3) + 2 * comb(3, 3), comb(8, 4), 0]
    assert [correction.num_sets(e, "shared") for e in (1, 2, 3, 8)] == shared
    assert [correction.num_sets(e, "frozen") for e in (1, 8)] == [8 * 5, 5]
    for sizes in ([(8, 0)] * 3, [(8, 5), (2, 0), (4, 64)]):
        correction = Correction(sizes)
        spent = sum(
            correction.num_sets(e, kind) * 2 ** -correction.log2_p(e, 0.0, kind)
            for e, kind in product(range(1, 200), ("shared", "frozen"))
            if correction.num_sets(e, kind)
        )
        assert 0.4 < spent <= 0.5  # half of it, for sets


# --- one round ---


E7 = 7 * 6
"""e (e - 1) for 8 copies."""

PAIR = [[(0, 0), (0, 1)]]
"""One collision is named, of the first two samples of group 0."""


@pytest.mark.parametrize(
    ("samples", "log2_p", "num_pairs", "max_bits", "places"),
    [
        # All pairs of all prompts count.
        (
            flat(groups_of([[1] * 40, [1] * 40], *([[2 * g], [2 * g + 1]] for g in range(1, 10)))),
            *(log2(10) + 2 - 40, 10, 40, PAIR),
        ),
        # 8 samples of 6 bits: no pair is improbable, all eight are.
        (
            group_of(*[[1, 2, 3]] * 8, bits=2.0),
            *(2 + log2(E7) - 7 * 6, 28, 6, [[(0, i) for i in range(8)]]),
        ),
        # A prefix in common, and then apart.
        (
            group_of([1, 2], [*LONG[:40], 3], [4], [*LONG[:40], 5, 6]),
            *(log2(6) + 2 - 40, 6, 40, [[(0, 1), (0, 3)]]),
        ),
        # Two groups of one prompt in a batch must not share noise either.
        ([sample(LONG), sample(LONG, group=7)], 1 - 60, 1, 60, [[(0, 0), (7, 0)]]),
        ([sample(LONG), sample(LONG, group=7, prompt="other")], 0, 0, 0, []),
        # Three copies, of which two go on alike, are one set; another prompt's pair is another.
        (
            [
                *group_of([*LONG, 1, 2], [*LONG, 1, 2], LONG),
                *group_of(LONG, LONG, group=1, prompt="other"),
            ],
            *(log2_fisher([-62, -60, -60]) + 1, 4, 62),
            [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1)]],
        ),
        # Beside an improbable pair, a pair of 1 bit is no collision to be named.
        (
            [*group_of([1] * 60, [1] * 60), *group_of([2, 5], [2, 6], group=1, prompt="other")],
            *(1 + 2 - 60, 2, 60, PAIR),
        ),
        (group_of([2, 5], [2, 6]), 0, 1, 1, []),
        # Top-k 1, forced tokens, a template's: copies without surprisal prove nothing.
        (group_of(*[[7] * 1000] * 16, bits=0.0), 0, 120, 0, []),
        # NaN; a log-probability of minus infinity; above 0: they add nothing.
        (group_of([1, 2, 3], [1, 2, 3], bits=[1.0, float("nan"), 2.0]), 1 - 3, 1, 3, PAIR),
        (group_of([1, 2, 3], [1, 2, 3], bits=[1.0, float("inf"), 2.0]), 1 - 3, 1, 3, PAIR),
        (group_of([1, 2, 3], [1, 2, 3], bits=[1.0, -3.0, 2.0]), 1 - 3, 1, 3, PAIR),
        # Kernels that disagree about a surprisal: the least counts.
        ([sample([1, 2], bits=9.0), sample([1, 2], bits=4.0, index=1)], 1 - 8, 1, 8, PAIR),
        # Predecessors: none; 10 shared bits with 1 different one; 5 with 1; none shared with 2.
        (
            group_of([1, 2], [1, 2], [1, 3], [4], bits=5.0),
            *(log2_fisher([-10.0, -5.0, 0.0]) + 1, 6, 10),
            [[(0, 0), (0, 1)], [(0, 0), (0, 1), (0, 2)]],
        ),
        ([], 0, 0, 0, []),
        (group_of([], [], [1]), 0, 3, 0, []),
    ],
)  # fmt: skip
def test_one_round(
    samples: list[SampleRow],
    log2_p: float,
    num_pairs: int,
    max_bits: float,
    places: list[list[tuple[int, int]]],
) -> None:
    for order in (samples, samples[::-1]):
        test = collision_test(order)
        assert test.log2_p == pytest.approx(log2_p, abs=1e-3)
        assert (test.num_pairs, test.num_untested) == (num_pairs, 0)
        assert test.max_bits == pytest.approx(max_bits, rel=1e-5)
        named = [[o.sample_id for o in c.samples] for c in test.collisions]
        assert [sorted((s.group, s.index) for s in members) for members in named] == places


def test_what_is_not_tested_or_is_very_long_or_much() -> None:
    """Samples without log-probabilities are counted. A p-value may be below the range of floats. At
    most 16 collisions are kept."""
    assert collision_test(group_of([1], [1], bits=None)) == CollisionTest(num_untested=2)
    assert len(collision_test(flat(groups_of(*[[LONG, LONG]] * 20))).collisions) == 16
    test = collision_test(group_of(*[list(range(32_768))] * 8))
    assert test.collisions[0].num_tokens == 4096
    assert test.log2_p == pytest.approx(-7 * 4096, rel=1e-2)
    assert re.fullmatch(r"\d\.\de-8\d{3}", format_p(test.log2_p * log10(2)))
    for p, text in ((1, "1"), (0.25, "0.25"), (3.2e-8, "3.2e-8"), (9.97e-11, "1.0e-10")):
        assert format_p(log10(p)) == text


# --- frozen noise, and many sets of which none is improbable alone ---


def test_fisher_is_its_definition_also_beyond_what_floats_hold() -> None:
    ps = [0.01, 0.5, 1.0, 0.2]
    expected = combine_pvalues(ps, method="fisher").pvalue
    assert 2 ** log2_fisher([log2(p) for p in ps]) == pytest.approx(expected)
    exact = log2(chdtrc(4, 2 * np.log(2) * 820))
    assert log2_fisher([-400.0, -420.0]) == pytest.approx(exact)
    assert log2_fisher([-5000.0] * 2) == pytest.approx(log2(1 + 1e4 * np.log(2)) - 10_000)
    assert log2_fisher([]) == log2_fisher([0.0] * 100) == log2_fisher([-1.0] * 9) == 0.0


def test_frozen_rounds_of_short_completions_count_together() -> None:
    """64 completions of 10 bits come again: none is improbable alone, all together are. Without the
    memory nothing is."""
    ids = [[[i * 100 + g, i] for i in range(8)] for g in range(8)]
    first, second = (flat(groups_of(*ids, step=step, bits=5.0)) for step in (0, 1))
    test = collision_test(second, remembering(first))
    assert test.log2_p < log2(1e-6)
    for collision in test.collisions:
        (now,), (then,) = collision.samples, collision.earlier
        assert collision.kind == "frozen"
        assert (now.sample_id, then.sample_id.step) == (replace(then.sample_id, step=1), 0)
    assert collision_test(flat(groups_of(*ids, step=1)), remembering([])).log2_p == 0.0


def test_p_values_count_different_predecessors_of_the_memory_too() -> None:
    """[1, 2, 9] is twice in the memory, so the first sample has 2 different predecessors, and the
    second one 3."""
    memory = remembering(group_of([1, 2, 9], [1, 2, 9], [7]))
    test = collision_test(group_of([1, 2, 3], [1, 2, 3], step=1, bits=[6.0, 6.0, 1.0]), memory)
    # The pair has 13 bits; of it and the memory, the first set of 2 x 6 samples has 12.
    together = log2_fisher([1 - 12.0, log2(3) - 13.0]) + 1
    pair = log2(1) + 3 - 13
    frozen = [log2(2 * 3) + 3 - 12, log2(1 * 3) + 3 + log2(2) - 2 * 12]
    assert test.log2_p == pytest.approx(min(together, pair, *frozen), abs=1e-3)
    assert [c.log2_p for c in test.collisions] == pytest.approx([frozen[1]], abs=1e-3)
    assert (test.num_pairs, test.num_earlier_pairs) == (1, 6)
    assert test.max_bits == pytest.approx(13, rel=1e-5)


# --- the memory ---


def test_memory_is_bounded_in_all_and_for_each_prompt() -> None:
    """A sample counts 1,000 bytes, and 4 for each token. The oldest prompts are dropped."""
    memory, prompts = PromptMemory(max_bytes=8 * 57 * 1080 + 1), [f"{n}" for n in range(200)]
    for prompt in prompts:
        memory.remember(group_of(*[list(range(20))] * 8, prompt=prompt))
    assert [len(memory.earlier(prompt)) for prompt in prompts] == [0] * 143 + [8] * 57
    memory = remembering([sample([4], prompt="other")])
    for step in range(MAX_PER_PROMPT + 2):
        memory.remember([sample([1, 2, 3], step=step)])
    steps = [kept.sample_id.step for kept in memory.earlier("prompt")]
    assert steps == list(range(2, MAX_PER_PROMPT + 2))
    assert len(memory.earlier("other")) == 1


def test_a_completion_is_kept_to_its_first_96_bits_or_4096_tokens() -> None:
    for bits, num_tokens, kept in ((8, 500, 12), (95, 500, 2), (97, 500, 1), (1, 50, 50)):
        generated = sample(range(num_tokens), bits=bits)
        (beginning,) = remembering([generated]).earlier("prompt")
        assert list(beginning.token_ids) == list(range(kept))
        assert (beginning.logprobs, beginning.sample_id) == (None, generated.sample_id)
    ids = np.arange(5000, dtype=np.int32)  # as the recorder makes them
    (beginning,) = remembering([replace(sample([]), token_ids=ids)]).earlier("prompt")
    assert list(beginning.token_ids) == list(range(4096))
    assert not np.shares_memory(beginning.token_ids, ids)
