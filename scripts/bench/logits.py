"""Measure peak memory and time of log-probabilities: ms-swift's own pass, and ours.

    python scripts/bench/logits.py --output scripts/bench/results/logits.json

The work is forward and backward of the sum of all log-probabilities. The model is a Qwen2 with
random weights and Qwen's vocabulary, and so small that logits dominate. Peaks exclude the model and
its gradients. The way "no keyword" is a model whose `forward` has no argument `logits_to_keep`:
ms-swift computes the logits of all its positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from common import DEVICE, Results, as_markdown, make_rows
from swift.rlhf_trainers import GRPOTrainer
from transformers import Qwen2Config, Qwen2ForCausalLM

from scripts.bench.measure import side_by_side
from swift_grpo_ext.logits.shim import LogitsShim

QWEN_VOCABULARY = 151_936
HIDDEN = 64
FULL, KEYWORD, OURS = "ms-swift, no keyword", "ms-swift, keyword", "ours"


class Case(NamedTuple):
    """A batch, padded on the right."""

    name: str
    prompts: tuple[int, ...]  # number of tokens of each row's prompt
    new: int  # number of completion tokens of each row
    vocabulary: int
    ways: tuple[str, ...] = (KEYWORD, OURS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--repetitions", type=int, default=2, help="runs of each way, after a warm-up")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], metavar="N",
        help="completion tokens after a prompt of 512")  # fmt: skip
    add("--vocabulary", type=int, default=QWEN_VOCABULARY, help="vocabulary of the first case; "
        "other cases have a quarter. With Qwen's own, ms-swift takes 19 GB")  # fmt: skip
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--output", type=Path, help="write rows and environment there, as JSON")
    options = parser.parse_args()
    whole, part = options.vocabulary, options.vocabulary // 4
    every = (FULL, KEYWORD, OURS)
    cases = [
        Case("one prompt of 4096 and 1024 new tokens", (4096,), 1024, whole, every),
        Case("prompts of 1500 and 60, 200 new tokens each", (1500, 60), 200, part, every),
        *(Case(f"one prompt of 512 and {n} new tokens", (512,), n, part) for n in options.lengths),
    ]
    results = Results(options.output)
    torch.set_default_device(DEVICE)
    for case in cases:
        works = make_works(case, getattr(torch, options.dtype))
        measured = side_by_side(works, options.repetitions, case.name)
        results.add(make_rows({"case": case.name, "vocabulary": case.vocabulary}, measured))
    names = ("case", "vocabulary", "way")
    print(as_markdown(results.rows, names, ("peak_bytes", "seconds")))


def make_works(case: Case, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Return functions that run each way's forward and backward."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=case.vocabulary, hidden_size=HIDDEN, intermediate_size=HIDDEN,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).train().to(dtype)
    lengths = [prompt + case.new for prompt in case.prompts]
    input_ids = torch.randint(case.vocabulary, (len(lengths), max(lengths)))
    attention_mask = torch.zeros_like(input_ids)
    wanted = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (prompt, length) in enumerate(zip(case.prompts, lengths, strict=True)):
        attention_mask[row, :length] = 1
        wanted[row, prompt:length] = True
    num_kept = max(lengths) - min(case.prompts)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    mask, targets = wanted.roll(-1, 1), input_ids[wanted]
    shim = LogitsShim(model, strict=True)

    def theirs(*keywords: str) -> None:
        """Run ms-swift's own function for a model whose `forward` has these keywords."""
        trainer = SimpleNamespace(
            model_kwarg_keys={"use_cache", *keywords},
            temperature=1.0,
            template=SimpleNamespace(padding_free=False),
        )
        upstream = GRPOTrainer._get_logps_via_local_forward
        model.zero_grad(set_to_none=False)
        logps, _ = upstream(trainer, model, dict(inputs), num_kept, input_ids)
        logps[wanted[:, -num_kept:]].sum().backward()

    def ours() -> None:
        model.zero_grad(set_to_none=False)
        shim.logps(model, inputs, mask, targets).logps_N.sum().backward()

    works: dict[str, Callable[[], None]] = {
        FULL: theirs,
        KEYWORD: partial(theirs, "logits_to_keep"),
        OURS: ours,
    }
    return {way: works[way] for way in case.ways}


if __name__ == "__main__":
    main()
