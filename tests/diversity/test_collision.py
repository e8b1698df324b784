"""The collision test: the bound by exact enumeration, the correction, faults, and bad input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import comb, log, log2, log10
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc
from scipy.stats import combine_pvalues

from swift_grpo_ext.diversity.collision import (
    PromptMemory,
    _Correction,
    collision_test,
    common_length,
    format_p,
    log2_fisher,
    shared_prefixes,
)
from swift_grpo_ext.diversity.sample import Sample
from tests.diversity.samples import group_of, sample

sequences = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8)


# --- prefixes ---


@given(sequences)
def test_shared_prefixes_are_all_there(lists: list[list[int]]) -> None:
    """Against brute force: for every prefix, who has it."""
    tokens = [np.array(ids, np.int32) for ids in lists]
    holders: dict[frozenset[int], int] = {}
    for ids in lists:
        for length in range(1, len(ids) + 1):
            who = frozenset(i for i, o in enumerate(lists) if o[:length] == ids[:length])
            if len(who) > 1:
                holders[who] = max(length, holders.get(who, 0))
    found = {frozenset(p.members.tolist()): p.length for p in shared_prefixes(tokens)}
    assert found == holders
    assert len(list(shared_prefixes(tokens))) < len(lists)


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [1], 0), ([1], [1, 2], 1), ([1, 2, 3], [1, 3, 3], 1), ([1], [1], 1)]
)
def test_common_length(a: list[int], b: list[int], length: int) -> None:
    assert common_length(np.array(a, np.int32), np.array(b, np.int32)) == length


# --- the bound ---


class Markov:
    """A policy over 3 tokens, of which 0 ends the completion; at most 3 tokens."""

    def __init__(self, weights: Sequence[float]) -> None:
        table = np.array(weights, float).reshape(3, 3) + 1e-3
        self.table = table / table.sum(axis=1, keepdims=True)

    def completions(self) -> list[tuple[list[int], list[float]]]:
        """All, with the probabilities of their tokens."""
        found: list[tuple[list[int], list[float]]] = []
        for ids in product(range(3), repeat=3):
            end = ids.index(0) + 1 if 0 in ids else 3
            kept = list(ids[:end])
            if kept not in [other for other, _ in found]:
                q = [float(self.table[b, t]) for b, t in zip([1, *kept[:-1]], kept, strict=True)]
                found.append((kept, q))
        return found


@settings(deadline=None, max_examples=10)
@given(st.lists(st.floats(0, 1), min_size=9, max_size=9))
def test_bound_holds_exactly_for_every_policy_and_level(weights: list[float]) -> None:
    """All pairs of completions, with their probabilities: P(p <= alpha) <= alpha, whatever alpha;
    also with the first of another policy (an earlier round)."""
    policy, earlier_policy = Markov(weights), Markov(weights[::-1])
    outcomes: dict[str, list[tuple[float, float]]] = {"shared": [], "frozen": []}
    for y, q in policy.completions():
        for kind, other in (("shared", policy), ("frozen", earlier_policy)):
            for z, other_q in other.completions():
                now, before = sample(y, bits=[-log2(x) for x in q]), sample(z, index=1)
                if kind == "shared":
                    before = sample(z, index=1, bits=[-log2(x) for x in other_q])
                    test = collision_test([now, before])
                else:
                    memory = PromptMemory()
                    memory.remember([before])
                    test = collision_test([now], memory)
                outcomes[kind].append((test.log2_p, float(np.prod(q) * np.prod(other_q))))
    for found in outcomes.values():
        assert sum(mass for _, mass in found) == pytest.approx(1)
        for alpha, _ in found:
            mass = sum(mass for log2_p, mass in found if log2_p <= alpha + 1e-6)
            assert mass <= 2**alpha * (1 + 1e-5)


def test_correction_counts_all_pairs_of_all_prompts() -> None:
    groups = [group_of([1] * 40, [1] * 40, fingerprint="a")]
    groups += [group_of([2 * g], [2 * g + 1], group=g, fingerprint=f"p{g}") for g in range(1, 10)]
    test = collision_test([s for group in groups for s in group])
    assert test.num_pairs == 10
    assert test.log2_p == pytest.approx(log2(10) + 2 - 40, abs=1e-4)
    assert test.max_bits == pytest.approx(40, rel=1e-5)


def test_copies_of_a_whole_group_count_together() -> None:
    """8 samples of 6 bits: no pair is improbable, all eight are."""
    test = collision_test(group_of(*[[1, 2, 3]] * 8, bits=2.0))
    e = 7
    assert test.log2_p == pytest.approx(log2(comb(8, 8)) + 2 + log2(e * (e - 1)) - e * 6, abs=1e-3)
    assert len(test.collisions[0].samples) == 8


def test_partial_collisions_are_found() -> None:
    """A prefix in common, and then apart."""
    prefix = list(range(100, 140))
    test = collision_test(group_of([1, 2], [*prefix, 3], [4], [*prefix, 5, 6]))
    (collision,) = test.collisions
    assert [o.sample_id.index for o in collision.samples] == [1, 3]
    assert (collision.kind, collision.num_tokens) == ("shared", 40)
    assert collision.log2_p == test.log2_p < log2(1e-6)


def test_equal_prompts_of_two_groups_are_one() -> None:
    """A prompt that stands twice in a batch: its groups must not share noise either."""
    ids = list(range(50))
    test = collision_test([sample(ids, group=0), sample(ids, group=7)])
    assert {o.sample_id.group for o in test.collisions[0].samples} == {0, 7}
    other = collision_test([sample(ids, group=0), sample(ids, group=7, fingerprint="other")])
    assert (other.log2_p, other.num_pairs) == (0.0, 0)


def test_sure_tokens_add_nothing() -> None:
    """Top-k 1, forced tokens, a template's: copies without surprisal prove nothing."""
    assert collision_test(group_of(*[[7] * 1000] * 16, bits=0.0)).log2_p == 0.0
    assert collision_test(group_of(*[[7] * 1000] * 16, bits=-1e-9)).log2_p == 0.0


