"""What a model does to logits after its head: nothing, soft-capping, or scaling by a constant.

Chunked log-probabilities need it as a function. It is found by what the configuration says and
held against the model's own logits, so that a model with another transform is recognized, not
guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Transform = Callable[[Tensor], Tensor]


def find_transform(
    config: Any,
    raw: Tensor,
    final: Tensor,
    highest: Callable[[Tensor], Tensor] = lambda errors: errors,
) -> Transform | None:
    """The transform that turns the head's logits `raw` into the model's `final`, or None.

    Args:
        config: the model's configuration (its text model's counts, where it has one).
        raw: logits as the head made them, of any shape.
        final: the same logits as the model returned them.
        highest: the maximum over ranks, so that all of them find one transform.
    """
    precision = max(torch.finfo(raw.dtype).eps, torch.finfo(final.dtype).eps)
    raw, final = raw.flatten().float(), final.flatten().float()
    transforms = list(known_transforms(config))
    errors = highest(torch.tensor([_error(transform(raw), final) for transform in transforms]))
    best = int(errors.argmin())
    return transforms[best] if errors[best] <= 4 * precision else None


def _error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of each number, or of the median one if that is more.

    Tokens that are ruled out by a number that is as low as can be, or minus infinity, do not count
    for more than others.
    """
    if found.shape != expected.shape:
        return float("inf")
    size = expected.abs()
    relative = (found - expected).abs() / torch.maximum(size, size.median())
    return float(relative.masked_fill(found == expected, 0).max())


def known_transforms(config: Any) -> Iterator[Transform]:
    """`final_logit_softcapping` as in Gemma, `logit_scale` as in Cohere, `logits_scaling` as in
    Granite (their modelling files in transformers)."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if cap := getattr(config, "final_logit_softcapping", None):
        yield lambda logits: (logits / cap).tanh() * cap
    if factor := getattr(config, "logit_scale", None):
        yield lambda logits: logits * factor
    if divisor := getattr(config, "logits_scaling", None):
        yield lambda logits: logits / divisor
    yield unchanged


def unchanged(logits: Tensor) -> Tensor:
    return logits
