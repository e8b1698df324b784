"""Models of the families in `tiny_vlm/families.yaml`, wider and deeper, with random weights.

Towers, vocabularies and heads of 32 dimensions are the tiny models'; layers repeat as published.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

from common import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from tiny_vlm.families import FAMILIES, Family, make_family

__all__ = ["FAMILIES", "SIZES", "make_family", "widened"]

HEAD_SIZE = 32
STATE_SIZE = 128
"""Dimensions of a gated delta net's heads, as published. They take twice the width."""


class Sizes(NamedTuple):
    """The sizes of a family's text model, and the kinds of layers that it repeats."""

    width: int
    intermediate: int
    layers: tuple[str, ...] = ("full_attention",)


SIZES = {
    "qwen2_5_vl": Sizes(640, 2560),
    "qwen3_5": Sizes(512, 1536, (*["linear_attention"] * 3, "full_attention")),
    "gemma3": Sizes(512, 1792, (*["sliding_attention"] * 5, "full_attention")),
}
"""About 195 million parameters with 16, 16 and 18 layers: the larger the vocabulary, the less is
left for layers. Gemma3's windows are the tiny model's, of 512 positions."""


def widened(name: str, num_layers: int, width: int | None = None) -> Family:
    """Return a family whose model has these layers, and the given width in place of its own."""
    family, sizes = FAMILIES[name], SIZES[name]
    width = width or sizes.width
    pattern = sizes.layers
    if num_layers % len(pattern):
        raise ValueError(f"{num_layers} layers of {name}: expected a multiple of {len(pattern)}")
    text = {
        **family.config["text_config"],
        "hidden_size": width,
        "intermediate_size": width * sizes.intermediate // sizes.width,
        "num_attention_heads": width // HEAD_SIZE,
        "num_key_value_heads": 4,
        "num_hidden_layers": num_layers,
        "layer_types": [*pattern * (num_layers // len(pattern))],
    }
    if "linear_attention" in pattern:
        heads = 2 * width // STATE_SIZE
        text |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
        text |= {"linear_key_head_dim": STATE_SIZE, "linear_value_head_dim": STATE_SIZE}
    vision = family.config["vision_config"]
    if "out_hidden_size" in vision:
        vision = {**vision, "out_hidden_size": width}
    return replace(family, config={**family.config, "text_config": text, "vision_config": vision})
