"""Tiny models with random weights, of each kind that the shim meets, and their inputs.

Most are models of the installed transformers, some are written like remote code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2Model
from transformers.modeling_outputs import CausalLMOutputWithPast

VOCABULARY = 160
IMAGE, VIDEO, VISION_START, VISION_END = 151, 152, 153, 154
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# As `rope_scaling`, which transformers 4 and 5 read.
MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def qwen2(**more: Any) -> Any:
    return transformers.Qwen2ForCausalLM(Qwen2Config(**{**TEXT, **more}))


def qwen2_5_vl() -> Any:
    vision = {**VISION, "out_hidden_size": 32, "fullatt_block_indexes": [0]}
    text = {**TEXT, "rope_scaling": MROPE}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **IDS)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**TEXT, sliding_window=5))


KINDS_OF_LAYERS: dict[str, Any] = {
    "initializer_range": 0.2,  # with 0.5, four layers move the last bits by 1e-4
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
}
"""Two layers of each kind: completions do not depend on the last layer's results for the prompt."""


def some_windows() -> Any:
    return qwen2(**KINDS_OF_LAYERS, use_sliding_window=True)


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config={**TEXT, **KINDS_OF_LAYERS, "head_dim": 16, "query_pre_attn_scalar": 16},
        vision_config={**SIGLIP, "image_size": 56, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


GEMMA = {**TEXT, **KINDS_OF_LAYERS, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}


def gemma4() -> Any:
    """Like the model of 12B parameters: positions of images see later ones."""
    text = {**GEMMA, "head_dim": 16, "global_head_dim": 16, "use_bidirectional_attention": "vision"}
    vision = {**SIGLIP, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def gemma3n() -> Any:
    """Its template writes `token_type_ids`, but the model makes no mask of them."""
    text = {**GEMMA, "head_dim": 16, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    config = transformers.Gemma3nTextConfig(**text, activation_sparsity_pattern=[0.0] * 4)
    return transformers.Gemma3nForCausalLM(config)


DELTA_NET = {
    **TEXT,
    "initializer_range": 0.05,  # with 0.5, padding alone moves log-probabilities by 1e-4
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def qwen3_5() -> Any:
    text = {**DELTA_NET, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}}
    vision = {**VISION, "out_hidden_size": 32, "num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **IDS)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def qwen3_next() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3NextConfig(
        **DELTA_NET, **experts, shared_expert_intermediate_size=16
    )
    return transformers.Qwen3NextForCausalLM(config)


def qwen3_moe() -> Any:
    """A mixture of experts with a second layer that is dense."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes = {**TEXT, **experts, "num_hidden_layers": 3, "head_dim": 16}
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**sizes, norm_topk_prob=True, mlp_only_layers=[1])
    )
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def soft_capped() -> Any:
    config = transformers.Gemma2Config(**TEXT, head_dim=16, final_logit_softcapping=2.0)
    return transformers.Gemma2ForCausalLM(config)


class RemoteCode(PreTrainedModel):
    """A decoder like remote code: no keyword, and a fixed list of arguments."""

    config_class = Qwen2Config
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> CausalLMOutputWithPast:
        return self.output(input_ids, attention_mask, 0)

    def output(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, num_kept: int
    ) -> CausalLMOutputWithPast:
        hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=False)[0]
        return CausalLMOutputWithPast(logits=self.logits_of(hidden[:, -num_kept:]))

    def logits_of(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()


class SquashingRemoteCode(RemoteCode):
    """Ends in an in-place operation that no configuration names; its backward needs its result."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).tanh_()


class TwiceCallingHead(RemoteCode):
    """Its logits are the mean of two calls of the head."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        return (self.lm_head(hidden) + self.lm_head(-hidden)) / 2


class Promising(RemoteCode):
    """Uses the head's weight, not the head. Has a keyword, but ignores it."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:
        return self.output(input_ids, attention_mask, 0)

    def logits_of(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.lm_head.weight, self.lm_head.bias)


class KeepingByKeyword(Promising):
    """Has the keyword of transformers 4.49 and later."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:
        return self.output(input_ids, attention_mask, logits_to_keep)


class OldSpelling(Promising):
    """Has the keyword of transformers 4.45 to 4.48."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        num_logits_to_keep: int = 0,
    ) -> CausalLMOutputWithPast:
        return self.output(input_ids, attention_mask, num_logits_to_keep)


class FixedLength(RemoteCode):
    """Fails without logits of every position."""

    def output(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, num_kept: int
    ) -> CausalLMOutputWithPast:
        output = super().output(input_ids, attention_mask, num_kept)
        output.logits = output.logits.view(*input_ids.shape, -1)
        return output


def remote(kind: type[RemoteCode]) -> Callable[[], RemoteCode]:
    return lambda: kind(Qwen2Config(**TEXT))


MODELS: dict[str, Callable[[], Any]] = {
    "Qwen2": qwen2,
    "Qwen2, tied": lambda: qwen2(tie_word_embeddings=True),
    "Qwen2.5-VL": qwen2_5_vl,
    "soft-capped (Gemma2)": soft_capped,
    "Mistral": mistral,
    "Qwen2, some windows": some_windows,
    "Gemma3": gemma3,
    "Gemma3n": gemma3n,
    "Gemma4": gemma4,
    "Qwen3.5": qwen3_5,
    "Qwen3-Next": qwen3_next,
    "Qwen3-MoE": qwen3_moe,
    "remote code": remote(RemoteCode),
    "remote code, squashed": remote(SquashingRemoteCode),
    "new spelling": remote(KeepingByKeyword),
    "old spelling": remote(OldSpelling),
    "calls its head twice": remote(TwiceCallingHead),
    "names the keyword only": remote(Promising),
    "insists on all positions": remote(FixedLength),
}

IMAGES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "qwen2_5_vl": lambda: {
        "pixel_values": torch.randn(16, 1176),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    },
    "gemma3": lambda: {"pixel_values": torch.randn(1, 3, 56, 56)},
    "gemma4": lambda: {
        "pixel_values": torch.randn(1, 36, 768),
        "image_position_ids": torch.cartesian_prod(*[torch.arange(6)] * 2)[None],
    },
    "qwen3_5": lambda: {
        "pixel_values": torch.randn(16, 1536),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    },
}
"""An image has these inputs by type of model, and takes the tokens `PLACEHOLDERS`."""

TYPES = {"gemma3": "token_type_ids"} | dict.fromkeys(
    ("gemma4", "qwen2_5_vl", "qwen3_5"), "mm_token_type_ids"
)
"""This input marks the tokens of images, by type of model."""

PLACEHOLDERS = torch.tensor([VISION_START, *[IMAGE] * 4, VISION_END])


def build(name: str, *, lora: bool = False) -> Any:
    """Return the model in training mode; its weights depend on its name alone."""
    torch.manual_seed(0)
    model = MODELS[name]().train()
    model.config.get_text_config().use_cache = False  # as in a training
    return add_lora(model) if lora else model


def add_lora(model: Any, **more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    # PEFT does not know the linear layers of Gemma 4's tower.
    targets = {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ".*vision_tower.*"} | more
    config = LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, **targets)
    return get_peft_model(model, config)
