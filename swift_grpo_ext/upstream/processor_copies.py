"""vLLM's processors, loaded without copies of their tokenizer.

Symptom: the first request with an image waits for 17 s (151,936 tokens of Qwen2.5-VL, one core).
vLLM hands its tokenizer to `from_pretrained` of the processor, which deep-copies its arguments five
times on the way; each copy of vLLM's pool of tokenizers makes three tokenizers. None is used.
Upstream: vLLM 0.32, transformers_utils/processor.py (`get_processor`) and tokenizers/hf.py
(`maybe_make_thread_pool`); transformers 5.19, processing_utils.py, configuration_utils.py and
tokenization_utils_base.py.
Adaptation: while vLLM loads a processor, a deep copy of the tokenizer that it hands over is that
tokenizer. The pool's class belongs to this one tokenizer; all is put back.
Can go when vLLM or transformers copies no tokenizer there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, wraps
from typing import Any

from swift_grpo_ext.upstream import pins
from swift_grpo_ext.upstream.contract import mismatch


@cache
def install() -> None:
    """Load processors without copies. Call before an engine is made.

    A vLLM that we do not know is left as it is: this saves time, and nothing depends on it.
    """
    if any(map(mismatch, pins.PROCESSOR_COPIES)):
        return
    from vllm.transformers_utils import processor as upstream

    get_processor = upstream.get_processor

    @wraps(get_processor)
    def load(*args: Any, **kwargs: Any) -> Any:
        with uncopied(kwargs.get("tokenizer")):
            return get_processor(*args, **kwargs)

    upstream.get_processor = load
    upstream.cached_get_processor = lru_cache(load)


@contextmanager
def uncopied(tokenizer: Any) -> Iterator[None]:
    """Let `copy.deepcopy` return vLLM's pool of tokenizers itself; another tokenizer is copied."""
    from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

    pool = type(tokenizer)
    if not issubclass(pool, ThreadSafeHFTokenizerMixin) or "__deepcopy__" in vars(pool):
        yield
        return
    pool.__deepcopy__ = lambda self, memo: self
    try:
        yield
    finally:
        del pool.__deepcopy__
