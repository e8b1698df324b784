"""Requests spread over replicas: all of them, evenly, and always in the same way (SPEC G5)."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_grpo_ext.rollout.dispatch import balance, estimate_cost

costs_of_requests = st.lists(st.integers(1, 1000), max_size=30)
capacities_of_replicas = st.lists(st.integers(1, 8), min_size=1, max_size=6)


def loads(costs: Sequence[float], shares: list[list[int]]) -> list[float]:
    return [sum(costs[i] for i in share) for share in shares]


@pytest.mark.parametrize(
    ("costs", "capacities", "expected"),
    [
        ([], [1.0, 1.0], [[], []]),
        ([5], [1.0, 1.0], [[0], []]),
        ([1, 1, 1, 1], [1.0, 1.0], [[0, 2], [1, 3]]),
        ([1, 1, 8, 1, 5], [1.0, 1.0], [[2], [0, 1, 3, 4]]),
        ([1, 1, 1, 1, 1, 1], [1.0, 2.0], [[1, 4], [0, 2, 3, 5]]),
        ([7, 3, 2], [1.0], [[0, 1, 2]]),
        ([4, 4], [1.0, 4.0], [[], [0, 1]]),
    ],
)
def test_shares_by_example(
    costs: list[float], capacities: list[float], expected: list[list[int]]
) -> None:
    assert balance(costs, capacities) == expected


@settings(deadline=None)
@given(costs_of_requests, capacities_of_replicas)
def test_every_request_is_served_once(costs: list[float], capacities: list[float]) -> None:
    shares = balance(costs, capacities)
    assert len(shares) == len(capacities)
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_the_longest_replica_is_within_grahams_bound(costs: list[int], num_replicas: int) -> None:
    """4/3 - 1/(3m) of the best possible on m equal replicas."""
    longest = max(loads(costs, balance(costs, [1.0] * num_replicas)))
    best = min(
        max(sum(c for c, r in zip(costs, choice, strict=True) if r == i) for i in set(choice))
        for choice in itertools.product(range(num_replicas), repeat=len(costs))
    )
    assert longest <= best * (4 / 3 - 1 / (3 * num_replicas)) + 1e-9


@settings(deadline=None)
@given(costs_of_requests.filter(bool), capacities_of_replicas)
def test_no_replica_waits_longer_than_one_request(
    costs: list[float], capacities: list[float]
) -> None:
    """Also where replicas differ in speed."""
    of_replicas = zip(loads(costs, balance(costs, capacities)), capacities, strict=True)
    ends = [load / speed for load, speed in of_replicas]
    assert max(ends) - min(ends) <= max(costs) / min(capacities) + 1e-9


@pytest.mark.parametrize("capacities", [[1.0, 2.0], [2.0, 1.0], [3.0, 6.0]])
def test_a_server_with_two_replicas_gets_twice_as_much(capacities: list[float]) -> None:
    sizes = [len(share) for share in balance([7.0] * 30, capacities)]
    assert sizes == [30 * capacity / sum(capacities) for capacity in capacities]


@pytest.mark.parametrize("costs", [[], [1.0]])
def test_no_replica_is_an_error(costs: list[float]) -> None:
    with pytest.raises(ValueError, match="No replica is left to serve requests"):
        balance(costs, [])


PROMPT: dict[str, Any] = {"messages": [{"role": "user", "content": "词" * 400}]}
PHOTOGRAPH = base64.b64encode(b"\xff" * 300_000).decode()


@pytest.mark.parametrize(
    ("request_", "count", "max_tokens", "tokens"),
    [
        (PROMPT, 1, 0, 100),
        (PROMPT, 1, 256, 356),
        (PROMPT, 8, 256, 2148),
        ({}, 8, 256, 2048),
        ({"messages": None, "images": None}, 1, 10, 10),
        ({"messages": [{"role": "assistant", "content": None}]}, 1, 10, 10),
        ({"messages": [{"role": "user", "content": [1] * 400}]}, 1, 0, 400),
        ({"images": ["a.png"]}, 1, 0, 1000),
        ({"images": ["a.png", {"path": "b.png"}], "videos": ["c.mp4"]}, 1, 0, 3000),
        ({"images": [PHOTOGRAPH]}, 1, 0, 750),
    ],
)
def test_costs_by_example(
    request_: dict[str, Any], count: int, max_tokens: int, tokens: float
) -> None:
    assert estimate_cost(request_, count, max_tokens) == tokens
