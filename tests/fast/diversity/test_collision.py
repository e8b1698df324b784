"""The collision test finds shared and repeated noise, and calls independent samples broken no more
often than it promises (D2, R4)."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import comb, log2, log10

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.special import chdtrc
from scipy.stats import combine_pvalues

from swift_grpo_ext.diversity.collision import (
    MAX_PER_PROMPT,
    CollisionTest,
    PromptMemory,
    collision_test,
    format_p,
    log2_fisher,
)
from swift_grpo_ext.record.tables import SampleRow
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.diversity.samples import LONG, group_of, groups_of, sample


def remembering(samples: Sequence[SampleRow]) -> PromptMemory:
    memory = PromptMemory()
    memory.remember(samples)
    return memory


def flat(groups: Sequence[Sequence[SampleRow]]) -> list[SampleRow]:
    return [sample for group in groups for sample in group]


LISTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


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


@given(st.lists(st.tuples(LISTS, LISTS), max_size=3), st.sampled_from([0.0, 0.5, 2.0, 5.0]))
@example([([[0] * 3, [0] * 3, [0] * 2], [])], 5.0)
def test_the_p_value_is_its_definition(
    prompts: list[tuple[list[list[int]], list[list[int]]]], bits: float
) -> None:
    """Brute force goes over all prefixes of each prompt's samples, now and before. They are in two
    groups. Odd ones have twice the surprisal: the least counts. Each improbable set is named, maybe
    as a part of another one."""
    sizes = [(len(now), len(before)) for now, before in prompts]
    families = 2 if any(n * m for n, m in sizes) else 1

    def num_shared(e: int) -> int:
        return sum(comb(n, e + 1) for n, _ in sizes)

    def num_frozen(e: int) -> int:
        return sum(comb(n, e) * m for n, m in sizes)

    rows, memory, log2_ps, fisher_log2_ps, max_bits = [], PromptMemory(), [0.0], [], 0.0
    improbable: dict[frozenset[SampleId], list[float]] = {}
    for group, (now, before) in enumerate(prompts):
        bits_of = [bits * (1 + i % 2) for i in range(len(now))]
        prompt, places = f"{group}", [(2 * group + (i > 1), i) for i in range(len(now))]
        for (number, i), o in zip(places, now, strict=True):
            rows.append(sample(o, bits=bits_of[i], prompt=prompt, group=number, index=i))
        memory.remember(group_of(*before, step=-1, group=group, prompt=prompt))
        for prefix in {tuple(o[:end]) for o in now for end in range(1, len(o) + 1)}:
            members_of = [i for i, o in enumerate(now) if tuple(o[: len(prefix)]) == prefix]
            least, size = len(prefix) * min(bits_of[i] for i in members_of), len(members_of)
            sets = [("shared", 1), ("shared", size - 1)] if size > 1 else []
            max_bits = max(max_bits, least * (size > 1))
            if any(tuple(o[: len(prefix)]) == prefix for o in before):
                sets += [("frozen", 1), ("frozen", size)]
            for kind, e in sets:
                num_sets = num_shared(e) if kind == "shared" else num_frozen(e)
                log2_ps.append(log2(num_sets * max(e * (e - 1), 1) * families) + 2 - e * least)
                if log2_ps[-1] < 1e-3:  # 0 but for rounding may be named
                    members = frozenset(rows[i - len(now)].sample_id for i in members_of)
                    improbable.setdefault(members, []).append(log2_ps[-1])
        known = {tuple(o) for o in before}
        for i, o in enumerate(now):
            if known:
                ends = [end for end in range(len(o) + 1) for b in known if (*o[:end],) == b[:end]]
                fisher_log2_ps.append(min(0.0, log2(len(known)) - bits_of[i] * max(ends)))
            known.add(tuple(o))
    test = collision_test(rows[::-1], memory)
    expected = min(*log2_ps, log2_fisher(fisher_log2_ps) + 1)
    assert (test.log2_p, test.max_bits) == pytest.approx((min(expected, 0.0), max_bits), abs=1e-3)
    assert (test.num_pairs, test.num_earlier_pairs) == (num_shared(1), num_frozen(1))
    if min(log2_ps) < 0 and len(test.collisions) < 16:
        by_p = test.collisions[::-1]  # the most improbable ones last
        named = {frozenset(s.sample_id for s in c.samples): c.log2_p for c in by_p}
        assert named == pytest.approx({ids: min(improbable[ids]) for ids in named}, abs=1e-3)
        clear = [ids for ids, found in improbable.items() if min(found) < -1e-3]
        assert all(any(ids <= others for others in named) for ids in clear)
        wholes = [frozenset(s.sample_id for s in (*c.samples, *c.earlier)) for c in test.collisions]
        assert not any(a < b for a in wholes for b in wholes[: wholes.index(a)])


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -3.0])
def test_impossible_log_probabilities_add_nothing(odd: float) -> None:
    test = collision_test(group_of([1, 2, 3], [1, 2, 3], bits=[1.0, odd, 2.0]))
    assert (test.log2_p, len(test.collisions)) == (pytest.approx(1 - 3), 1)


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


def test_fisher_is_its_definition_also_beyond_what_floats_hold() -> None:
    ps = [0.01, 0.5, 1.0, 0.2]
    expected = combine_pvalues(ps, method="fisher").pvalue
    assert 2 ** log2_fisher([log2(p) for p in ps]) == pytest.approx(expected)
    exact = log2(chdtrc(4, 2 * np.log(2) * 820))
    assert log2_fisher([-400.0, -420.0]) == pytest.approx(exact)
    assert log2_fisher([-5000.0] * 2) == pytest.approx(log2(1 + 1e4 * np.log(2)) - 10_000)
    assert log2_fisher([]) == log2_fisher([0.0] * 100) == log2_fisher([-1.0] * 9) == 0.0


def test_frozen_rounds_of_short_completions_count_together() -> None:
    """64 completions of 10 bits come again. None is improbable alone; all together are, and so each
    is named."""
    ids = [[[i * 100 + g, i] for i in range(8)] for g in range(8)]
    first, second = (flat(groups_of(*ids, step=step, bits=5.0)) for step in (0, 1))
    test = collision_test(second, remembering(first))
    assert test.log2_p < log2(1e-6)
    for collision in test.collisions:
        (now,), (then,) = collision.samples, collision.earlier
        assert (collision.kind, collision.log2_p > 0) == ("frozen", True)
        assert (now.sample_id, then.sample_id.step) == (replace(then.sample_id, step=1), 0)
    assert len(test.collisions) == 16


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
