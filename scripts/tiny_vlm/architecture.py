"""A Qwen2.5-VL of 20 million parameters, 19.4 million of which are Qwen's vocabulary.

The sizes are what the engines allow: vLLM's CPU attention needs a head size of at least 32, and
tensor parallelism over two ranks needs an even number of key-value heads.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

VOCAB_SIZE = 151_936
"""Rows of Qwen2.5-VL's embedding; the tokenizer knows the first 151,665."""

HIDDEN_SIZE = 128
VISION_HIDDEN_SIZE = 64

EMBEDDING_STD = 0.1
"""Five times transformers' default: token identities stay visible beside the image features, and
the tied head learns the answer's form in some 40 steps."""

PIXEL_LIMITS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}
"""Pixels of an image, at least and at most; Qwen2.5-VL's own limits."""

CHAT_TEMPLATE = """\
{%- if messages[0]["role"] != "system" -%}
{{- "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{{- "<|im_start|>" + message["role"] + "\\n" -}}
{%- if message["content"] is string -%}
{{- message["content"] -}}
{%- else -%}
{%- for part in message["content"] -%}
{%- if part["type"] == "text" -%}
{{- part["text"] -}}
{%- elif part["type"] in ("image", "video") -%}
{{- "<|vision_start|><|" + part["type"] + "_pad|><|vision_end|>" -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""
"""Writes what ms-swift's template `qwen2_5_vl` writes for text, images and videos."""


def make_config(tokenizer: Qwen2TokenizerFast) -> Qwen2_5_VLConfig:
    """The model's configuration, with the special ids that `tokenizer` gives."""

    def id_of(token: str) -> int:
        token_id = tokenizer.convert_tokens_to_ids(token)
        assert isinstance(token_id, int)
        return token_id

    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            # A quarter, three eighths and three eighths of the 16 frequencies: time, height, width.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [4, 6, 6],
            },
            "bos_token_id": id_of("<|endoftext|>"),
            "eos_token_id": id_of("<|im_end|>"),
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": VISION_HIDDEN_SIZE,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": HIDDEN_SIZE,
            "fullatt_block_indexes": [1],
        },
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
        tie_word_embeddings=True,
    )


def publish(folder: Path) -> None:
    """Give a saved model and its processor the settings that Qwen publishes: the text's at the top,
    in the spelling of transformers 4, which releases 4 and 5 and every vLLM read."""
    config = _read(folder / "config.json")
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    _write(folder / "config.json", {**text, **config})  # `model_type` is the whole model's
    processor = _read(folder / "processor_config.json")
    for kind in ("image_processor", "video_processor"):
        size = processor[kind]["size"]
        processor[kind] |= {
            "min_pixels": size["shortest_edge"],
            "max_pixels": size["longest_edge"],
        }
    _write(folder / "processor_config.json", processor)


def _read(path: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return settings


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def build_model(config: Qwen2_5_VLConfig, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A freshly drawn model in float32."""
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    draw_weights(model)
    model.generation_config = make_generation_config(config)
    return model


def draw_weights(model: PreTrainedModel) -> None:
    """Draw a model's weights as its small widths need.

    transformers draws every weight with a standard deviation of 0.02, which suits widths of
    thousands. At widths of 64 and 128 it all but silences the vision tower.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
    nn.init.normal_(model.get_input_embeddings().weight, std=EMBEDDING_STD)
    model.tie_weights()


def make_generation_config(config: Qwen2_5_VLConfig) -> GenerationConfig:
    """Plain sampling at temperature 1 until the turn or the text ends."""
    return GenerationConfig(
        do_sample=True,
        bos_token_id=config.text_config.bos_token_id,
        pad_token_id=config.text_config.bos_token_id,
        eos_token_id=[config.text_config.eos_token_id, config.text_config.bos_token_id],
    )


def make_processor(tokenizer: Qwen2TokenizerFast) -> Qwen2_5_VLProcessor:
    """Tokenizer, image and video processor, and chat template, as Qwen2.5-VL combines them."""
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=PIXEL_LIMITS),
        tokenizer=tokenizer,
        # Without a choice, transformers warns at every load.
        video_processor=Qwen2VLVideoProcessor(size=PIXEL_LIMITS, cap_pixels_per_frame=True),
        chat_template=CHAT_TEMPLATE,
    )
