"""New special tokens without a row in the model are refused before it is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swift.arguments import RLHFArguments, RolloutArguments
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config

from swift_grpo_ext.checks.finding import enforce
from swift_grpo_ext.checks.rules import rules_of_model


def arguments(model: Path, num_tokens: int, *known: str, use_vllm: bool | None = True) -> Any:
    """Arguments of a training; of a server where `use_vllm` is None."""
    kind = RolloutArguments if use_vllm is None else RLHFArguments
    args = kind.__new__(kind)
    tokens = [f"<|new-{i}|>" for i in range(num_tokens)]
    vars(args).update(new_special_tokens=[*tokens, *known], model_dir=str(model), use_vllm=use_vllm)
    args.model_meta = SimpleNamespace(is_multimodal=False, model_type="qwen2")
    vars(args).update(vllm_engine_kwargs=None, router_replay_mode="disabled", target_modules=[])
    return args


def test_the_model_on_disk_decides(tmp_path: Path) -> None:
    """It has 40 rows, and its tokenizer 31 tokens."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(30)}, unk_token="w0"))
    # Qwen2's tokenizer of transformers 5 would add this one of its own.
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=40).save_pretrained(tmp_path)
    for allowed in (
        arguments(tmp_path, 9),
        arguments(tmp_path, 9, "<|endoftext|>"),
        arguments(tmp_path, 10, use_vllm=False),
        arguments(tmp_path / "nothing is read", 0),
    ):
        assert [*rules_of_model(allowed)] == []
    message = r"--new_special_tokens <\|new-0\|> .*: 10 new tokens do not fit .*"
    message += r"\(40 rows, 31 taken, 9 free\).*Save a model that has them"
    for refused in (arguments(tmp_path, 10), arguments(tmp_path, 10, use_vllm=None)):
        with pytest.raises(ValueError, match=message):
            enforce(rules_of_model(refused))
