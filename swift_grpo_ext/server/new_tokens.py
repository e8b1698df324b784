"""`--new_special_tokens` with vLLM: the engine must know the tokens, and have rows for them.

ms-swift adds the tokens to the tokenizer, and lets the embedding of the model that is trained grow
where they do not fit. vLLM loads the model from disk, with the rows that it has there (ms-swift
4.6, `_get_hf_config_overrides`; vLLM 0.32): tokens beyond them would end a rollout with an error
deep in a weight update, or never be sampled.
"""

from __future__ import annotations

from pathlib import Path

from swift.arguments import RLHFArguments, RolloutArguments
from swift.utils import HfConfigFactory
from transformers import AutoConfig, AutoTokenizer

from swift_grpo_ext.checks.finding import SettingsError


def check_model_tokens(args: RLHFArguments | RolloutArguments) -> None:
    """Refuse `--new_special_tokens` for which the model that vLLM will load has no rows.

    Raises:
        SettingsError: names the setting, the rows that are free, and the remedy.
    """
    new_tokens = args.new_special_tokens
    if not new_tokens or not (isinstance(args, RolloutArguments) or args.use_vllm):
        return
    directory = Path(args.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    rows, taken = HfConfigFactory.get_config_attr(config, "vocab_size"), len(tokenizer)
    vocabulary = tokenizer.get_vocab()
    added = sum(token not in vocabulary for token in new_tokens)
    free = max(rows - taken, 0)
    if added > free:
        raise SettingsError(
            f"--new_special_tokens {' '.join(new_tokens)}: {added} new tokens do not fit into the "
            f"model's embedding ({rows} rows, {taken} taken, {free} free), and vLLM cannot let it "
            "grow. Save a model that has them, with transformers: "
            "tokenizer.add_special_tokens({'additional_special_tokens': [...]}), "
            "model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=128), and "
            "save_pretrained of both (the processor too) in one directory; give that as --model, "
            "to `swift rollout` too, without this flag. Or train with --use_vllm false."
        )
