"""Measure writing and reading a run's record, and viewing it with `swift-grpo-ext view`.

    python scripts/bench/record.py --output scripts/bench/results/record.json
    python scripts/bench/record.py --rounds 976 --samples 1024 --tokens 32     a million samples
    python scripts/bench/record.py --sizes --output scripts/bench/results/record_sizes.json

Texts come from a Markov chain over the tokens of this repository's files. Log-probabilities are
exponential with mean -0.5; those of a trained policy compress better. Each round has the same
prompts and texts, in groups of 8. The first page is timed from the start of the command until the
newest samples arrive over HTTP; each other page is requested once.

`--sizes` measures only file sizes, for short and long answers in small and large rounds: the bytes
of a token (id, log-probability and text), and the other bytes of a sample.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from common import DEFAULT_MODEL, ROOT, command, environment
from tokenizers import Tokenizer
from tqdm import tqdm

from swift_grpo_ext.record.log import SampleLog, record_files
from swift_grpo_ext.record.query import open_record, read_group, read_samples
from swift_grpo_ext.record.tables import REWARDS, SAMPLE_ID_COLUMNS, SAMPLES, RewardRow, SampleRow
from swift_grpo_ext.sampling.seeding import SampleId

GROUP_SIZE = 8
TOKEN_COLUMNS = ("token_ids.list.element", "logprobs.list.element", "text")
QUESTION = "Which digit is in the middle of the picture? " * 4
Text = tuple[Any, Any, str]  # arrays of token ids and log-probabilities, and text of a completion
PAGES = {
    "best first": "samples?sort=-reward",
    "longest first": "samples?sort=-num_tokens",
    "steps and reward": "samples?min_step=1&max_step=200&min_reward=0.9",
    "truncated": "samples?truncated=true",
    "a text": "samples?text=the+sample",
    "best of a function": "samples?sort=-reward.Accuracy",
    "a column": "samples?text=question+7&where=columns",
    "a text, sorted": "samples?text=self&sort=-gap_max",
    "groups of a round": "groups",
    "one group": "group?round=train.1.0&group=3",
    "overview": "overview",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--samples", type=int, default=10_240, help="samples of a round")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a completion")
    parser.add_argument("--sizes", action="store_true", help="measure only file sizes")
    parser.add_argument("--output", type=Path, help="write figures and environment there, as JSON")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    shapes = product((64, 1024), (30, 300, 1000)) if options.sizes else ()
    for options.samples, options.tokens in shapes:
        figures |= sizes(options)
    if not figures:
        texts = make_texts(options)
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder)
            figures = write(options, texts, run_dir) | read(options, run_dir) | view(run_dir)
    for name, figure in figures.items():
        print(f"{name:<60} {figure:10.3f}")
    if options.output:
        result = {"command": command(), "environment": environment(), "figures": figures}
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def make_texts(options: argparse.Namespace) -> list[Text]:
    """Return the completions of a round."""
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
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
        # The last token of the corpus may have no follower: continue with the first token.
        tokens = np.where(starts[followers + 1] > starts[followers], followers, corpus[0])
    logprobs = np.negative(rng.exponential(0.5, drawn.shape)).astype(np.float32)
    texts = tokenizer.decode_batch(drawn.tolist(), skip_special_tokens=False)
    return list(zip(drawn.astype(np.int32), logprobs, texts, strict=True))


def write(options: argparse.Namespace, texts: list[Text], run_dir: Path) -> dict[str, float]:
    """Write the rounds. Times leave out the first round, which touches new memory."""
    log = SampleLog(run_dir, session=0, start_step=0)
    rng = np.random.default_rng(1)
    appended, flushed, cpu = [], [], []
    for step in tqdm(range(options.rounds), desc="Writing", unit="round"):
        samples = [make_sample(rng, step, number, text) for number, text in enumerate(texts)]
        cpu_start, start = time.process_time(), time.perf_counter()
        log.append(samples)
        appended.append(time.perf_counter() - start)
        log.flush()
        flushed.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        log.append([make_score(rng, sample.sample_id) for sample in samples], REWARDS)
        log.flush()
    log.finish()  # merges the last files
    files = list((run_dir / "samples").rglob("*.parquet"))
    num_tokens = options.rounds * options.samples * options.tokens
    return {
        "bytes a token": sum(path.stat().st_size for path in files) / num_tokens,
        "files": len(files),
        "CPU seconds of a round": float(np.median(cpu[1:])),
        "seconds of the step": float(np.median(appended[1:])),
        "seconds of the writer's thread": float(np.median(flushed[1:])),
    }


def sizes(options: argparse.Namespace) -> dict[str, float]:
    """Write rounds; return the bytes of a token, and the other bytes of a sample."""
    texts = make_texts(options)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        write(options, texts, Path(folder))
        for table in (SAMPLES, REWARDS):
            token_bytes = all_bytes = 0
            for file in record_files(table.folder(folder)):
                all_bytes += file.path.stat().st_size
                footer = pq.read_metadata(file.path)
                groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
                for group, at in product(groups, range(footer.num_columns)):
                    chunk = group.column(at)
                    if chunk.path_in_schema in TOKEN_COLUMNS:
                        token_bytes += chunk.total_compressed_size
            num_samples = options.rounds * options.samples
            shape = f"{table.name}, {options.samples} a round, {options.tokens} tokens"
            if token_bytes:
                figures[f"{shape}: bytes a token"] = token_bytes / num_samples / options.tokens
            figures[f"{shape}: bytes beside tokens"] = (all_bytes - token_bytes) / num_samples
    return figures


def make_sample(
    rng: np.random.Generator, step: int, number: int, text: Text, group_size: int = GROUP_SIZE
) -> SampleRow:
    group, index = divmod(number, group_size)
    return SampleRow(
        sample_id=SampleId(phase="train", step=step, number=0, group=group, index=index),
        seed=int(rng.integers(2**62)),
        rank=0,
        replica=f"server 0 replica {group % 4}",
        weight_version=step,
        finish_reason="length",
        token_ids=text[0],
        logprobs=text[1],
        text=text[2],
        fingerprint=f"{group:032x}",
        prompt=json.dumps([{"role": "user", "content": f"<image>{QUESTION} ({group})"}]),
        media=[f"images/train/{group:08d}.png"],
        columns=json.dumps({"solution": f"The answer of question {group}"}),
    )


def make_score(rng: np.random.Generator, sample_id: SampleId) -> RewardRow:
    accuracy, form = rng.random(2).tolist()
    return RewardRow(
        sample_id=sample_id,
        reward=accuracy + 0.2 * form,
        rewards=[("Accuracy", accuracy), ("Format", form)],
        advantage=accuracy - 0.5,
        gap_mean=float(rng.exponential(1e-4)),
        gap_max=float(rng.exponential(1e-3)),
        truncated=bool(rng.random() < 0.05),
        replaced=False,
        fate="trained",
    )


def read(options: argparse.Namespace, run_dir: Path) -> dict[str, float]:
    last: dict[str, Any] = {"phase": "train", "step": options.rounds - 1, "number": 0, "group": 1}
    reads: dict[str, Callable[[], Any]] = {
        "look at all files": lambda: open_record(run_dir),
        "names of all samples": lambda: read_samples(run_dir, columns=SAMPLE_ID_COLUMNS),
        "everything": lambda: read_samples(run_dir),
        "one group": lambda: read_group(run_dir, **last),
    }
    return {f"seconds to read: {name}": timed(call) for name, call in reads.items()}


def view(run_dir: Path) -> dict[str, float]:
    """Start the viewer; return the times of its pages and its peak memory."""
    start = time.perf_counter()
    code = "import sys; from swift_grpo_ext.tools.cli import main; sys.exit(main())"
    argv = [sys.executable, "-c", code, "view", str(run_dir), "--port", "0"]
    figures = {}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            match = re.search(r"http://\S+", server.stdout.readline())
            assert match, "the server printed no address"
            run = f"{match[0]}0/"
            while 'class="thumb"' not in get(f"{run}samples"):
                time.sleep(0.02)
            figures["seconds to the first page"] = time.perf_counter() - start
            while "…" in get(f"{run}state"):
                time.sleep(0.1)
            figures["seconds until all is read"] = time.perf_counter() - start
            for name, page in PAGES.items():
                figures[f"seconds to view: {name}"] = timed(partial(get, f"{run}{page}"))
            status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
            peak = re.search(r"VmHWM:\s+(\d+)", status)
            figures["the viewer's GB, at most"] = int(peak[1]) / 1e6 if peak else 0.0
        finally:
            server.terminate()
    return figures


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=120) as answer:
        return str(answer.read().decode())


if __name__ == "__main__":
    main()
