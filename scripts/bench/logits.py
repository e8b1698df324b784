"""Peak memory and time of log-probabilities: ms-swift's own pass, and ours.

    python scripts/bench/logits.py --output scripts/bench/results/logits.json

A Qwen2 with random weights, of Qwen's vocabulary and next to nothing else, so that logits are what
is measured: forward and backward of the sum of all log-probabilities, in float32 (`--dtype`), in
turns. Peaks are of torch's allocator, beyond the model and its gradients.
*No keyword*: a model whose `forward` does not name `logits_to_keep`, where ms-swift computes the
logits of all positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from common import Results, as_markdown, default_device, make_rows
from swift.rlhf_trainers import GRPOTrainer
from transformers import Qwen2Config, Qwen2ForCausalLM

from scripts.bench.measure import side_by_side
from swift_grpo_ext.logits.shim import LogitsShim

QWEN_VOCABULARY = 151_936
HIDDEN = 64
FULL, KEYWORD, OURS = "ms-swift, no keyword", "ms-swift, keyword", "ours"


class Case(NamedTuple):
    """A case is the rows of one batch, padded on the right."""

    name: str
    prompts: tuple[int, ...]  # tokens of each row's prompt
    new: int  # completion tokens of each row
    vocabulary: int
    ways: tuple[str, ...] = (KEYWORD, OURS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--repetitions", type=int, default=2, help="turns of each way, after one that warms up")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], metavar="N",
        help="completion tokens, after a prompt of 512")  # fmt: skip
    add("--vocabulary", type=int, default=QWEN_VOCABULARY, help="of the first case, and of others "
        "a quarter; with Qwen's own, ms-swift takes 19 GB")  # fmt: skip
    add("--device", default=default_device(), choices=("cpu", "cuda"))
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
    torch.set_default_device(options.device)
    for case in cases:
        works = make_works(case, getattr(torch, options.dtype))
        turns = side_by_side(works, options.repetitions, options.device, case.name)
        results.add(make_rows({"case": case.name, "vocabulary": case.vocabulary}, turns))
    names = ("case", "vocabulary", "way")
    print(as_markdown(results.rows, names, ("peak_bytes", "seconds")))


def make_works(case: Case, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Return each way's forward and backward, as a function."""
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
        """Run ms-swift's own function, for a model whose `forward` names the keyword, or not."""
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
