"""Masks media placeholder tokens in training's logits (docs/promises.md, M2).

The model itself fails in training on a sampled `<|image_pad|>` without an image, so the rollout
excludes such tokens from its softmax. Training has to exclude them too: otherwise log-probabilities
at equal weights differ by the probability of those tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from swift.utils import get_logger

from swift_grpo_ext.logits.shim import base_model, output_embedding
from swift_grpo_ext.upstream.placeholders import placeholder_ids

if TYPE_CHECKING:
    from swift.rlhf_trainers import GRPOTrainer
    from swift.template import Template

logger = get_logger()


def lowest_logit(dtype: torch.dtype) -> float:
    # Finite, so that division by a temperature of 1e-8 (1/16 in float16) does not overflow, and
    # `p * log p` is 0 in entropies.
    return max(torch.finfo(dtype).min / 16, -1e30)


def mask_placeholders(model: torch.nn.Module, ids: list[int]) -> Any:
    """Mask tokens in a model's logits [..., vocab]. Return the hook's handle, or None if there are
    no ids or no output embedding."""
    head = output_embedding(model)
    if not ids or head is None:
        return None

    def leave_out(
        module: torch.nn.Module, args: tuple[torch.Tensor, ...], logits: torch.Tensor
    ) -> torch.Tensor:
        lowest = lowest_logit(logits.dtype)
        # In place and hidden from autograd: copies of the logits and their gradient would be the
        # largest tensors of all. Autograd need not know: where p is 0, so is the gradient.
        logits.detach().index_fill_(-1, torch.tensor(ids, device=logits.device), lowest)
        return logits

    return head.register_forward_hook(leave_out)


def mask_models(trainer: GRPOTrainer, template: Template) -> None:
    """Mask the template's placeholders in the logits of ms-swift's policy, reference and local
    teacher, and in Liger's loss, which computes its own logits."""
    ids, policy = placeholder_ids(template), base_model(trainer.model)
    lacks = ["no output embedding"] if output_embedding(policy) is None else []
    if not ids and template.model_meta.is_multimodal:
        lacks.append("no placeholder of media within the vocabulary")
    if lacks:
        logger.warning(
            f"{type(policy).__name__} (and {type(template).__name__}) names {' and '.join(lacks)}: "
            "placeholders are not masked, and training may fail on a completion that holds one "
            "(docs/support.md)."
        )
    for model in filter(None, (trainer.model, trainer.ref_model, trainer.teacher_model)):
        mask_placeholders(base_model(model), ids)
    if trainer.use_liger_loss:
        trainer.liger_grpo_loss = mask_fused_loss(trainer.liger_grpo_loss, ids)


def mask_fused_loss(loss: Callable[..., Any], ids: list[int]) -> Callable[..., Any]:
    """Return one of Liger's fused losses with these tokens masked by a bias. The loss takes the
    head's `lin_weight` [vocab, H] and `bias` [vocab], and never calls the head."""

    def without_placeholders(
        *, lin_weight: torch.Tensor, bias: torch.Tensor | None, **kwargs: Any
    ) -> Any:
        mask = lin_weight.new_zeros(len(lin_weight))
        mask[ids] = lowest_logit(mask.dtype)
        return loss(lin_weight=lin_weight, bias=mask if bias is None else bias + mask, **kwargs)

    return without_placeholders if ids else loss
