"""Repairs of forwards, batches and encoded rows that ms-swift passes to transformers' models."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from swift_grpo_ext.upstream.patches import PatchPhase, patch, repair, replaced

if TYPE_CHECKING:
    from swift.template.template_inputs import StdTemplateInputs
    from swift.template.templates.internvl import InternvlhfTemplate
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPooling


@repair(PatchPhase.TRAINING, optional=True)
def repair_gemma4() -> None:
    """Give ms-swift's forward of Gemma 4 its features as one tensor, and transformers' masks.

    Symptom: `'tuple' object has no attribute 'to'` at the first image of Gemma 4 in training,
    `num_frames_per_video is required` at the first video. Bidirectional attention within images
    (`use_bidirectional_attention: vision`) applies to all layers; in vLLM, only to those with
    windows.
    Upstream: ms-swift 4.6, model/models/gemma.py (`_patch_gemma4_forward`) was written against
    transformers 5.6; 5.19 (models/gemma4 and gemma4_unified) splits features by image and by video,
    and makes masks in `create_masks_for_vision_model`. Can go when ms-swift supports 5.19, or
    leaves the forward to transformers.
    """
    from swift.model.models import gemma

    patch_forward = gemma._patch_gemma4_forward

    @wraps(patch_forward)
    def _patch_gemma4_forward(model: PreTrainedModel, *args: object, **kwargs: object) -> None:
        modeling = sys.modules[type(model).__module__]
        plain = modeling.create_masks_for_generate
        with_windows = getattr(modeling, "create_masks_for_vision_model", None)

        def create_masks(config: PretrainedConfig, **kwargs: Any) -> Any:
            if with_windows is None or "block_sequence_ids" not in kwargs:
                return plain(config=config, **kwargs)
            return with_windows(config=config.get_text_config(), **kwargs)

        # ms-swift's forward captures the function while it is patched.
        with replaced(modeling, "create_masks_for_generate", create_masks):
            patch_forward(model, *args, **kwargs)
        for name in ("get_image_features", "get_video_features"):
            if hasattr(model, name):
                patch(model, **{name: partial(joined_features, getattr(model, name))})

    patch(gemma, _patch_gemma4_forward=_patch_gemma4_forward)


def joined_features(
    get_features: Callable[..., BaseModelOutputWithPooling], *args: torch.Tensor, **kwargs: object
) -> BaseModelOutputWithPooling:
    """Return the features of images, or of videos, as one tensor."""
    if "num_frames_per_video" in inspect.signature(get_features).parameters:
        kwargs.setdefault("num_frames_per_video", torch.tensor([len(args[0])]))  # as one video
    outputs = get_features(*args, **kwargs)
    if isinstance(outputs.pooler_output, tuple):
        outputs.pooler_output = torch.cat(outputs.pooler_output)
    return outputs


@repair(PatchPhase.TRAINING, optional=True)
def place_glm_ocr_images() -> None:
    """Add the positions of images in time, height and width to batches of GLM-OCR.

    Symptom: log-probabilities of rollout and training differ by 0.2 nats for GLM-OCR (a tiny one):
    training gives image tokens the positions of text.
    Upstream: ms-swift 4.6, template/templates/glm.py: `GLMOCRTemplate` passes embeddings to the
    model, which cannot compute positions from them; `GLM4VTemplate`'s collator does. Can go when
    `GLMOCRTemplate` computes positions too.
    """
    from swift.template.templates.glm import GLM4vPackingTemplateMixin, GLMOCRTemplate

    collate = GLMOCRTemplate._data_collator

    @wraps(collate)
    def _data_collator(self: GLMOCRTemplate, batch: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        collated: dict[str, Any] = collate(self, batch, **kwargs)
        if self.is_training:
            made = GLM4vPackingTemplateMixin._get_position_ids(self, collated)
            collated["position_ids"] = made["position_ids"][1:]  # the first row is for text
        return collated

    # `_get_position_ids` needs the model.
    patch(GLMOCRTemplate, _data_collator=_data_collator, use_model=True)


@repair(PatchPhase.TRAINING, optional=True)
def place_what_follows_videos() -> None:
    """Make positions of Qwen2-VL and Qwen2.5-VL continue after a video's largest one, as vLLM.

    Symptom: after a video with more frames than patches on its longer side, Qwen2-VL and Qwen2.5-VL
    silently get other positions in training than in vLLM (0.024 nats in the mean, 0.58 at most, 6
    frames of the tiny model).
    Upstream: transformers 5.3 to 5.19, models/qwen2_vl and qwen2_5_vl (`get_rope_index`) continue
    at the larger of height and width; 4.57, vLLM 0.32 and Qwen's own code at the maximum of all
    three. 5.12 also rounds a video's seconds down before it multiplies them (transformers 48669).
    Can go when transformers continues at the maximum.
    """
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    patch(modeling_qwen2_vl.Qwen2VLModel, get_rope_index=get_rope_index)
    patch(modeling_qwen2_5_vl.Qwen2_5_VLModel, get_rope_index=get_rope_index)


def get_rope_index(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    mm_token_type_ids: torch.Tensor,
    image_grid_thw: torch.Tensor | None = None,
    video_grid_thw: torch.Tensor | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions in time, height and width [3, batch, tokens], 0 for padding; and the next
    position minus the number of tokens [batch, 1] (arXiv:2409.12191, section 2.1). Takes the
    arguments of transformers' method."""
    config = model.config.vision_config
    merge, rate = config.spatial_merge_size, getattr(config, "tokens_per_second", 1)
    grids = {1: iter(_listed(image_grid_thw)), 2: iter(_listed(video_grid_thw))}
    seconds = iter(_listed(kwargs.get("second_per_grid_ts")))  # none for Qwen2-VL
    is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = input_ids.new_zeros(3, *input_ids.shape)
    deltas = []
    for row, (types, kept) in enumerate(zip(mm_token_type_ids, is_token.bool(), strict=True)):
        blocks, start = list[torch.Tensor](), 0
        for kind, tokens in groupby(types[kept].tolist()):  # 1 for images, 2 for videos
            num_tokens = len(list(tokens))
            if kind == 0:
                block = torch.arange(num_tokens).expand(3, -1)
            else:
                t, h, w = next(grids[kind])
                times = torch.arange(t, dtype=torch.float64)  # as in vLLM
                if kind == 2:
                    times = times * rate * next(seconds, 1.0)
                axes = times.long(), torch.arange(h // merge), torch.arange(w // merge)
                block = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
            blocks.append(block + start)
            start = int(blocks[-1].max()) + 1
        positions[:, row, kept] = torch.cat(blocks, 1).to(positions)
        deltas.append([start - int(kept.sum())])
    return positions, torch.tensor(deltas, device=input_ids.device)


def _listed(values: torch.Tensor | Sequence[Any] | None) -> list[Any]:
    return [] if values is None else torch.as_tensor(values).tolist()


@repair(PatchPhase.TRAINING, optional=True)
def join_internvl_videos() -> None:
    """Make ms-swift's template of InternVL and Intern-S1 encode rows of several videos.

    Symptom: rows of several videos end training of InternVL and Intern-S1: `stack expects each
    tensor to be equal size`, or `Number of elements of source < number of ones in mask`.
    Upstream: ms-swift 4.6, template/templates/internvl.py:246: one array holds all videos of a row,
    and all but the first lose a frame (`start` is too large by one). Can go when the template
    processes videos one by one, as vLLM does.
    """
    from swift.template.templates.internvl import InternvlhfTemplate

    encode = InternvlhfTemplate._encode

    @wraps(encode)
    def _encode(self: InternvlhfTemplate, inputs: StdTemplateInputs) -> dict[str, Any]:
        return (encode_videos if len(inputs.videos) > 1 else encode)(self, inputs)

    patch(InternvlhfTemplate, _encode=_encode)


def encode_videos(template: InternvlhfTemplate, inputs: StdTemplateInputs) -> dict[str, Any]:
    """Encode a row like `InternvlhfTemplate`, but video by video."""
    from swift.template.templates.internvl import InternvlTemplate
    from swift.template.vision_utils import load_video_hf

    processor, tiles_of_images = template.processor, ()
    if images := inputs.images:
        made = processor.image_processor(images=images, crop_to_patches=True, return_tensors="pt")
        tiles_of_images = made["pixel_values"].split([int(n) for n in made["num_patches"]])
    # ms-swift's template marks an image by -100 and a video by -200.
    media = {-100: iter(tiles_of_images), -200: iter(load_video_hf(inputs.videos)[0])}
    # Skip `InternvlTemplate`, as `InternvlhfTemplate` does: its images have another form.
    encoded: dict[str, Any] = super(InternvlTemplate, template)._encode(inputs)
    ids = encoded["input_ids"]
    places = [i for i, token_id in enumerate(ids) if token_id in media]
    context = "<IMG_CONTEXT>" * processor.image_seq_length
    pixels, tokens = [], []
    for place in places:
        tiles = next(media[ids[place]])
        if ids[place] == -200:
            made = processor.video_processor(videos=[tiles], return_tensors="pt")
            [tiles] = made["pixel_values_videos"]
            # Each frame is one tile, preceded by its number.
            text = "".join(f"Frame{n + 1}: <img>{context}</img>\n" for n in range(len(tiles)))
        else:
            text = context * len(tiles)
        pixels.append(tiles.to(template.model_info.torch_dtype))
        tokens.append(processor.encode(text, add_special_tokens=False))
    extended = template._extend_tokens(
        ids, encoded["labels"], encoded.get("loss_scale"), places, tokens.__getitem__
    )
    encoded["input_ids"], encoded["labels"], encoded["loss_scale"] = extended
    encoded["pixel_values"] = torch.cat(pixels)
    return encoded
