"""Logits of chosen positions only, whatever a model's `forward` is called with (SPEC "Logits").

Importable with torch and transformers alone: `shim.py` finds the way that works with a model,
`head.py` works at its output embedding, `chunked.py` makes log-probabilities of logits.
"""

from swift_grpo_ext.logits.chunked import Logps, chunked_logps, token_logps
from swift_grpo_ext.logits.shim import KEYWORDS, LogitsShim, UnsupportedModelError, base_model

__all__ = [
    "KEYWORDS",
    "LogitsShim",
    "Logps",
    "UnsupportedModelError",
    "base_model",
    "chunked_logps",
    "token_logps",
]