@pytest.mark.parametrize("unusable", [float("nan"), float("inf"), -3.0])
def test_unusable_values_add_nothing(unusable: float) -> None:
    """NaN; log-probability minus infinity; above 0."""
    test = collision_test(group_of([1, 2, 3], [1, 2, 3], bits=[1.0, unusable, 2.0]))
    assert test.max_bits == pytest.approx(3.0)


def test_missing_logprobs_are_not_tested_but_counted() -> None:
    test = collision_test(group_of(*[[1] * 99] * 4, bits=None))
    assert (test.log2_p, test.num_untested, test.is_tested) == (0.0, 4, False)
    assert test.collisions == []


def test_empty_and_single_completions() -> None:
    assert collision_test([]).log2_p == 0.0
    assert collision_test([sample([])]).num_pairs == 0
    assert collision_test(group_of([], [], [1])).log2_p == 0.0


def test_kernels_that_disagree_count_for_the_least() -> None:
    pair = [sample([1, 2], bits=9.0), sample([1, 2], bits=4.0, index=1)]
    assert collision_test(pair).max_bits == pytest.approx(8)


def test_long_copies_stay_in_bounds() -> None:
    """32k tokens, and a p-value that no float holds."""
    test = collision_test(group_of(*[list(range(32_768))] * 8))
    assert test.collisions[0].num_tokens == 4096
    assert test.log2_p == pytest.approx(-7 * 4096, rel=1e-2)
    assert re.fullmatch(r"\d\.\de-8\d{3}", format_p(test.log2_p * log10(2)))


@settings(deadline=None)
@given(st.permutations(range(6)), st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=6,
                                           max_size=6))  # fmt: skip
def test_order_does_not_matter(order: list[int], lists: list[list[int]]) -> None:
    samples = [sample(ids, index=i, bits=7.0) for i, ids in enumerate(lists)]
    assert collision_test([samples[i] for i in order]).log2_p == collision_test(samples).log2_p


@pytest.mark.parametrize(
    ("p", "text"), [(1.0, "1"), (0.25, "0.25"), (0.0099, "0.0099"), (3.2e-8, "3.2e-8"),
                    (9.97e-11, "1.0e-10")]
)  # fmt: skip
def test_p_values_as_people_write_them(p: float, text: str) -> None:
    assert format_p(log10(p)) == text


# --- frozen noise ---


def rounds_of(*rounds: Sequence[Sequence[int]], **kwargs: Any) -> list[list[Sample]]:
    return [group_of(*ids, step=step, **kwargs) for step, ids in enumerate(rounds)]


def test_frozen_noise_is_seen_in_the_second_round() -> None:
    ids = [list(range(start, start + 40)) for start in (0, 100, 200, 300)]
    first, second = rounds_of(ids, ids)
    memory = PromptMemory()
    assert collision_test(first, memory).log2_p == 0.0
    memory.remember(first)
    test = collision_test(second, memory)
    assert test.log2_p < log2(16 * 8) - 40
    for collision in test.collisions:
        (now,), (then,) = collision.samples, collision.earlier
        assert collision.kind == "frozen"
        assert (now.sample_id.step, then.sample_id.step) == (1, 0)
        assert now.sample_id.index == then.sample_id.index


