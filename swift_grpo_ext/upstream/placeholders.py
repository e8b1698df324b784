"""Finds a model's placeholder tokens for media, in its template and configuration."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from swift_grpo_ext.upstream.rows import KINDS

if TYPE_CHECKING:
    from swift.template import Template

MARKS = {f"<{kind}>" for kind in KINDS}  # marks of media in texts, which ms-swift replaces
CONFIGURED = re.compile(r"(image|video|audio|boi|boa)_token_(id|index)")
# Qwen's omni models count media by these tokens: if one is sampled, `get_rope_index` (transformers
# 5.19) looks for a medium that does not exist, and fails.
STARTS = re.compile(r"(vision|audio)_start_token_id")


def placeholder_ids(template: Template) -> list[int]:
    """Return the ids of media placeholders, from ms-swift's template and the model's configuration;
    [] for text models."""
    config = getattr(template, "config", None)
    thinker = getattr(config, "thinker_config", None)  # Qwen's omni models
    config = thinker or config
    named = vars(config) if config is not None else {}
    found = [
        *template.placeholder_tokens,
        *(v for k, v in named.items() if CONFIGURED.fullmatch(k)),
        *(v for k, v in named.items() if thinker and STARTS.fullmatch(k)),
    ]
    # A configuration may name ids outside of its vocabulary.
    text = getattr(config, "text_config", config)
    num_ids = getattr(text, "vocab_size", None) or sys.maxsize
    return sorted({i for i in found if isinstance(i, int) and 0 <= i < num_ids})


def placeholder_texts(template: Template) -> list[str]:
    """Return the texts that a tokenizer converts to media placeholders, and that prompts must not
    contain."""
    tokenizer = template.tokenizer
    tokens = {*tokenizer.convert_ids_to_tokens(placeholder_ids(template))}
    # A vocabulary may have marks as tokens (LLaVA's).
    added = MARKS.intersection(tokenizer.get_added_vocab())
    return sorted((tokens - {*template.special_tokens}) | added)
