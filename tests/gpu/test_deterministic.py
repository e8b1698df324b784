"""Steps that are not the same twice are seen by their checksums."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from scripts.gpu.deterministic import STEPS, train, unequal
from scripts.gpu.media import group_with_image
from scripts.gpu.models import Batch, wide
from scripts.gpu.prompt_once import plain


def test_a_last_bit_is_seen() -> None:
    model = wide("small", 2, "cpu", "sdpa", sees=True)
    batch = unequal(group_with_image(model, side=8, completion=16, group_size=4))
    assert batch.predicts_BT.sum(1).tolist() == [16, 15, 14, 13]
    before = [weight.clone() for weight in model.parameters()]
    calls = count()

    def parts_later(model: Any, batch: Batch) -> Tensor:
        """One value is another in the third step of the second training."""
        values = plain(model, batch)
        factors = torch.ones_like(values)
        factors[0] += torch.finfo(values.dtype).eps if next(calls) == STEPS + 2 else 0
        return values * factors

    one, other = train(model, batch, parts_later), train(model, batch, parts_later)
    same = [a == b for a, b in zip(one, other, strict=True)]
    assert same[:3] == [True, True, False]
    assert len(set(one)) == STEPS, "no weight moved"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