def test_another_prompt_is_not_frozen() -> None:
    memory = PromptMemory()
    memory.remember(group_of([1] * 99))
    assert collision_test(group_of([1] * 99, fingerprint="other"), memory).log2_p == 0.0


def test_places_of_offenders_are_named() -> None:
    ids = list(range(60))
    pair = [sample(ids, index=i, rank=i, replica=f"server {i} replica 0", seed=5) for i in (0, 1)]
    (collision,) = collision_test(pair).collisions
    assert [(o.rank, o.replica, o.seed) for o in collision.samples] == [
        (0, "server 0 replica 0", 5),
        (1, "server 1 replica 0", 5),
    ]
    assert replace(collision, log2_p=0.0).samples == collision.samples


# --- many sets, none improbable alone ---


def test_fisher_is_its_definition() -> None:
    """Against scipy's own combination, and beyond what floats hold."""
    ps = [0.01, 0.5, 1.0, 0.2]
    expected = combine_pvalues(ps, method="fisher").pvalue
    assert 2 ** log2_fisher([log2(p) for p in ps]) == pytest.approx(expected)
    assert log2_fisher([]) == 0.0
    assert log2_fisher([0.0] * 100) == 0.0
    assert log2_fisher([-5000.0] * 2) == pytest.approx(-10_000, rel=1e-2)
    near, far = log2_fisher([-400.0] * 2), log2_fisher([-430.0] * 2)
    assert near - far == pytest.approx(60, rel=0.25)


def test_frozen_rounds_of_short_completions_count_together() -> None:
    """64 completions of 10 bits, all as they were: no one of them is improbable among so many."""
    groups = [[[i * 100 + g, i] for i in range(8)] for g in range(8)]
    rounds = [
        [
            s
            for g, ids in enumerate(groups)
            for s in group_of(*ids, group=g, step=step, fingerprint=f"{g}", bits=5.0)
        ]
        for step in (0, 1)
    ]
    memory = PromptMemory()
    memory.remember(rounds[0])
    test = collision_test(rounds[1], memory)
    assert test.log2_p < log2(1e-6)
    assert all(collision.log2_p > test.log2_p for collision in test.collisions)
    assert {s.kind for s in test.collisions} == {"frozen"}


