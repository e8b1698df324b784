"""Tiny random models of families that ms-swift trains with GRPO, with Qwen's byte pairs.

Only a tokenizer's special tokens differ by family: the vocabulary is the one that a package index
has (`tokenizer.py`). Sizes are as small as vLLM's CPU attention allows (heads of 32).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen2TokenizerFast

from swift_grpo_ext.weights.layout import checkpoint_layout
from tiny_vlm import architecture
from tiny_vlm.architecture import draw_weights
from tiny_vlm.tokenizer import NUM_RANKS, SPECIAL_TOKENS, build_tokenizer

TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MROPE = {**ROPE, "mrope_section": [4, 6, 6]}
QWEN3_MROPE = {**MROPE, "mrope_interleaved": True}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}

SIGLIP_NAMES = ("vision_tower.", "vision_tower.vision_model.")

Ids = Callable[[str], int]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a tiny model of one family is made, and what ms-swift calls it."""

    name: str
    template: str
    """ms-swift's; its model type has the name of the family unless `model_type` is given."""

    build: Callable[[Qwen2TokenizerFast, Ids], tuple[Any, Any]]
    """Configuration and processor, for a tokenizer and its ids by token."""

    model_type: str = ""
    tokens: Mapping[int, str] | tuple[str, ...] = SPECIAL_TOKENS
    """Special tokens after the byte pairs, in order; or by id."""

    plain: Mapping[int, str] | None = None
    """Added tokens that are no special ones, by id."""

    eos: str = "<|im_end|>"
    names: Mapping[str, str] | None = None
    """Special tokens that the family's processor asks its tokenizer for, by attribute."""

    has_images: bool = True
    model_class: str = ""
    """Of transformers, where no automatic class knows it."""

    needs: tuple[str, ...] = ()
    """Packages that ms-swift asks for, beyond the set-up's."""

    thinker: str = ""
    """The attribute of the model that holds what is trained, where it has other parts."""

    renamed: tuple[str, str] | None = None
    """The beginning of names as transformers saves them, and in published checkpoints."""

    @property
    def swift_argv(self) -> list[str]:
        """What `swift rlhf` and `swift rollout` have to be told."""
        return ["--model_type", self.model_type or self.name, "--template", self.template]


def _qwen_text(ids: Ids, **more: Any) -> dict[str, Any]:
    eos = {"bos_token_id": ids("<|endoftext|>"), "eos_token_id": ids("<|im_end|>")}
    return {**TEXT, **eos, "vocab_size": architecture.VOCAB_SIZE, **more}


def _qwen_vision_ids(ids: Ids) -> dict[str, Any]:
    return {
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "tie_word_embeddings": True,
    }


def _qwen2_5_vl(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    return architecture.make_config(tokenizer), architecture.make_processor(tokenizer)


def _qwen2_vl(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    config = transformers.Qwen2VLConfig(
        text_config=_qwen_text(ids, rope_parameters=MROPE),
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": TEXT["hidden_size"],
            "mlp_ratio": 2,
            "num_heads": 2,
        },
        **_qwen_vision_ids(ids),
    )
    limits = architecture.PIXEL_LIMITS
    processor = transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=limits),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(size=limits),
        chat_template=architecture.CHAT_TEMPLATE,
    )
    return config, processor


QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": TEXT["hidden_size"],
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}


def _qwen3_processor(tokenizer: Qwen2TokenizerFast) -> Any:
    limits = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 16_384}
    patches = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=limits, **patches),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(size=limits),
        chat_template=architecture.CHAT_TEMPLATE,
    )


