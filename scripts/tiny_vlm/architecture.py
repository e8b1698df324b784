"""The weights of tiny models, and the trained one as a folder that Qwen might have published.

It is a Qwen2.5-VL of 20 million parameters, 19.4 million of which are Qwen's vocabulary. Its sizes
(`families.yaml`) are what the engines allow: vLLM's CPU attention needs a head size of at least 32,
and tensor parallelism over two ranks needs an even number of key-value heads.
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
)

EMBEDDING_STD = 0.1
"""Five times transformers' default: token identities stay visible beside the image features, and
the tied head learns the answer's form in some 40 steps."""


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
    """Draw a model in float32."""
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
    """Let the model sample at temperature 1 until the turn or the text ends."""
    return GenerationConfig(
        do_sample=True,
        bos_token_id=config.text_config.bos_token_id,
        pad_token_id=config.text_config.bos_token_id,
        eos_token_id=[config.text_config.eos_token_id, config.text_config.bos_token_id],
    )