def test_many_groups_with_common_duplicates_are_no_alarm() -> None:
    """Answers of one bit: duplicates everywhere, as chance has it."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        samples = [
            sample([int(rng.integers(2))], group=g, index=i, fingerprint=f"{g}")
            for g in range(16)
            for i in range(8)
        ]
        assert collision_test(samples).log2_p == 0.0


def test_p_values_of_samples_are_exact() -> None:
    """Predecessors: none; 10 shared bits with 1 different one; 5 with 1; none shared with 2."""
    samples = group_of([1, 2], [1, 2], [1, 3], [4], bits=5.0)
    expected = log2_fisher([-10.0, -5.0, 0.0]) + 1
    assert collision_test(samples).log2_p == pytest.approx(expected, abs=1e-4)
    assert expected < log2(6) + 2 - 10  # the least probable pair alone says less


def test_p_values_count_different_predecessors_of_the_memory_too() -> None:
    """[1, 2, 9] stands twice in the memory: 2 different ones for the first sample, 3 for the
    second, which repeats the first."""
    memory = PromptMemory()
    memory.remember(group_of([1, 2, 9], [1, 2, 9], [7]))
    samples = group_of([1, 2, 3], [1, 2, 3], step=1, bits=[6.0, 6.0, 1.0])
    test = collision_test(samples, memory)
    # The pair has 13 bits; of it and the memory, the first set of 2 x 6 samples has 12.
    together = log2_fisher([1 - 12.0, log2(3) - 13.0]) + 1
    pair = log2(1) + 3 - 13
    frozen = [log2(2 * 3) + 3 - 12, log2(1 * 3) + 3 + log2(2) - 2 * 12]
    assert test.log2_p == pytest.approx(min(together, pair, *frozen), abs=1e-3)
    assert sorted(c.log2_p for c in test.collisions) == pytest.approx([frozen[1]], abs=1e-3)
    assert (test.num_pairs, test.num_earlier_pairs) == (1, 6)
    assert test.max_bits == pytest.approx(13, rel=1e-5)


@pytest.mark.parametrize("fault", ["none", "frozen"])
def test_rounds_held_against_a_memory_alarm_as_rarely_as_promised(fault: str) -> None:
    """Sound rounds of 8 groups of 4, with 2 rounds of each prompt remembered: p < alpha in a share
    of alpha of them at most. With frozen noise of 3 bits a sample, most are below 0.5."""
    rng = np.random.default_rng(1)
    policy = Markov([3.0, 1.0, 2.0, 0.5, 2.0, 1.0, 0.2, 1.0, 3.0])
    completions = policy.completions()
    mass = np.array([np.prod(q) for _, q in completions])
    found = []
    for _ in range(60):
        memory = PromptMemory()
        noise = rng.choice(len(completions), 32, p=mass / mass.sum())
        for step in range(3):
            if step and fault == "none":
                noise = rng.choice(len(completions), 32, p=mass / mass.sum())
            drawn = [completions[i] for i in noise]
            samples = [
                sample(ids, bits=[-log2(x) for x in q], step=step, group=i // 4, index=i % 4,
                       fingerprint=f"{i // 4}")
                for i, (ids, q) in enumerate(drawn)
            ]  # fmt: skip
            log2_p = collision_test(samples, memory).log2_p
            memory.remember(samples)
        found.append(log2_p)
    for alpha in (0.5, 0.1, 0.02):
        share = np.mean(np.array(found) < log2(alpha))
        allowed = alpha + 3 * np.sqrt(alpha * (1 - alpha) / len(found))
        if fault == "none":
            assert share <= allowed
    assert (np.mean(np.array(found) < -1) > 0.5) == (fault == "frozen")


def test_shares_of_the_level_add_up_to_at_most_one() -> None:
    """Of all sets that a round is searched for: the level is spent once, half of it on sets."""
    for sizes in ([(8, 0)] * 3, [(8, 5), (2, 0), (4, 64)]):
        correction = _Correction(sizes)
        spent = 0.0
        for e in range(1, 200):
            for kind in ("shared", "frozen"):
                num_sets = correction.num_sets(e, kind)
                if num_sets:
                    per_set = 2 ** -(correction.log2_p(e, 0.0, kind))
                    spent += num_sets * per_set
        assert 0.4 < spent <= 0.5


def test_the_number_of_sets_is_exact() -> None:
    correction = _Correction([(8, 5), (3, 0), (3, 0)])
    assert correction.num_sets(1, "shared") == comb(8, 2) + 2 * comb(3, 2)
    assert correction.num_sets(2, "shared") == comb(8, 3) + 2 * comb(3, 3)
    assert correction.num_sets(3, "shared") == comb(8, 4)
    assert correction.num_sets(8, "shared") == 0
    assert correction.num_sets(1, "frozen") == 8 * 5
    assert correction.num_sets(8, "frozen") == 5


def test_collisions_within_another_are_left_out() -> None:
    """Three copies, of which two go on alike: one set. Another prompt's pair is another."""
    ids = list(range(60))
    samples = group_of([*ids, 1, 2], [*ids, 1, 2], ids, bits=1.0)
    samples += group_of(ids, ids, group=1, fingerprint="other")
    test = collision_test(samples)
    found = [(len(c.samples), c.num_tokens) for c in test.collisions]
    assert found == [(3, 60), (2, 60)]


def test_at_most_16_collisions_are_kept() -> None:
    ids = list(range(60))
    groups = [group_of(ids, ids, group=g, fingerprint=f"{g}") for g in range(20)]
    assert len(collision_test([s for group in groups for s in group]).collisions) == 16


def test_what_proves_nothing_is_not_kept() -> None:
    """Beside an improbable pair, a pair of 1 bit is no collision to be named."""
    samples = group_of([1] * 60, [1] * 60)
    samples += group_of([2, 5], [2, 6], group=1, fingerprint="other")
    (collision,) = collision_test(samples).collisions
    assert collision.samples[0].sample_id.group == 0
    assert collision_test(samples[2:]).collisions == []


def test_fisher_far_out_is_chernoffs_bound() -> None:
    """2 n degrees of freedom, statistic s: (s / 2n)^n e^(n - s/2), above the tail itself."""
    log2_ps = [-600.0, -500.0]
    s, n = 2 * log(2) * 1100, 2
    assert log2_fisher(log2_ps) == pytest.approx((n * log(s / (2 * n)) + n - s / 2) / log(2))
    near = [-400.0, -420.0]
    exact = log2(chdtrc(4, 2 * log(2) * 820))
    assert log2_fisher(near) == pytest.approx(exact)
