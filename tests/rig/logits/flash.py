"""Stands for the package `flash_attn` without a GPU: its functions, by the same rules.

Transformers' own code around them runs: it removes padding, and passes their arguments on.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils as flash


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> Tensor:
    """Return [queries, heads, width] of concatenated sequences. The last query of a sequence sees
    its last key; causality and windows are counted from there."""
    q_sizes, k_sizes = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(q_sizes), max(k_sizes)) == (max_seqlen_q, max_seqlen_k)
    outputs = []
    parts = zip(q.split(q_sizes), k.split(k_sizes), v.split(k_sizes), strict=True)
    for query, key, value in parts:
        last = len(key) - len(query)
        ahead = torch.arange(len(key)) - torch.arange(len(query))[:, None] - last
        seen = ahead <= 0
        if window_size[0] >= 0:
            seen &= ahead >= -window_size[0]
        heads = (x.transpose(0, 1) for x in (query, key, value))
        options = {"attn_mask": seen, "scale": softmax_scale, "enable_gqa": True}
        outputs.append(scaled_dot_product_attention(*heads, **options).transpose(0, 1))
    return torch.cat(outputs)


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return [rows, queries, heads, width] of sequences without padding."""
    ends = [torch.arange(len(x) + 1, dtype=torch.int32) * x.shape[1] for x in (q, k)]
    flat = (x.flatten(0, 1) for x in (q, k, v))
    lengths = {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
    return flash_attn_varlen_func(*flat, *ends, **lengths, **options).view(q.shape)


def install(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Let a model use `flash_attention_2` with these functions."""
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    vars(package).update(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_func,
    )
    vars(padding).update(pad_input=flash._pad_input, unpad_input=flash._unpad_input)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    model.config.get_text_config()._attn_implementation = "flash_attention_2"
