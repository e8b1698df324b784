"""Models of the families in `tiny_vlm/families.yaml`, wider and deeper, with random weights.

Towers and vocabularies are the tiny models'; layers repeat as published.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import common  # noqa: F401  (makes `tiny_vlm` importable)
from tiny_vlm.families import FAMILIES, Family, make_config, make_family

__all__ = ["FAMILIES", "SIZES", "make_config", "make_family", "widened"]

TINY_HEAD = 32
STATE_SIZE = 128
"""Dimensions of a gated delta net's heads, as published. They take twice the width."""


class Sizes(NamedTuple):
    """The sizes of a family's text model, and the kinds of layers that it repeats."""

    width: int
    intermediate: int
    head: int = 32
    num_key_value_heads: int = 4
    layers: tuple[str, ...] = ("full_attention",)


SIZES = {
    "qwen2_5_vl": Sizes(640, 2560),
    "qwen3_5": Sizes(512, 1536, layers=(*["linear_attention"] * 3, "full_attention")),
    "gemma3": Sizes(512, 1792, 256, 1, (*["sliding_attention"] * 5, "full_attention")),
}
"""About 195 million parameters with 16, 16 and 18 layers: the larger the vocabulary, the less is
left for layers. Gemma3's windows are the tiny model's, of 512 positions; its heads are as large as
published, for ms-swift trains it with `eager`, whose scores would fill the memory with small ones.
"""


def widened(
    name: str, num_layers: int, width: int | None = None, head: int | None = None
) -> Family:
    """Return a family whose model has these layers, and a width and a size of heads other than its
    own, where they are given."""
    family, sizes = FAMILIES[name], SIZES[name]
    width, head = width or sizes.width, head or sizes.head
    pattern = sizes.layers
    if num_layers % len(pattern):
        raise ValueError(f"{num_layers} layers of {name}: expected a multiple of {len(pattern)}")
    tiny = family.config["text_config"]
    text = {
        **tiny,
        "hidden_size": width,
        "intermediate_size": width * sizes.intermediate // sizes.width,
        "num_attention_heads": width // head,
        "num_key_value_heads": min(sizes.num_key_value_heads, width // head),
        "num_hidden_layers": num_layers,
        "layer_types": [*pattern * (num_layers // len(pattern))],
    }
    if "head_dim" in tiny:
        text["head_dim"] = head
    if "query_pre_attn_scalar" in tiny:
        text["query_pre_attn_scalar"] = head
    if sections := tiny.get("rope_parameters", {}).get("mrope_section"):
        wider = [n * head // TINY_HEAD for n in sections]
        text["rope_parameters"] = {**tiny["rope_parameters"], "mrope_section": wider}
    if "linear_attention" in pattern:
        heads = 2 * width // STATE_SIZE
        text |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
        text |= {"linear_key_head_dim": STATE_SIZE, "linear_value_head_dim": STATE_SIZE}
    vision = family.config["vision_config"]
    if "out_hidden_size" in vision:
        vision = {**vision, "out_hidden_size": width}
    return replace(family, config={**family.config, "text_config": text, "vision_config": vision})
