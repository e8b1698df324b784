"""Build Qwen2.5-VL's tokenizer offline from the byte-pair ranks that `dashscope` ships.

The ranks file lists 151,643 byte strings, best first. A rank-based encoder joins the neighbours
whose concatenation has the lowest rank; a Hugging Face tokenizer needs a list of merges instead.
The merge of a string is the pair that remains after all merges with lower ranks (`final_merge`).
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
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
"""Their ids begin at 151,643; decoding with `skip_special_tokens` leaves them out."""

PLAIN_ADDED_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
)
"""Their ids follow; decoding with `skip_special_tokens` keeps them."""


def read_ranks() -> dict[bytes, int]:
    """Return the rank of every byte string in the `qwen.tiktoken` of the installed `dashscope`."""
    spec = importlib.util.find_spec("dashscope")  # without importing the package
    assert spec is not None, "install the package dashscope, which holds Qwen's vocabulary"
    assert spec.origin is not None
    ranks = {}
    path = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    for line in path.read_bytes().splitlines():  # base64 and rank
        encoded, rank = line.split()
        ranks[base64.b64decode(encoded)] = int(rank)
    return ranks


def final_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two parts that remain of `token` after all merges with lower ranks."""
    limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pair_ranks = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        best = min(pair_ranks)
        assert best < limit, f"merges cannot make {token!r} (rank {limit})"
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
    """Build a tokenizer whose ids are the ranks, followed by added tokens.

    Args:
        special: special tokens; the first is the padding token.
        plain: added tokens that decoding always keeps.
        unused: ids of further vocabulary entries, which no text encodes to. They may reserve the
            ids of special tokens.
        named: special tokens that a processor requires, by attribute.
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
    # Set eos and padding last: as an argument, <|im_end|> would get the id of <|endoftext|>.
    more = {"extra_special_tokens": named} if named else {}
    tokenizer = Qwen2TokenizerFast(vocab=vocab, merges=merges, **more)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    tokenizer.eos_token = eos
    tokenizer.pad_token = special[0]
    return tokenizer
