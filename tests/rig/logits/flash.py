"""Stands for the package `flash_attn` without a GPU: its two functions, by the same rules.

Transformers' own code around them runs: it removes padding, and passes their arguments on.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import modeling_flash_attention_utils as flash


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """Return [queries, heads, width] of concatenated sequences. The last query of a sequence sees
    its last key; causality and windows are counted from there."""
    assert causal
    assert q.ndim == k.ndim == 3
    assert cu_seqlens_q[-1] == len(q)
    assert cu_seqlens_k[-1] == len(k)
    outputs = []
    bounds = zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), cu_seqlens_k.tolist(),
                 cu_seqlens_k[1:].tolist(), strict=False)  # fmt: skip
    for q0, q1, k0, k1 in bounds:
        assert q1 - q0 <= max_seqlen_q
        assert k1 - k0 <= max_seqlen_k
        groups = q.shape[1] // k.shape[1]
        query, key, value = (x.transpose(0, 1) for x in (q[q0:q1], k[k0:k1], v[k0:k1]))
        key, value = (x.repeat_interleave(groups, 0) for x in (key, value))
        scores = query @ key.transpose(1, 2) * (softmax_scale or q.shape[-1] ** -0.5)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        ahead = torch.arange(k1 - k0) - torch.arange(q1 - q0)[:, None] - (k1 - k0 - (q1 - q0))
        hidden = ahead > 0
        if window_size[0] >= 0:
            hidden |= ahead < -window_size[0]
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((probs @ value).transpose(0, 1))
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
