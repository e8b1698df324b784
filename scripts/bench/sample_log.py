"""Measures the run's record: CPU seconds and bytes a token of writing, seconds of reading.

    python scripts/bench/sample_log.py --output scripts/bench/results/sample_log.json

Texts are drawn from a Markov chain over the tokens of this repository's documentation and sources,
in the tokenizer of `--model`; log-probabilities are exponential with mean -0.5, which compresses
worse than those of a trained policy. Groups have 8 samples.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import DEFAULT_MODEL, ROOT, command, environment
from tokenizers import Tokenizer

from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.reader import index_samples, read_group, read_samples
from swift_grpo_ext.record.row import SAMPLE_ID_COLUMNS, SampleRow
from swift_grpo_ext.sampling.seeding import SampleId

GROUP_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=10_240, help="of a round")
    parser.add_argument("--tokens", type=int, default=1000, help="of a completion")
    parser.add_argument("--rounds", type=int, default=4, help="the same rows in each")
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="its tokenizer is used")
    parser.add_argument("--output", type=Path, help="FILE.json")
    options = parser.parse_args()
    texts = make_texts(options)
    with tempfile.TemporaryDirectory() as run_dir:
        figures = write(options, texts, Path(run_dir)) | read(options, Path(run_dir))
    for name, figure in figures.items():
        print(f"{name:<32} {figure:10.3f}")
    if options.output:
        result = {"command": command(), "environment": environment(), "figures": figures}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def make_texts(options: argparse.Namespace) -> list[tuple[list[int], list[float], str]]:
    """Return token ids, log-probabilities and text of as many completions as a round has."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/*/*.py")]
    contents = [path.read_text(encoding="utf-8") for path in files]
    corpus = np.concatenate([e.ids for e in tokenizer.encode_batch(contents)]).astype(np.int64)
    order = np.argsort(corpus[:-1], kind="stable")
    starts = np.searchsorted(corpus[:-1][order], np.arange(corpus.max() + 2))
    rng = np.random.default_rng(0)
    tokens = rng.choice(corpus[:-1], options.samples)
    drawn = np.empty((options.samples, options.tokens), np.int64)
    for position in range(options.tokens):
        drawn[:, position] = tokens
        counts = starts[tokens + 1] - starts[tokens]
        chosen = starts[tokens] + (rng.random(options.samples) * counts).astype(int)
        followers = corpus[order[np.minimum(chosen, len(order) - 1)] + 1]
        # The corpus' last token may have no follower: begin anew.
        tokens = np.where(starts[followers + 1] > starts[followers], followers, corpus[0])
    token_ids = drawn.tolist()
    logprobs = np.negative(rng.exponential(0.5, drawn.shape)).tolist()
    texts = tokenizer.decode_batch(token_ids, skip_special_tokens=False)
    return list(zip(token_ids, logprobs, texts, strict=True))


def write(
    options: argparse.Namespace, texts: list[tuple[list[int], list[float], str]], run_dir: Path
) -> dict[str, float]:
    """Write the rounds; the first is left out of the times, as memory is new to it."""
    log = SampleLog(run_dir, session=0, start_step=0, rank=0)
    rng = np.random.default_rng(1)
    handed, waited, cpu = [], [], []
    for step in range(options.rounds):
        rows = []
        for number, (token_ids, logprobs, text) in enumerate(texts):
            group, index = divmod(number, GROUP_SIZE)
            rows.append(
                SampleRow(
                    sample_id=SampleId(
                        phase="train", step=step, number=0, group=group, index=index
                    ),
                    seed=int(rng.integers(2**62)),
                    rank=0,
                    replica=f"server 0 replica {group % 4}",
                    weight_version=step,
                    finish_reason="length",
                    token_ids=token_ids,
                    logprobs=logprobs,
                    text=text,
                    fingerprint=f"{group:032x}",
                    prompt=f"Image {group}: which digit is in the middle of the picture? " * 4,
                    media=[f"images/train/{group:08d}.png"],
                )
            )
        cpu_start, start = time.process_time(), time.perf_counter()
        log.append(rows)
        handed.append(time.perf_counter() - start)
        log.flush()
        waited.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    files = list(run_dir.rglob("*.parquet"))
    num_tokens = options.rounds * options.samples * options.tokens
    return {
        "bytes a token": sum(path.stat().st_size for path in files) / num_tokens,
        "files": len(files),
        "CPU seconds of a round": float(np.median(cpu[1:])),
        "seconds of the step": float(np.median(handed[1:])),
        "seconds of the writer's thread": float(np.median(waited[1:])),
    }


def read(options: argparse.Namespace, run_dir: Path) -> dict[str, float]:
    last: dict[str, Any] = {"phase": "train", "step": options.rounds - 1, "number": 0, "group": 1}
    reads: dict[str, Callable[[], Any]] = {
        "index": lambda: index_samples(run_dir),
        "names of all samples": lambda: read_samples(run_dir, columns=SAMPLE_ID_COLUMNS),
        "everything": lambda: read_samples(run_dir),
        "one group": lambda: read_group(run_dir, **last),
    }
    figures = {}
    for name, call in reads.items():
        start = time.perf_counter()
        call()
        figures[f"seconds to read: {name}"] = time.perf_counter() - start
    return figures


if __name__ == "__main__":
    main()
