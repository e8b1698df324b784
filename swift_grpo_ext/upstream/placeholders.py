"""Which tokens stand for media inside a model, by its template and its configuration."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from swift_grpo_ext.upstream.rows import KINDS

if TYPE_CHECKING:
    from swift.template import Template

MARKS = {f"<{kind}>" for kind in KINDS}  # where a text shows media, until ms-swift replaces them
CONFIGURED = re.compile(r"(image|video|audio|boi|boa)_token_(id|index)")
STARTS = re.compile(r"(vision|audio)_start_token_id")
"""Qwen's omni models count media by these tokens where they number positions: a sampled one
makes `get_rope_index` (transformers 5.19) look for an item that is not there, and fail."""


def placeholder_ids(template: Template) -> list[int]:
    """Return the ids of the tokens that stand for media, by ms-swift's template and the model's
    configuration; [] for text models."""
    config = getattr(template, "config", None)
    thinker = getattr(config, "thinker_config", None)  # of Qwen's omni models
    config = thinker or config
    named = vars(config) if config is not None else {}
    found = [
        *template.placeholder_tokens,
        *(v for k, v in named.items() if CONFIGURED.fullmatch(k)),
        *(v for k, v in named.items() if thinker and STARTS.fullmatch(k)),
    ]
    # A configuration may name tokens that its vocabulary does not have.
    text = getattr(config, "text_config", config)
    num_ids = getattr(text, "vocab_size", None) or sys.maxsize
    return sorted({i for i in found if isinstance(i, int) and 0 <= i < num_ids})


def placeholder_texts(template: Template) -> list[str]:
    """Return the texts that a tokenizer reads as tokens that stand for media, which no question may
    have. A mark is among them where the vocabulary has it (LLaVA's)."""
    tokenizer = template.tokenizer
    tokens = {*tokenizer.convert_ids_to_tokens(placeholder_ids(template))}
    added = MARKS.intersection(tokenizer.get_added_vocab())
    return sorted((tokens - {*template.special_tokens}) | added)
