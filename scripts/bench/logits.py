"""Peak memory and time of log-probabilities: ms-swift's own pass, ours, and ours in chunks.

    python scripts/bench/logits.py --output scripts/bench/results/logits.json

Writes the JSON and, beside it, the tables as Markdown. A Qwen2 with random weights, of Qwen's
vocabulary and next to nothing else, so that logits are what is measured: forward and backward of
the sum of all log-probabilities, in float32 on CPU (`--dtype`, `--device cuda`). Each measurement
has a process of its own; ways take turns within a repetition. Peaks are of torch's allocator,
beyond the model (`peak.py`).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from common import command, environment, rotated
from peak import peak_bytes
from tqdm import tqdm

QWEN_VOCABULARY = 151_936
HIDDEN = 64
TURNS = 2  # timed turns of a process, after one that warms up

FULL, KEYWORD, OURS, CHUNKED = (
    "ms-swift, no keyword",
    "ms-swift, keyword",
    "ours, no keyword",
    "ours, chunked",
)
WAYS = (FULL, KEYWORD, OURS, CHUNKED)


@dataclass(frozen=True)
class Case:
    """A case is the rows of one batch, padded on the right."""

    name: str
    prompts: tuple[int, ...]
    """Tokens of each row's prompt."""

    new: int
    """Completion tokens of each row."""

    vocabulary: int = QWEN_VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add(
        "--repetitions",
        type=int,
        default=1,
        help="processes for each way of each case, of two timed turns",
    )
    add("--chunk-size", type=int, default=512, help="--logps_chunk_size")
    add("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], metavar="N",
        help="completion tokens, after a prompt of 512")  # fmt: skip
    add("--sweep-vocabulary", type=int, default=QWEN_VOCABULARY // 4,
        help="of other cases than the first; with Qwen's own, ms-swift takes 19 GB")  # fmt: skip
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--output", type=Path, help="FILE.json; FILE.md is written beside it")
    options = parser.parse_args()
    cases = [
        (Case("one long prompt", (4096,), 1024), WAYS),
        (Case("unequal prompts", (1500, 60), 200, options.sweep_vocabulary), WAYS),
        *(
            (Case(f"{n} new tokens", (512,), n, options.sweep_vocabulary), (KEYWORD, OURS, CHUNKED))
            for n in options.lengths
        ),
    ]
    result = {"command": command(), "environment": environment(), "chunk_size": options.chunk_size}
    result |= {"device": options.device, "dtype": options.dtype}
    result["rows"] = list(measured(cases, options))
    markdown = as_markdown(result)
    print(markdown)
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(markdown + "\n", encoding="utf-8")


def measured(
    cases: Sequence[tuple[Case, Sequence[str]]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way of each case; its `seconds` are a number for each timed turn."""
    turns = [(case, ways, r) for case, ways in cases for r in range(options.repetitions)]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    how = (options.chunk_size, options.device, options.dtype)
    for case, ways, r in tqdm(turns, desc="Cases", unit="repetition", dynamic_ncols=True):
        for way in rotated(ways, r):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                found = process.submit(measure, case, way, *how).result()
            row = rows.setdefault(
                (case.name, way), {"case": asdict(case), "way": way, "seconds": [], **found}
            )
            row["seconds"] += found["turn_seconds"]
            assert row["peak_bytes"] == found["peak_bytes"]
    for row in rows.values():
        del row["turn_seconds"]
        yield row


# --- in the process of a turn ---


def measure(case: Case, way: str, chunk_size: int, device: str, dtype: str) -> dict[str, Any]:
    """Return the seconds, the peak and the number of positions of one way."""
    torch.set_default_device(device)
    work, head = make_work(case, way, chunk_size, getattr(torch, dtype))
    positions: list[int] = []
    hook = head.register_forward_hook(lambda _, __, out: positions.append(out[..., 0].numel()))
    work()  # warms up; gradients are there from now on
    hook.remove()
    seconds = []
    for _ in range(TURNS):
        gc.collect()
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - start)
    peak = peak_bytes(work)
    # A chunk's logits are made again in its backward; the last position is what a model goes on
    # with after chunks.
    again = 2 if way == CHUNKED else 1
    return {
        "turn_seconds": seconds,
        "peak_bytes": peak,
        "positions": (sum(positions) - (again - 1)) // again,
    }


def make_work(
    case: Case, way: str, chunk_size: int, dtype: torch.dtype
) -> tuple[Callable[[], None], Any]:
    """Return one way's forward and backward, as a function, and the model's head."""
    from swift.rlhf_trainers import GRPOTrainer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from swift_grpo_ext.logits.shim import LogitsShim

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
    # ms-swift's own function, for a model whose `forward` names the keyword, or does not.
    trainer = SimpleNamespace(
        model_kwarg_keys={"use_cache", "logits_to_keep"} if way == KEYWORD else {"use_cache"},
        temperature=1.0,
        template=SimpleNamespace(padding_free=False),
    )
    upstream = GRPOTrainer._get_logps_via_local_forward

    def work() -> None:
        model.zero_grad(set_to_none=False)
        if way in (FULL, KEYWORD):
            logps, _ = upstream(trainer, model, dict(inputs), num_kept, input_ids)
            logps = logps[wanted[:, -num_kept:]]
        else:
            size = chunk_size if way == CHUNKED else 0
            logps = shim.logps(model, inputs, mask, targets, chunk_size=size).logps_N
        logps.sum().backward()

    return work, model.get_output_embeddings()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- tables ---


def as_markdown(result: dict[str, Any]) -> str:
    made = result["environment"]
    machine = made["accelerator"] or f"{made['cores']} cores of {made['cpu']}"
    versions = ", ".join(f"{n} {v}" for n, v in made["versions"].items() if n in SHOWN_VERSIONS)
    text = [
        "# Log-probabilities: peak memory and time",
        f"`{result['command']}`, {made['date']}, {machine}, Python {made['python']}, {versions}, "
        f"OpenMP settings {made['openmp'] or 'unset'}, load average at the start "
        f"{made['load_at_start']}.",
        f"Forward and backward, {result['dtype']}, on {result['device']}, chunks of "
        f"{result['chunk_size']}. *No keyword*: a model whose `forward` does not name "
        "`logits_to_keep`, where ms-swift computes the logits of all positions. Ratios are to the "
        "first way; of times, the median of the turns' ratios, with the lowest and the highest.",
    ]
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"]["name"], []).append(row)
    return "\n\n".join([*text, *map(case_table, cases.values())])


SHOWN_VERSIONS = ("torch", "ms-swift", "transformers")


def case_table(ways: Sequence[dict[str, Any]]) -> str:
    first, case = ways[0], ways[0]["case"]
    prompts = " and ".join(map(str, case["prompts"]))
    lines = [
        f"## Prompts of {prompts} tokens, {case['new']} new ones each\n",
        f"Vocabulary {case['vocabulary']}.\n",
        "| way | positions | peak GiB | of the first | seconds | of the first |",
        "|---|---|---|---|---|---|",
    ]
    for row in ways:
        seconds, share = median(row["seconds"]), row["peak_bytes"] / first["peak_bytes"]
        pairs = zip(row["seconds"], first["seconds"], strict=True)
        times = [ours / theirs for ours, theirs in pairs]
        lines.append(
            f"| {row['way']} | {row['positions']} | {row['peak_bytes'] / 2**30:.2f} "
            f"| {share:.3f} | {seconds:.3f} "
            f"| {median(times):.2f} ({min(times):.2f} to {max(times):.2f}) |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
