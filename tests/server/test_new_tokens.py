"""New special tokens that vLLM could not have are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config

from swift_grpo_ext.server.new_tokens import (
    check_model_tokens,
    check_new_tokens,
    check_served_tokens,
)


def test_tokens_must_fit() -> None:
    check_new_tokens(["<a>", "<b>"], known=0, tokenizer_size=98, embedding_rows=100)
    check_new_tokens(["<a>", "<b>"], known=1, tokenizer_size=99, embedding_rows=100)
    check_new_tokens(["<a>"], known=1, tokenizer_size=101, embedding_rows=100)
    message = (
        r"--new_special_tokens <a> <b>: 2 new tokens .* \(100 rows, 99 taken, 1 free\).*Save a"
    )
    with pytest.raises(ValueError, match=message):
        check_new_tokens(["<a>", "<b>"], known=0, tokenizer_size=99, embedding_rows=100)


def test_server_and_trainer_have_the_same_tokens() -> None:
    check_served_tokens([], [], "server 0")
    check_served_tokens(["<a>", "<b>"], ["<a>", "<b>"], "server 0")
    for theirs in ([], ["<b>", "<a>"]):
        with pytest.raises(
            ValueError, match=r"server 0 was started with .* this training with <a>"
        ):
            check_served_tokens(["<a>", "<b>"], theirs, "server 0")


def arguments(model: Path, num_tokens: int, **fields: Any) -> Any:
    tokens = [f"<|new-{i}|>" for i in range(num_tokens)]
    return SimpleNamespace(new_special_tokens=tokens, model_dir=str(model), **fields)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with 40 rows, of whose tokenizer 31 tokens are taken."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(30)}, unk_token="w0"))
    # Qwen2's tokenizer of transformers 5 would add this one of its own.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=40).save_pretrained(tmp_path)
    return tmp_path


def test_the_model_on_disk_decides(model: Path) -> None:
    check_model_tokens(arguments(model, 9, use_vllm=True))
    check_model_tokens(arguments(model, 10, use_vllm=False))
    message = r"10 new tokens do not fit .*\(40 rows, 31 taken, 9 free\)"
    for fields in ({"use_vllm": True}, {"port": 8000}):
        with pytest.raises(ValueError, match=message):
            check_model_tokens(arguments(model, 10, **fields))
    with_known = arguments(model, 9, use_vllm=True)
    with_known.new_special_tokens += ["<|endoftext|>"]
    check_model_tokens(with_known)


def test_nothing_is_read_without_the_flag() -> None:
    check_model_tokens(SimpleNamespace(new_special_tokens=[], use_vllm=True))