def _qwen3_vl(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    config = transformers.Qwen3VLConfig(
        text_config=_qwen_text(ids, head_dim=32, rope_parameters=QWEN3_MROPE),
        vision_config=QWEN3_VISION,
        **_qwen_vision_ids(ids),
    )
    return config, _qwen3_processor(tokenizer)


def _qwen3_vl_moe(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    experts["norm_topk_prob"] = True  # which vLLM asks of a checkpoint
    config = transformers.Qwen3VLMoeConfig(
        text_config=_qwen_text(ids, head_dim=32, rope_parameters=QWEN3_MROPE, **experts),
        vision_config=QWEN3_VISION,
        **_qwen_vision_ids(ids),
    )
    return config, _qwen3_processor(tokenizer)


def _qwen3_moe(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    tokenizer.chat_template = architecture.CHAT_TEMPLATE
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    experts["norm_topk_prob"] = True
    text = _qwen_text(ids, head_dim=32, rope_parameters=ROPE, **experts)
    return transformers.Qwen3MoeConfig(**text), tokenizer


def _qwen3(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    tokenizer.chat_template = architecture.CHAT_TEMPLATE
    return transformers.Qwen3Config(**_qwen_text(ids, head_dim=32, rope_parameters=ROPE)), tokenizer


INTERNVL_TOKENS = (*SPECIAL_TOKENS, "<img>", "</img>", "<IMG_CONTEXT>", "<video>")


def _internvl(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    config = transformers.InternVLConfig(
        text_config=_qwen_text(ids, model_type="qwen2", rope_parameters=ROPE),
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [56, 56],
        },
        image_token_id=ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    processor = transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(
            size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4
        ),
        tokenizer=tokenizer,
        video_processor=transformers.InternVLVideoProcessor(size={"height": 56, "width": 56}),
        image_seq_length=4,
        chat_template=architecture.CHAT_TEMPLATE,
    )
    return config, processor


LLAVA_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")


def _llava_onevision(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    pinpoints = [[56, 56], [56, 112], [112, 56], [112, 112]]
    config = transformers.LlavaOnevisionConfig(
        text_config=_qwen_text(ids, model_type="qwen2", rope_parameters=ROPE),
        vision_config=SIGLIP,
        image_token_index=ids("<image>"),
        video_token_index=ids("<video>"),
        image_grid_pinpoints=pinpoints,
        tie_word_embeddings=True,
    )
    size = {"height": 56, "width": 56}
    processor = transformers.LlavaOnevisionProcessor(
        image_processor=transformers.LlavaOnevisionImageProcessor(
            size=size, image_grid_pinpoints=pinpoints
        ),
        tokenizer=tokenizer,
        video_processor=transformers.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        chat_template=architecture.CHAT_TEMPLATE,
    )
    return config, processor


GEMMA3_TOKENS = {
    NUM_RANKS: "<pad>",
    NUM_RANKS + 1: "<eos>",
    NUM_RANKS + 2: "<bos>",
    NUM_RANKS + 3: "<start_of_turn>",
    NUM_RANKS + 4: "<end_of_turn>",
    255_999: "<start_of_image>",
    256_000: "<end_of_image>",
    262_144: "<image_soft_token>",
}
NEWLINES = {NUM_RANKS + 4 + i: "\n" * i for i in range(1, 5)}
"""Tokens of Gemma's vocabulary that vLLM merges beside an image."""


def _gemma3(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            "vocab_size": 262_208,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"],
            "pad_token_id": ids("<pad>"),
            "bos_token_id": ids("<bos>"),
            "eos_token_id": ids("<end_of_turn>"),
        },
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
        tie_word_embeddings=True,
    )
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=architecture.CHAT_TEMPLATE,
    )
    return config, processor


GLM4V_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>"),
    *("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>"),
)
GLM4V_TOKENS = dict(enumerate(GLM4V_SPECIAL, 151_329))
"""ms-swift's template has some of GLM's ids as numbers; they lie below the last byte pairs."""


def _glm4v(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    return _glm(transformers.Glm4vConfig, tokenizer, ids)


def _glm4v_moe(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    # vLLM takes the last two from the configuration; published ones have them.
    more = {**experts, "head_dim": 32, "use_qk_norm": False}
    return _glm(transformers.Glm4vMoeConfig, tokenizer, ids, **more)


def _glm(
    make_config: Callable[..., Any], tokenizer: Qwen2TokenizerFast, ids: Ids, **more: Any
) -> tuple[Any, Any]:
    config = make_config(
        text_config={
            **TEXT,
            **more,
            "vocab_size": architecture.VOCAB_SIZE,
            "pad_token_id": ids("<|endoftext|>"),
            "eos_token_id": [ids("<|endoftext|>"), ids("<|user|>"), ids("<|observation|>")],
            "tie_word_embeddings": False,
            "attention_bias": True,  # as published; without it vLLM drops the biases
            "rope_parameters": {
                **ROPE,
                "mrope_section": [2, 3, 3],
                "partial_rotary_factor": 0.5,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 2,
            "out_hidden_size": TEXT["hidden_size"],
            "intermediate_size": 128,
            "image_size": 336,
        },
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        image_start_token_id=ids("<|begin_of_image|>"),
        image_end_token_id=ids("<|end_of_image|>"),
        video_start_token_id=ids("<|begin_of_video|>"),
        video_end_token_id=ids("<|end_of_video|>"),
        tie_word_embeddings=False,
    )
    processor = transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Glm4vVideoProcessor(),
        chat_template=architecture.CHAT_TEMPLATE,
    )
    return config, processor


OMNI_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_bos|>", "<|vision_eos|>"),
    *("<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>"),
)


def _qwen2_5_omni(tokenizer: Qwen2TokenizerFast, ids: Ids) -> tuple[Any, Any]:
    config = transformers.Qwen2_5OmniConfig(
        thinker_config={
            "text_config": _qwen_text(ids, rope_parameters=MROPE),
            "vision_config": {
                **{"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2},
                **{"out_hidden_size": TEXT["hidden_size"], "fullatt_block_indexes": [1]},
            },
            "audio_config": {
                **{"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2},
                **{"encoder_ffn_dim": 128, "output_dim": TEXT["hidden_size"]},
            },
            "audio_token_index": ids("<|AUDIO|>"),
            "image_token_index": ids("<|IMAGE|>"),
            "video_token_index": ids("<|VIDEO|>"),
            "vision_start_token_id": ids("<|vision_bos|>"),
            "vision_end_token_id": ids("<|vision_eos|>"),
            "audio_start_token_id": ids("<|audio_bos|>"),
            "audio_end_token_id": ids("<|audio_eos|>"),
            "tie_word_embeddings": True,
        },
        enable_audio_output=False,
    )
    limits = architecture.PIXEL_LIMITS
    processor = transformers.Qwen2_5OmniProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=limits),
        video_processor=transformers.Qwen2VLVideoProcessor(size=limits),
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=128, chunk_length=300),
        tokenizer=tokenizer,
        chat_template=architecture.CHAT_TEMPLATE,
    )
    return config, processor


FAMILIES = {
    family.name: family
    for family in (
        Family(name="qwen2_vl", template="qwen2_vl", build=_qwen2_vl),
        Family(name="qwen2_5_vl", template="qwen2_5_vl", build=_qwen2_5_vl),
        Family(name="qwen3_vl", template="qwen3_vl", build=_qwen3_vl),
        Family(
            name="qwen3_vl_moe", template="qwen3_vl", build=_qwen3_vl_moe, model_type="qwen3_vl_moe"
        ),
        Family(name="qwen3", template="qwen3", build=_qwen3, has_images=False),
        Family(name="qwen3_moe", template="qwen3", build=_qwen3_moe, has_images=False),
        Family(
            name="internvl",
            template="internvl_hf",
            build=_internvl,
            tokens=INTERNVL_TOKENS,
            names={
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
            },
        ),
        Family(
            name="llava_onevision",
            template="llava_onevision_hf",
            build=_llava_onevision,
            model_type="llava_onevision_hf",
            tokens=LLAVA_TOKENS,
            renamed=SIGLIP_NAMES,
        ),
        Family(
            name="gemma3",
            template="gemma3_vision",
            build=_gemma3,
            model_type="gemma3_vision",
            tokens=GEMMA3_TOKENS,
            plain=NEWLINES,
            renamed=SIGLIP_NAMES,
            eos="<end_of_turn>",
            names={
                "boi_token": "<start_of_image>",
                "eoi_token": "<end_of_image>",
                "image_token": "<image_soft_token>",
            },
        ),
        Family(name="glm4v", template="glm4v", build=_glm4v, tokens=GLM4V_TOKENS, eos="<|user|>"),
        Family(
            name="glm4v_moe",
            template="glm4_5v",
            build=_glm4v_moe,
            tokens=GLM4V_TOKENS,
            eos="<|user|>",
        ),
        Family(
            name="qwen2_5_omni",
            template="qwen2_5_omni",
            build=_qwen2_5_omni,
            tokens=OMNI_TOKENS,
            model_class="Qwen2_5OmniForConditionalGeneration",
            thinker="thinker",
            needs=("qwen_omni_utils", "librosa", "audioread", "soundfile"),
            names={
                "image_token": "<|IMAGE|>",
                "audio_token": "<|AUDIO|>",
                "video_token": "<|VIDEO|>",
                "vision_bos_token": "<|vision_bos|>",
                "vision_eos_token": "<|vision_eos|>",
                "audio_bos_token": "<|audio_bos|>",
                "audio_eos_token": "<|audio_eos|>",
            },
        ),
    )
}


def make_tokenizer(family: Family, ranks: dict[bytes, int]) -> Qwen2TokenizerFast:
    """Qwen's byte pairs with the family's special tokens behind them."""
    tokens = family.tokens
    if isinstance(tokens, tuple):
        tokens = dict(enumerate(tokens, NUM_RANKS))
    plain_tokens = dict(family.plain or {})
    known = {**tokens, **plain_tokens}
    first = min(NUM_RANKS, *known)  # no byte pair is made of later ones
    ranks = {token: rank for token, rank in ranks.items() if rank < first}
    places = {known.get(i, f"<unused{i}>"): i for i in range(first, max(known) + 1)}
    special, plain = tuple(tokens.values()), tuple(plain_tokens.values())
    named = dict(family.names or {})
    tokenizer = build_tokenizer(ranks, special, plain, places, family.eos, **named)
    for i, token in known.items():
        assert tokenizer.encode(token) == [i], f"{token}: {tokenizer.encode(token)}, not {i}"
    return tokenizer


def published_names(model: Any, family: Family, path: Path) -> None:
    """Make a saved file what published ones are: transformers 5.19 loads experts transposed, and
    saves them as it holds them; SigLIP's parameters have lost a level of their names there."""
    tensors = checkpoint_layout(model, load_file(path))
    old, new = family.renamed or ("", "")
    tensors = {
        new + name.removeprefix(old) if name.startswith(old) else name: tensor.contiguous()
        for name, tensor in tensors.items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def make_family(family: Family, ranks: dict[bytes, int], output: Path, seed: int) -> int:
    """Write a random model of the family as a Hugging Face folder; its number of parameters."""
    tokenizer = make_tokenizer(family, ranks)

    def id_of(token: str) -> int:
        [i] = tokenizer.encode(token)
        return int(i)

    config, processor = family.build(tokenizer, id_of)
    torch.manual_seed(seed)
    if family.model_class:
        model = getattr(transformers, family.model_class)(config)
    elif family.has_images:
        model = transformers.AutoModelForImageTextToText.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    draw_weights(getattr(model, family.thinker) if family.thinker else model)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and not weight.any():  # Gemma3's projection: no image would be seen
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
        if ".experts." in name or name.endswith(".mlp.gate.weight"):  # no linear layers of torch
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    text = config.get_text_config()
    model.generation_config = GenerationConfig(
        do_sample=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=getattr(text, "bos_token_id", None),
        eos_token_id=text.eos_token_id,
    )
    model.save_pretrained(output)
    if family.renamed or family.name.endswith("_moe"):
        published_names(model, family, output / "model.safetensors")
    processor.save_pretrained(output)
    if family.thinker:
        torch.save({}, output / "spk_dict.pt")  # voices, which transformers asks for
    return int(model.num_parameters())
