"""A larger model of the tiny one's architecture and vocabulary, with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

WIDTH = 640
LAYERS = 8
HEADS, KV_HEADS = 20, 4  # of 32 dimensions, as the tiny model's: its rotary sections stay


def write_large_model(tiny: Path, folder: Path, layers: int = LAYERS) -> None:
    """Write 145 million float32 weights, 579 MB, with the tiny model's processor and tokenizer; 6
    million more for each further layer."""
    weights = shutil.ignore_patterns("*.safetensors", "manifest.json")
    shutil.copytree(tiny, folder, ignore=weights)
    config = AutoConfig.from_pretrained(tiny)
    text = config.text_config
    text.hidden_size, text.intermediate_size = WIDTH, 4 * WIDTH
    text.num_attention_heads, text.num_key_value_heads = HEADS, KV_HEADS
    text.num_hidden_layers, text.layer_types = layers, ["full_attention"] * layers
    config.vision_config.out_hidden_size = WIDTH
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
