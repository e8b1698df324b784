"""The memory of earlier rounds: what it keeps, what it drops first, and its count of bytes."""

from __future__ import annotations

import numpy as np
import pytest

from swift_grpo_ext.diversity.collision import (
    BYTES_BESIDE_TOKENS,
    MAX_KEPT_TOKENS,
    MAX_PER_PROMPT,
    PromptMemory,
)
from tests.diversity.samples import group_of, sample


def test_memory_is_bounded_over_many_rounds() -> None:
    memory = PromptMemory(max_bytes=100_000)
    sizes = []
    for step in range(200):
        ids = [[step] * 2000 for _ in range(4)]
        memory.remember(group_of(*ids, step=step, fingerprint=f"p{step}", bits=0.01))
        sizes.append(memory.num_bytes)
    assert max(sizes) <= 100_000
    assert sizes[-1] >= 100_000 - 4 * (4 * MAX_KEPT_TOKENS + BYTES_BESIDE_TOKENS)
    assert memory.earlier("p0") == []
    kept = memory.earlier("p199")
    assert [len(k.token_ids) for k in kept] == [MAX_KEPT_TOKENS] * 4


def test_a_prompt_keeps_its_latest_samples() -> None:
    memory = PromptMemory()
    for step in range(MAX_PER_PROMPT):
        memory.remember(group_of([step], [step], step=step))
    steps = [kept.origin.sample_id.step for kept in memory.earlier("prompt")]
    assert len(steps) == MAX_PER_PROMPT
    assert (steps[0], steps[-1]) == (MAX_PER_PROMPT // 2, MAX_PER_PROMPT - 1)


def test_improbable_beginnings_are_enough() -> None:
    memory = PromptMemory()
    memory.remember(group_of(list(range(500)), bits=8.0))
    assert len(memory.earlier("prompt")[0].token_ids) == 12


def test_bytes_are_counted_exactly() -> None:
    memory = PromptMemory()
    memory.remember([sample([1, 2, 3]), sample([4], fingerprint="other"), sample([])])
    assert memory.num_bytes == 2 * BYTES_BESIDE_TOKENS + 4 * 4
    for step in range(MAX_PER_PROMPT):
        memory.remember([sample([1, 2, 3], step=step)])
    assert memory.num_bytes == (MAX_PER_PROMPT + 1) * BYTES_BESIDE_TOKENS + 4 * (
        3 * MAX_PER_PROMPT + 1
    )


def test_the_prompt_seen_longest_ago_goes_first() -> None:
    """`a` is seen again after `b`, so `b` has to go when `c` comes."""
    size = BYTES_BESIDE_TOKENS + 4
    memory = PromptMemory(max_bytes=3 * size)
    for fingerprint in ("a", "b", "a"):
        memory.remember([sample([1], fingerprint=fingerprint)])
    assert memory.num_bytes == 3 * size  # full, not beyond
    assert [len(memory.earlier(name)) for name in "abc"] == [2, 1, 0]
    memory.remember([sample([1], fingerprint="c")])
    assert [len(memory.earlier(name)) for name in "abc"] == [2, 0, 1]
    memory.remember([sample([1], fingerprint="d")])
    assert [len(memory.earlier(name)) for name in "abcd"] == [0, 0, 1, 1]
    assert memory.num_bytes == 2 * size


def test_asking_keeps_nothing_alive() -> None:
    size = BYTES_BESIDE_TOKENS + 4
    memory = PromptMemory(max_bytes=size)
    assert memory.earlier("a") == []
    for fingerprint in ("a", "b"):
        memory.remember([sample([1], fingerprint=fingerprint)])
        memory.earlier("a")
    assert [len(memory.earlier(name)) for name in "ab"] == [0, 1]


@pytest.mark.parametrize(
    ("bits", "num_tokens", "kept"),
    [(8.0, 500, 12), (95.0, 500, 2), (97.0, 500, 1), (1.0, 50, 50), (0.0, 1200, 1024)],
)
def test_a_completion_is_kept_to_its_first_96_bits_or_1024_tokens(
    bits: float, num_tokens: int, kept: int
) -> None:
    memory = PromptMemory()
    drawn = sample(list(range(num_tokens)), bits=bits, step=3)
    memory.remember([drawn])
    (found,) = memory.earlier("prompt")
    assert found.token_ids.tolist() == list(range(kept))
    assert (found.token_ids.dtype, found.origin) == (np.int32, drawn.origin)
    assert not np.shares_memory(found.token_ids, drawn.token_ids)
