"""Measures the sample log: time and size of writing, reading places, everything, one group.

    python scripts/bench/sample_log.py --rows 1000000

Token ids are drawn from a vocabulary of 151,936 (Qwen's), evenly, which compresses worse than words
do; log-probabilities are exponential with mean -0.5. Groups have 8 samples.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.reader import index_samples, read_group, read_samples
from swift_grpo_ext.record.row import SAMPLE_ID_COLUMNS, SampleRow
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.tools.export import summary

VOCABULARY = 151_936
GROUP_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--round", type=int, default=1024, help="samples of a round, all ranks")
    parser.add_argument("--ranks", type=int, default=1, help="that share a round")
    parser.add_argument("--folder", type=Path, help="for the log; a temporary one if left out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as run_dir:
        measure(options, Path(run_dir))


def measure(options: argparse.Namespace, run_dir: Path) -> None:
    num_rounds = options.rows // options.round
    seconds = write(options, run_dir, num_rounds)
    files = list(run_dir.rglob("*.arrows"))
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"append      {seconds:8.2f} s   {seconds / num_rounds * 1e3:.2f} ms a round")
    print(f"size        {num_bytes / 1e6:8.1f} MB  in {len(files)} files")
    timed("index", lambda: index_samples(run_dir))
    timed("places", lambda: read_samples(run_dir, columns=SAMPLE_ID_COLUMNS))
    timed("all", lambda: read_samples(run_dir))
    middle = {"phase": "train", "step": num_rounds // 2, "number": 0, "group": 1}
    timed("one group", lambda: read_group(run_dir, **middle))
    timed("summary", lambda: summary(run_dir))


def write(options: argparse.Namespace, run_dir: Path, num_rounds: int) -> float:
    """Seconds in `append`, all ranks' together; making the rows is not counted."""
    rng = np.random.default_rng(options.seed)
    share = options.round // options.ranks
    logs = [SampleLog(run_dir, session=0, start_step=0, rank=rank) for rank in range(options.ranks)]
    seconds = 0.0
    for step in tqdm(range(num_rounds), desc="Writing rounds", unit="round"):
        for rank, log in enumerate(logs):
            rows = make_rows(rng, step, rank, range(rank * share, (rank + 1) * share), options)
            start = time.perf_counter()
            log.append(rows)
            seconds += time.perf_counter() - start
    for log in logs:
        log.close()
    return seconds


def make_rows(
    rng: np.random.Generator, step: int, rank: int, positions: range, options: argparse.Namespace
) -> list[SampleRow]:
    shape = (len(positions), options.tokens)
    token_ids = rng.integers(0, VOCABULARY, shape).tolist()
    logprobs = (-rng.exponential(0.5, shape)).tolist()
    seeds = rng.integers(0, 2**62, len(positions)).tolist()
    rows = []
    for i, position in enumerate(positions):
        group, index = divmod(position, GROUP_SIZE)
        question = f"Image {step * 131 + group}: which digit is in the middle of the picture? " * 4
        rows.append(
            SampleRow(
                sample_id=SampleId(phase="train", step=step, number=0, group=group, index=index),
                seed=seeds[i],
                rank=rank,
                replica=f"server 0 replica {rank % 4}",
                weight_version=step,
                finish_reason="stop",
                token_ids=token_ids[i],
                logprobs=logprobs[i],
                text=" ".join(f"word{token % 4096}" for token in token_ids[i]),
                fingerprint=f"{step * 2**32 + group:032x}",
                prompt=question,
                media=[f"images/train/{step * 131 + group:08d}.png"],
            )
        )
    return rows


def timed(name: str, read: Callable[[], Any]) -> None:
    start = time.perf_counter()
    read()
    print(f"{name:<11} {time.perf_counter() - start:8.2f} s")


if __name__ == "__main__":
    main()
