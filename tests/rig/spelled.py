"""A Qwen2.5-VL whose weights spell token sequences: greedy decoding follows them.

Attention and MLPs add nothing, so a token's hidden state is its embedding. Each token of the
sequences has a channel of its own, which an untied head maps to the next token. All other tokens,
and the last ones of sequences, share a channel that the head maps to `<|im_end|>`.
"""

import math
import shutil
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

VOCABULARY = 151_936
END = 151_645  # <|im_end|>
PROMPTS_END = 198
"""The last token of every prompt: the line break after `<|im_start|>assistant`."""

NEW_TOKEN = "<|halt|>"
"""A token of `--new_special_tokens`."""

SEARCH = [" find", " it", "</", "search", ">\n\n", "More"]

ENDING = 0
"""The channel of tokens that end a sequence."""

LOUD = 100.0
"""Size of an embedding: large enough to make the norm's epsilon negligible."""


def write_speller(base: Path, folder: Path, sequences: Iterable[Sequence[int]]) -> Path:
    """Save a model in `folder` that follows the `sequences` of token ids.

    Args:
        base: a tiny Qwen2.5-VL; its configuration, tokenizer and processor are taken.
        sequences: no token stands in two places.
    """
    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    model = Qwen2_5_VLForConditionalGeneration(config)
    successors = successors_of(sequences)
    width = config.text_config.hidden_size
    assert len(successors) < width, "more tokens than channels"
    with torch.no_grad():
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding_VH = model.get_input_embeddings().weight.zero_()
        head_VH = model.get_output_embeddings().weight.zero_()
        embedding_VH[:, ENDING] = LOUD
        head_VH[END, ENDING] = gain(ENDING) / math.sqrt(width)
        for channel, (token, successor) in enumerate(successors.items(), start=1):
            embedding_VH[token] = 0
            embedding_VH[token, channel] = LOUD
            head_VH[successor, channel] = gain(channel) / math.sqrt(width)
    folder.mkdir(parents=True)
    for pattern in ("*.json", "*.jinja"):
        for file in base.glob(pattern):
            shutil.copy(file, folder)
    model.save_pretrained(folder)
    return folder


def successors_of(sequences: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return each token's successor, in the order of the channels."""
    successors: dict[int, int] = {}
    for sequence in sequences:
        for token, successor in pairwise(sequence):
            assert token not in successors, f"token {token} of {sequence} has two successors"
            successors[token] = successor
    return successors


def gain(channel: int) -> float:
    """Return the logit of a channel's token; all other logits are 0. Neighbours differ."""
    return 8.0 + channel % 7 / 2


def expected_logprobs(sequences: Iterable[Sequence[int]], token_ids: Sequence[int]) -> list[float]:
    """Return the log-probabilities of sampled tokens, in nats at temperature 1.

    Args:
        token_ids: the prompt's last token, then the sampled ones.
    """
    channels = {token: i for i, token in enumerate(successors_of(sequences), start=1)}
    gains = [gain(channels.get(token, ENDING)) for token in token_ids[:-1]]
    return [-math.log1p((VOCABULARY - 1) * math.exp(-g)) for g in gains]


def token_ids(pieces: Sequence[str | int], tokenizer: Any) -> list[int]:
    """Return the ids of pieces, each of which is one token, by its text or its id."""
    ids = [
        [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
        for piece in pieces
    ]
    assert all(len(of_one) == 1 for of_one in ids), f"{pieces!r} are the tokens {ids}"
    return [int(i) for (i,) in ids]
