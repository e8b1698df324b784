"""Tokens that stand for media are never sampled, and have no probability in training (SPEC M2).

A sampled `<|image_pad|>` stands for an image that is not there: training on it fails, in the model
itself. The rollout leaves such tokens out of its softmax; so must training, or log-probabilities at
equal weights differ by what those tokens would have got.
"""

from __future__ import annotations

from typing import Any

import torch

SHARE_OF_LOWEST = 1 / 16
"""Of the lowest number of a type: far enough from it for a temperature of 1/16, and 0 times it is
0, as entropies need, where 0 times minus infinity is not a number."""


def placeholder_ids(template: Any) -> list[int]:
    """Ids of the tokens that ms-swift's template puts in the place of media; [] for text models."""
    return sorted({int(i) for i in template.placeholder_tokens if isinstance(i, int) and i >= 0})


def logit_bias(ids: list[int]) -> dict[int, float]:
    """For vLLM's `SamplingParams.logit_bias`, whose constructor would cut it off at -100."""
    return dict.fromkeys(ids, float("-inf"))


def mask_placeholders(model: torch.nn.Module, ids: list[int]) -> Any:
    """Take these tokens out of a model's logits, in training and in `generate`.

    Args:
        model: with `get_output_embeddings`; wrapped by PEFT or not.
        ids: columns of the logits [..., vocab].

    Returns:
        The handle of the hook, or None where there is no id, or no output embedding.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not ids:
        return None

    def leave_out(module: Any, args: Any, logits: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(logits.dtype).min * SHARE_OF_LOWEST
        # In place: a copy of the logits would be the largest tensor of all, and so would one of
        # their gradient, had autograd to know. It need not: where p is 0, so is the gradient.
        logits.detach().index_fill_(-1, torch.tensor(ids, device=logits.device), lowest)
        return logits

    return head.register_forward_hook(leave_out)
