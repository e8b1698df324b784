"""Media that are joined when they are read: values of `torch.cat`, memory of what differs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from swift_grpo_ext.media.lazy_concat import LazyConcat, is_rows

IMAGE, OTHER = torch.arange(12.0).reshape(4, 3), torch.arange(6.0).reshape(2, 3) - 7
JOINED = torch.cat([IMAGE, OTHER, IMAGE])


def group() -> Any:
    """As a collator makes it, of tensors that samples of a group share."""
    return torch.concat([LazyConcat([part.detach()]) for part in (IMAGE, OTHER, IMAGE)])


@pytest.mark.parametrize(
    ("change", "num_distinct"),
    [
        (lambda x: x.to("cpu:0"), 2),
        (lambda x: x.to(torch.bfloat16).detach(), 2),
        (lambda x: torch.cat([x, torch.ones(1, 3), x], dim=0), 3),
        (copy.deepcopy, 2),
    ],
)
def test_what_moves_or_extends_it_joins_nothing(change: Any, num_distinct: int) -> None:
    changed, expected = change(group()), change(JOINED)
    assert isinstance(changed, LazyConcat)
    assert len(changed.distinct) == num_distinct
    assert (changed.shape, changed.dtype) == (expected.shape, expected.dtype)
    assert changed.device == expected.device
    assert torch.equal(changed, expected)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[3:5] + 1,
        lambda x: torch.cat([x, x], dim=1),
        lambda x: torch.cat([x, torch.ones(1, 3, dtype=torch.float64)]),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: nn.functional.linear(x, torch.ones(2, 3)),
    ],
)
def test_whatever_reads_it_gets_the_joined_values(read: Any) -> None:
    ours, theirs = read(group()), read(JOINED)
    assert type(ours) is type(theirs)
    assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


def test_what_is_written_to_it_stays_and_reaches_no_part() -> None:
    lazy, before = group(), IMAGE.clone()
    assert lazy.mul_(2) is lazy
    lazy[0].zero_()
    expected = JOINED * 2
    expected[0] = 0
    assert torch.equal(lazy, expected)
    assert torch.equal(IMAGE, before)


def test_pieces_lie_within_parts_and_else_it_is_joined() -> None:
    memory = [part.data_ptr() for part in (IMAGE, OTHER, IMAGE)]
    assert [piece.data_ptr() for piece in group().split_parts([4, 2, 4])] == memory
    for sizes, num_distinct in (([2, 2, 1, 1, 4], 2), ([0, 4, 2, 0, 4, 0, 0], 2), ([5, 5], 1)):
        lazy = group()
        assert all(map(torch.equal, lazy.split_parts(sizes), JOINED.split(sizes)))
        assert len(lazy.distinct) == num_distinct


def test_what_cannot_be_joined_late() -> None:
    assert is_rows(IMAGE)
    sparse, nested = IMAGE.to_sparse(), torch.nested.nested_tensor([IMAGE, OTHER])
    differentiable, meta = IMAGE.clone().requires_grad_(), torch.empty(2, 3, device="meta")
    for value in (torch.tensor(1.0), sparse, nested, differentiable, meta, nn.Parameter(IMAGE), 7):
        assert not is_rows(value)
