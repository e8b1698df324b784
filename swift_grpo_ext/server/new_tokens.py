"""`--new_special_tokens` with vLLM: the engine must know the tokens, and have rows for them.

ms-swift adds the tokens to the tokenizer, and lets the embedding of the model that is trained grow
where they do not fit. vLLM loads the model from disk, with the rows that it has there (ms-swift
4.6, `_get_hf_config_overrides`; vLLM 0.32): tokens beyond them would end a rollout with an error
deep in a weight update, or never be sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def check_new_tokens(
    new_tokens: Sequence[str], *, known: int, tokenizer_size: int, embedding_rows: int
) -> None:
    """Refuse tokens for which the model on disk has no rows.

    Args:
        new_tokens: `--new_special_tokens`.
        known: how many of them the tokenizer on disk holds already.
        tokenizer_size: number of its tokens without the others.
        embedding_rows: `vocab_size` of the model on disk.

    Raises:
        ValueError: names the setting, the value received, what was expected and the remedy.
    """
    free = max(embedding_rows - tokenizer_size, 0)
    added = len(new_tokens) - known
    if added <= free:
        return
    raise ValueError(
        f"--new_special_tokens {' '.join(new_tokens)}: {added} new tokens do not fit into the "
        f"model's embedding ({embedding_rows} rows, {tokenizer_size} taken, {free} free), and "
        "vLLM cannot let it grow. Save a model that has them, with transformers: "
        "tokenizer.add_special_tokens({'additional_special_tokens': [...]}), "
        "model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=128), and "
        "save_pretrained of both (the processor too) in one directory; give that as --model, to "
        "`swift rollout` too, without this flag. Or train with --use_vllm false."
    )


def check_served_tokens(ours: Sequence[str], theirs: Sequence[str], server: str) -> None:
    """Refuse a server whose tokenizer is not the trainer's: ids follow the order of the flag.

    Raises:
        ValueError: names the server, both settings and the remedy.
    """
    if list(ours) != list(theirs):
        raise ValueError(
            f"{server} was started with --new_special_tokens {' '.join(theirs) or '(none)'}, this "
            f"training with {' '.join(ours) or '(none)'}: the same ids would be other tokens. Give "
            "both the same, in the same order."
        )


def check_model_tokens(args: Any) -> None:
    """The model that vLLM will load has rows for `--new_special_tokens`.

    Args:
        args: of `swift rlhf` or `swift rollout`, once the model's directory is known.

    Raises:
        ValueError: see `check_new_tokens`.
    """
    serves = hasattr(args, "port")
    if not args.new_special_tokens or not (serves or args.use_vllm):
        return
    from swift.utils import HfConfigFactory
    from transformers import AutoConfig, AutoTokenizer

    directory = Path(args.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    vocabulary = tokenizer.get_vocab()
    check_new_tokens(
        args.new_special_tokens,
        known=sum(token in vocabulary for token in args.new_special_tokens),
        tokenizer_size=len(tokenizer),
        embedding_rows=HfConfigFactory.get_config_attr(config, "vocab_size"),
    )
