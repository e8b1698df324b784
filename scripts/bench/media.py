"""Measure what a round spends on images, for the rollout and the training batch.

    python scripts/bench/media.py --model DIR --output scripts/bench/results/media.json

Ways of one engine and one template, taking turns in one process; vLLM's caches are emptied before
each turn, as `--sleep_level` empties them.

- `ms-swift`: one request a sample, then `encode_sample` of each sample.
- `ours, first epoch`: groups as one request, then the same, with an empty `--media_cache_gb`.
- `ours, later epoch`: the same with the cache of an epoch before, which met these images.
- `ours, no cache`: `--media_cache_gb 0`.

Counted is all that the process spends on a round but the engine's own steps: reading, decoding,
hashing and processing images, tokenizing, and the making of requests and answers. The largest cache
is what it held in bytes after its round. The wait is the same in wall time.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from statistics import median
from types import SimpleNamespace
from typing import Any

from cases import (
    RUN_SEED,
    Case,
    draw_ours,
    draw_theirs,
    make_config,
    make_engine,
    make_samples,
)
from common import Measures, Results, Turn, interleave, make_parser, make_rows, ratios, stopwatch
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.utils import encode_sample

from swift_grpo_ext.flags import ExtFlags
from swift_grpo_ext.media.encode import MediaCache
from swift_grpo_ext.rollout.generate import to_rollout_outputs
from swift_grpo_ext.upstream.cpu import apply_cpu_settings

NUM_ANSWER_TOKENS = 64


def main() -> None:
    parser = make_parser(__doc__ or "", repetitions=5)
    parser.add_argument("--media-cache-gb", type=float, default=ExtFlags.media_cache_gb)
    parser.set_defaults(group_sizes=[8], image_sides=[1024], max_tokens=1)
    options = parser.parse_args()
    apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as in ms-swift's training
    most = options.num_prompts * max(options.group_sizes)
    rounds = Rounds(make_engine(options.model, max_num_seqs=most), options)
    results = Results(options.output)
    for side in options.image_sides:
        for size in options.group_sizes:
            case = Case(image_side=side, num_prompts=options.num_prompts, group_size=size)
            results.add(rounds.compare(case, options.repetitions))
    print(as_markdown(results.rows))


class Rounds:
    """Runs the turns of each way; `_steps` is what the engine's steps took in a turn."""

    def __init__(self, engine: Any, options: argparse.Namespace) -> None:
        self._engine, self._options = engine, options
        self._config = make_config(options.max_tokens)
        self._template = copy(engine.template)
        self._template.set_mode("train")
        self._steps: Counter[str] = Counter()
        step = engine.engine.step

        def timed() -> Any:
            measures: Measures = {}
            with stopwatch(measures):
                outputs = step()
            self._steps.update(measures)
            return outputs

        engine.engine.step = timed

    def compare(self, case: Case, repetitions: int) -> list[dict[str, Any]]:
        kept = self._media()
        self._ours(make_samples(case, 0), kept)
        turns: dict[str, Turn] = {
            "ms-swift": lambda r: self._theirs(make_samples(case, r)),
            "ours, first epoch": lambda r: self._ours(make_samples(case, r), self._media()),
            "ours, later epoch": lambda r: self._ours(make_samples(case, r), kept),
            "ours, no cache": lambda r: self._ours(make_samples(case, r), self._media(0)),
        }
        measures = interleave(turns, repetitions, f"{case.name}, G = {case.group_size}")
        return make_rows({"benchmark": "media", **case.columns()}, measures)

    def _media(self, max_gb: float | None = None) -> MediaCache:
        gigabytes = self._options.media_cache_gb if max_gb is None else max_gb
        return MediaCache(gigabytes, self._template, lambda own: [own])

    def _theirs(self, samples: list[Any]) -> Measures:
        return self._round(samples, lambda: draw_theirs(samples, self._infer), nullcontext())

    def _ours(self, samples: list[Any], media: MediaCache) -> Measures:
        def ask(requests: list[Any], metadatas: Sequence[Any]) -> list[list[Any]]:
            with media.in_rollout(self._engine):
                outputs = self._infer(requests)
            pairs = zip(outputs, metadatas, strict=True)
            return [to_rollout_outputs(output, metadata, "rank 0") for output, metadata in pairs]

        in_training = media.in_training(self._template)
        measures = self._round(samples, lambda: draw_ours(samples, RUN_SEED, ask), in_training)
        counts = media.end_round()
        return {**measures, "bytes": float(media.num_bytes), **counts}

    def _infer(self, requests: list[Any]) -> Any:
        return self._engine.infer(requests, copy(self._config), use_tqdm=False)

    def _round(self, samples: Sequence[Any], draw: Callable[[], Any], in_training: Any) -> Measures:
        """Measure the rollout without the engine's steps, and the training batch."""
        self._engine.engine.reset_prefix_cache()
        self._engine.engine.reset_mm_cache()
        self._engine.engine.reset_encoder_cache()
        self._steps.clear()
        rollout: Measures = {}
        training: Measures = {}
        with stopwatch(rollout):
            draw()
        rows = [as_trained(sample, number) for number, sample in enumerate(samples)]
        with stopwatch(training), in_training:
            for row in rows:
                encode_sample(row, self._template)
        of_rollout = rollout["cpu_seconds"] - self._steps["cpu_seconds"]
        return {
            "cpu_seconds": of_rollout + training["cpu_seconds"],
            "rollout": of_rollout,
            "training": training["cpu_seconds"],
            "wait": rollout["seconds"] - self._steps["seconds"] + training["seconds"],
        }


def as_trained(sample: Any, number: int) -> GRPOSample:
    answer = {"role": "assistant", "content": "Nothing."}
    row = {
        "messages": [*sample.messages, answer],
        "response_token_ids": [[number + 10] * NUM_ANSWER_TOKENS],
    }
    return GRPOSample.from_row({**row, **({"images": sample.images} if sample.images else {})})


def as_markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| images | prompts x G | way | rollout + training, s | of ms-swift's (range) "
        "| decoded, processed | held, MB | wait, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    theirs: dict[str, Any] = {}
    for row in rows:
        theirs = row if row["way"] == "ms-swift" else theirs
        share = ratios(row, theirs, "cpu_seconds")
        made = [f"{median(row.get(f'media/{kind}', [0])):g}" for kind in ("decoded", "processed")]
        lines.append(
            f"| {row['case']} | {row['num_prompts']} x {row['group_size']} | {row['way']} "
            f"| {median(row['rollout']):.3f} + {median(row['training']):.3f} "
            f"| {median(share):.4f} ({min(share):.4f} to {max(share):.4f}) "
            f"| {', '.join(made)} "
            f"| {median(row.get('bytes', [0])) / 1e6:.0f} | {median(row['wait']):.2f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
