"""Tiny models with random weights, of each kind that the shim meets, and their inputs.

Most are models of the installed transformers, some are written like remote code.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen2Model
from transformers.modeling_outputs import CausalLMOutputWithPast

IMAGE, VIDEO, VISION_START, VISION_END = 151, 152, 153, 154
TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
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
SIZES = {"hidden_size": 32, "intermediate_size": 64}
VISION = {**SIZES, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
SIGLIP = {**SIZES, "num_attention_heads": 2, "num_hidden_layers": 1}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

KINDS_OF_LAYERS: dict[str, Any] = {
    "initializer_range": 0.2,  # with 0.5, four layers move the last bits by 1e-4
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
}
"""Two layers of each kind: completions do not depend on the last layer's results for the prompt."""

DELTA_NET = {
    **TEXT,
    "initializer_range": 0.05,  # with 0.5, padding alone moves log-probabilities by 1e-4
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def seeing(text: dict[str, Any], vision: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the configuration of a model that sees images."""
    return {"text_config": {**TEXT, **text}, "vision_config": vision, **more}


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("Qwen2", TEXT),
    "Qwen2, tied": ("Qwen2", {**TEXT, "tie_word_embeddings": True}),
    "Qwen2, some windows": ("Qwen2", {**TEXT, **KINDS_OF_LAYERS, "use_sliding_window": True}),
    "Mistral": ("Mistral", {**TEXT, "sliding_window": 5}),
    "soft-capped (Gemma2)": ("Gemma2", {**TEXT, "final_logit_softcapping": 2.0}),
    "Qwen2.5-VL": (
        "Qwen2_5_VL",
        seeing({"rope_scaling": MROPE}, {**VISION, "fullatt_block_indexes": [0]}, **IDS),
    ),
    "Qwen3.5": (
        "Qwen3_5",
        seeing(
            {**DELTA_NET, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
            {**VISION, "num_position_embeddings": 16},
            **IDS,
        ),
    ),
    "Qwen3-Next": (
        "Qwen3Next",
        {**DELTA_NET, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    # A mixture of experts with a second layer that is dense.
    "Qwen3-MoE": (
        "Qwen3Moe",
        {
            **{**TEXT, **EXPERTS, "num_experts": 8, "num_hidden_layers": 3},
            **{"norm_topk_prob": True, "mlp_only_layers": [1]},
        },
    ),
    "Gemma3": (
        "Gemma3",
        seeing(
            {**KINDS_OF_LAYERS, "query_pre_attn_scalar": 16},
            {**SIGLIP, "image_size": 56, "patch_size": 14},
            mm_tokens_per_image=4,
            image_token_id=IMAGE,
        ),
    ),
    # Like the model of 12B parameters: positions of images see later ones.
    "Gemma4": (
        "Gemma4",
        seeing(
            {
                **{**KINDS_OF_LAYERS, "global_head_dim": 16},
                **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
                "use_bidirectional_attention": "vision",
            },
            {**SIGLIP, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16},
            audio_config=None,
            image_token_id=IMAGE,
        ),
    ),
}
"""The kind and configuration of each model of transformers."""


class RemoteCode(PreTrainedModel):
    """A decoder like remote code: no keyword, and a fixed list of arguments."""

    config_class = Qwen2Config
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> CausalLMOutputWithPast:
        return self.output(input_ids, attention_mask)

    def output(self, ids: Tensor, mask: Tensor, num_kept: int = 0) -> CausalLMOutputWithPast:
        hidden = self.model(ids, attention_mask=mask, use_cache=False)[0]
        return CausalLMOutputWithPast(logits=self.logits_of(hidden[:, -num_kept:]))

    def logits_of(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()


class SquashingRemoteCode(RemoteCode):
    """Ends in an in-place operation that no configuration names; its backward needs its result."""

    def logits_of(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).tanh_()


class KeepingByKeyword(RemoteCode):
    """Uses the head's weight, not the head. Has transformers' keyword."""

    keeps = True

    def forward(self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int = 0) -> Any:
        return self.output(input_ids, attention_mask, logits_to_keep * self.keeps)

    def logits_of(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.lm_head.weight, self.lm_head.bias)


class Promising(KeepingByKeyword):
    """Ignores its keyword."""

    keeps = False


class FixedLength(RemoteCode):
    """Fails without logits of every position."""

    def output(self, ids: Tensor, *args: Any) -> CausalLMOutputWithPast:
        output = super().output(ids, *args)
        output.logits = output.logits.view(*ids.shape, -1)
        return output


REMOTE: dict[str, type[RemoteCode]] = {
    "remote code": RemoteCode,
    "remote code, squashed": SquashingRemoteCode,
    "keeps by keyword": KeepingByKeyword,
    "names the keyword only": Promising,
    "insists on all positions": FixedLength,
}

GRID = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
PLACES = {"image_position_ids": torch.cartesian_prod(*[torch.arange(6)] * 2)[None]}
IMAGES: dict[str, tuple[tuple[int, ...], dict[str, Tensor]]] = {
    "qwen2_5_vl": ((16, 1176), GRID),
    "qwen3_5": ((16, 1536), GRID),
    "gemma3": ((1, 3, 56, 56), {}),
    "gemma4": ((1, 36, 768), PLACES),
}
"""An image has pixels of this shape, and these inputs, by type of model. It takes the tokens
`PLACEHOLDERS`."""

TYPES = {"gemma3": "token_type_ids"} | dict.fromkeys(
    ("gemma4", "qwen2_5_vl", "qwen3_5"), "mm_token_type_ids"
)
"""This input marks the tokens of images, by type of model."""

PLACEHOLDERS = torch.tensor([VISION_START, *[IMAGE] * 4, VISION_END])


def build(name: str, *, lora: bool = False) -> Any:
    """Return the model in training mode; its weights depend on its name alone."""
    torch.manual_seed(0)
    if name in REMOTE:
        model: Any = REMOTE[name](Qwen2Config(**TEXT))
    else:
        kind, settings = CONFIGS[name]
        task = "ConditionalGeneration" if "vision_config" in settings else "CausalLM"
        config = getattr(transformers, f"{kind}Config")(**settings)
        model = getattr(transformers, f"{kind}For{task}")(config)
    if name == "Qwen3-MoE":  # its initial experts are too small
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.3)
    model.config.get_text_config().use_cache = False  # as in a training
    return add_lora(model.train()) if lora else model.train()


def add_lora(model: Any, **more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    # PEFT does not know the linear layers of Gemma 4's tower.
    targets = {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ".*vision_tower.*"} | more
    config = LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, **targets)
    return get_peft_model(model, config)


def recomputed(model: Any, *, use_reentrant: bool) -> Any:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return model
