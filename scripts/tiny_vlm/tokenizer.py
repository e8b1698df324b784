"""Qwen2.5-VL's tokenizer, made offline from the byte-pair ranks that `dashscope` ships.

The ranks file lists 151,643 byte strings, best first. A rank-based encoder joins the pair of
neighbours whose concatenation has the lowest rank; a Hugging Face tokenizer wants a list of
merges instead. Both say the same once every string is turned into the one pair that the ranks
below it leave of it.
"""

import base64
import importlib.util
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from transformers import AddedToken, Qwen2TokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

NUM_RANKS = 151_643

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Ids from 151,643 on, in this order; skipped when a text is decoded without special tokens."""

PLAIN_ADDED_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
"""The ids after those; they stay visible when a text is decoded without special tokens."""


def read_ranks() -> dict[bytes, int]:
    """Return the rank of every byte string in the `qwen.tiktoken` of the installed `dashscope`."""
    spec = importlib.util.find_spec("dashscope")  # it is not imported for it
    assert spec is not None, "install the package dashscope, which holds Qwen's vocabulary"
    assert spec.origin is not None
    ranks = {}
    path = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    for line in path.read_bytes().splitlines():  # a base64 string and a rank
        encoded, rank = line.split()
        ranks[base64.b64decode(encoded)] = int(rank)
    return ranks


def final_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two parts from which the merges of lower rank leave `token` to be joined."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        best = min(pair_ranks)
        assert best < limit, f"{token!r} (rank {limit}) cannot be reached by merges"
        at = pair_ranks.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def build_tokenizer(
    ranks: dict[bytes, int],
    special: Sequence[str] = SPECIAL_TOKENS,
    plain: Sequence[str] = PLAIN_ADDED_TOKENS,
    unused: Mapping[str, int] | None = None,
    eos: str = "<|im_end|>",
    **named: str,
) -> Qwen2TokenizerFast:
    """Build Qwen2.5-VL's tokenizer: the ranks are its ids, its added tokens follow them.

    Args:
        special: another family's, after which padding (the first) and `eos` are named.
        plain: added tokens that stay visible.
        unused: entries of the vocabulary that nothing encodes to, by id; they may hold the places
            of special tokens.
        named: special tokens that a processor asks for, by attribute.
    """
    letters = bytes_to_unicode()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {spell(token): rank for token, rank in ranks.items()} | dict(unused or {})
    pairs = (
        final_merge(token, ranks)
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
    )
    merges = [(spell(left), spell(right)) for left, right in pairs]
    # Naming <|im_end|> as eos here would give it the id of <|endoftext|>: the names come last.
    more = {"extra_special_tokens": named} if named else {}
    tokenizer = Qwen2TokenizerFast(vocab=vocab, merges=merges, **more)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tokenizer.eos_token = eos
    tokenizer.pad_token = special[0]
    return tokenizer
