"""Repairs of the forwards that ms-swift gives to models of transformers, each with the symptom that
it cures. A release without the names of a repair is left as it is.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache, partial, wraps
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import mismatch
from swift_grpo_ext.upstream.patches import patch

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutputWithPooling


@cache
def repair_gemma4() -> None:
    """Give ms-swift's forward of Gemma 4 the features of all images, or videos, as one tensor, and
    the masks of transformers.

    Symptom: `'tuple' object has no attribute 'to'` at the first image, in training;
    `num_frames_per_video is required` at the first video. Where images look both ways
    (`use_bidirectional_attention: vision`), they do so in all layers, and not in those with windows
    only: the trained policy is none that vLLM, or transformers, knows.
    Upstream: ms-swift 4.6, model/models/gemma.py (`_patch_gemma4_forward`) was written against
    transformers 5.6; 5.19 (models/gemma4 and gemma4_unified) splits features by image and by video,
    and makes masks in `create_masks_for_vision_model`.
    Can go when ms-swift does so, or leaves the forward to transformers.
    """
    if any(map(mismatch, pins.GEMMA4_FORWARD)):
        return
    from swift.model.models import gemma

    patch_forward = gemma._patch_gemma4_forward

    @wraps(patch_forward)
    def _patch_gemma4_forward(model: Any, *args: Any, **kwargs: Any) -> None:
        patch_forward(model, *args, **kwargs)
        model.get_image_features = MethodType(get_image_features, model)
        if hasattr(model, "get_video_features"):
            model.get_video_features = MethodType(get_video_features, model)
        modeling = sys.modules[type(model).__module__]
        if model.config.get_text_config().use_bidirectional_attention == "vision" and hasattr(
            modeling, "create_masks_for_vision_model"
        ):
            model.forward_with_masks = model.forward
            model.forward = MethodType(partial(forward, modeling=modeling), model)

    patch(gemma, _patch_gemma4_forward=_patch_gemma4_forward)


def get_image_features(model: Any, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
    return _joined(type(model).get_image_features(model, *args, **kwargs))


def get_video_features(
    model: Any, frames: torch.Tensor, *args: Any, **kwargs: Any
) -> BaseModelOutputWithPooling:
    get = type(model).get_video_features
    if "num_frames_per_video" in inspect.signature(get).parameters:
        kwargs.setdefault("num_frames_per_video", torch.tensor([len(frames)]))  # joined after all
    return _joined(get(model, frames, *args, **kwargs))


def forward(
    model: Any, input_ids: torch.Tensor, *args: Any, modeling: ModuleType, **kwargs: Any
) -> Any:
    types, mask = kwargs.get("mm_token_type_ids"), kwargs.get("attention_mask")
    if types is not None and not isinstance(mask, dict):
        shaped = torch.empty((), dtype=model.dtype, device=input_ids.device)
        kwargs["attention_mask"] = modeling.create_masks_for_vision_model(
            config=model.config.get_text_config(),
            inputs_embeds=shaped.expand(*input_ids.shape, 1),
            attention_mask=mask,
            past_key_values=kwargs.get("past_key_values"),
            position_ids=kwargs.get("position_ids"),
            block_sequence_ids=modeling.get_block_sequence_ids_for_mask(
                types, device=input_ids.device
            ),
        )
    return model.forward_with_masks(input_ids, *args, **kwargs)


def _joined(outputs: BaseModelOutputWithPooling) -> BaseModelOutputWithPooling:
    if isinstance(outputs.pooler_output, tuple):
        outputs.pooler_output = torch.cat(outputs.pooler_output)
    return outputs
