"""Cost of the sample log in one large round: seconds of the step, and bytes a token.

    python scripts/bench/sample_log_round.py --output scripts/bench/results/sample_log_round.json

Two ways in turns, with the same rows. *Before*: written in the step, log-probabilities in 32 bits,
zstd level 1, lists handed to pyarrow. *Now*: handed to a thread. What the step then pays is the
hand-over, the seconds in which the thread holds Python's lock (its CPU time in `to_batch` without
`_split_halves`, where numpy gives the lock back: an upper bound), and the wait at the round's end,
if the step is shorter than the writing.

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
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
from common import DEFAULT_MODEL, ROOT, Measures, command, environment, interleave
from tokenizers import Tokenizer

from swift_grpo_ext.record import log as sample_log
from swift_grpo_ext.record import row
from swift_grpo_ext.record.log import SampleLog
from swift_grpo_ext.record.row import SCHEMA, SampleRow, to_batch
from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.sampling.seeding import SampleId
from swift_grpo_ext.training.rollouts import SampleRecorder

GROUP_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=10_240)
    parser.add_argument("--tokens", type=int, default=1000, help="of a completion")
    parser.add_argument("--step", type=float, default=15.0, help="seconds from rollout to flush")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="its tokenizer is used")
    parser.add_argument("--output", type=Path, help="FILE.json")
    options = parser.parse_args()
    rows = make_rows(options)
    ways = {"before": partial(before, rows), "now": partial(now, rows, options.step)}
    measures = interleave(ways, options.repetitions, "Sample log")
    medians = {
        way: {name: float(np.median([m[name] for m in found])) for name in found[0]}
        for way, found in measures.items()
    }
    for way, values in medians.items():
        print(f"{way}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()))
    ratio = medians["now"]["step_seconds"] / medians["before"]["step_seconds"]
    print(f"step seconds, now / before: {ratio:.3f}")
    if options.output:
        result = {"command": command(), "environment": environment(), "medians": medians}
        text = json.dumps({**result, "ratio": ratio, "measures": measures}, indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")


def make_rows(options: argparse.Namespace) -> list[SampleRow]:
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/*/*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    corpus = np.concatenate([e.ids for e in tokenizer.encode_batch(texts)]).astype(np.int64)
    rng = np.random.default_rng(0)
    token_ids = markov(rng, corpus, (options.samples, options.tokens)).tolist()
    logprobs = (-rng.exponential(0.5, (options.samples, options.tokens))).tolist()
    completions = tokenizer.decode_batch(token_ids, skip_special_tokens=False)
    return [
        SampleRow(
            sample_id=SampleId(phase="train", step=0, number=0, group=group, index=index),
            seed=int(rng.integers(2**62)),
            rank=0,
            replica=f"server 0 replica {group % 4}",
            weight_version=0,
            finish_reason="length",
            token_ids=token_ids[number],
            logprobs=logprobs[number],
            text=completions[number],
            fingerprint=f"{group:032x}",
            prompt=f"Image {group}: which digit is in the middle of the picture? " * 4,
            media=[f"images/train/{group:08d}.png"],
        )
        for number, (group, index) in enumerate(
            divmod(n, GROUP_SIZE) for n in range(options.samples)
        )
    ]


def markov(
    rng: np.random.Generator, corpus: np.ndarray[Any, Any], shape: tuple[int, int]
) -> np.ndarray[Any, Any]:
    """Tokens that follow one another as in the corpus, [samples, tokens]."""
    order = np.argsort(corpus[:-1], kind="stable")
    starts = np.searchsorted(corpus[:-1][order], np.arange(corpus.max() + 2))
    drawn = np.empty(shape, np.int64)
    token = rng.choice(corpus[:-1], shape[0])
    for position in range(shape[1]):
        drawn[:, position] = token
        count = starts[token + 1] - starts[token]
        chosen = order[
            np.minimum(starts[token] + (rng.random(shape[0]) * count), len(order) - 1).astype(int)
        ]
        token = corpus[chosen + 1]
        token = np.where(starts[token + 1] > starts[token], token, corpus[0])
    return drawn


def before(rows: list[SampleRow], repetition: int) -> Measures:
    def to_batch_before(rows: list[SampleRow], schema: pa.Schema) -> pa.RecordBatch:
        ids = ("phase", "step", "number", "group", "index", "turn")
        columns = [
            [getattr(r.sample_id if f.name in ids else r, f.name) for r in rows] for f in schema
        ]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)]
        return pa.record_batch(arrays, schema=schema)

    table = sample_log.Table(name="samples", version=2, schema=SCHEMA, stored=SCHEMA)
    own = {"to_batch": to_batch_before, "ZSTD_LEVEL": 1}
    saved = {name: getattr(sample_log, name) for name in own}
    vars(sample_log).update(own)
    try:
        with tempfile.TemporaryDirectory() as run_dir:
            log = SampleLog(run_dir, session=0, start_step=0, rank=0, table=table)
            start, cpu = time.perf_counter(), time.process_time()
            log.append(rows)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            size = log.path.stat().st_size
    finally:
        vars(sample_log).update(saved)
    return measures_of(rows, size, step=seconds, cpu=cpu)


def now(rows: list[SampleRow], step_seconds: float, repetition: int) -> Measures:
    locked = SimpleNamespace(seconds=0.0)

    def timed(call: Callable[..., Any], sign: int) -> Callable[..., Any]:
        def timed_call(*args: Any) -> Any:
            start = time.thread_time()
            result = call(*args)
            locked.seconds += sign * (time.thread_time() - start)
            return result

        return timed_call

    split_halves = vars(row)["_split_halves"]
    vars(sample_log)["to_batch"] = timed(to_batch, 1)
    vars(row)["_split_halves"] = timed(split_halves, -1)
    try:
        with tempfile.TemporaryDirectory() as run_dir:
            recorder = SampleRecorder(run_dir, SingleRank(), None)
            recorder.open(start_step=0)
            cpu, start = time.process_time(), time.perf_counter()
            recorder.write(rows)
            handed = time.perf_counter() - start
            time.sleep(step_seconds)
            start = time.perf_counter()
            recorder.flush()
            waited = time.perf_counter() - start
            cpu = time.process_time() - cpu
            assert recorder.log is not None
            size = recorder.log.path.stat().st_size
    finally:
        vars(sample_log)["to_batch"] = to_batch
        vars(row)["_split_halves"] = split_halves
    step = handed + locked.seconds + waited
    return measures_of(rows, size, step=step, cpu=cpu, locked=locked.seconds, waited=waited)


def measures_of(rows: list[SampleRow], size: int, **seconds: float) -> Measures:
    named = {f"{name}_seconds": value for name, value in seconds.items()}
    return {**named, "mib": size / 2**20, "bytes_a_token": size / sum(r.num_tokens for r in rows)}


if __name__ == "__main__":
    main()
