"""Measure the CPU seconds that a round spends on images: for the rollout and the training batch.

    python scripts/bench/media.py --model DIR --output scripts/bench/results/media.json

Ways of one engine and one template, taking turns in one process; vLLM's caches are emptied before
each turn, as `--sleep_level` empties them.

- `ms-swift`: one request a sample, then `encode_sample` of each sample.
- `ours, first epoch`: groups as one request, then the same, with an empty `--media_cache_gb`.
- `ours, later epoch`: the same with the cache of an epoch before, which met these images.
- `ours, no cache`: `--media_cache_gb 0`.

Counted is all that the process spends on a round but the engine's own steps: reading, decoding,
hashing and processing images, tokenizing, and the making of requests and answers. The largest cache
is what it held in bytes after its round.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from copy import copy
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from cases import RUN_SEED, Case, draw_ours, draw_theirs, make_config, make_samples
from colocate_ways import make_engine
from common import Measures, Results, Turn, interleave, make_parser, make_rows, ratios
from swift.rl_core.data import GRPOSample
from swift.rlhf_trainers.utils import encode_sample

from swift_grpo_ext.arguments import ExtFlags
from swift_grpo_ext.rollout.draw import to_rollout_outputs
from swift_grpo_ext.training.shared_media import RoundMedia
from swift_grpo_ext.upstream.cpu import apply_cpu_settings

MARGIN = 0.05
"""Of the target, beside 1 / (2G) in the first epoch and 0 in later ones."""


def main() -> None:
    parser = make_parser(__doc__ or "", repetitions=5)
    parser.add_argument("--media-cache-gb", type=float, default=ExtFlags.media_cache_gb)
    parser.set_defaults(group_sizes=[8], image_sides=[1024], max_tokens=1)
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.num_prompts = 1, 2
        options.group_sizes, options.image_sides = [4], [256]
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
    """Turns of each way; `_step_seconds` are the CPU seconds of the engine's steps in a turn."""

    def __init__(self, engine: Any, options: argparse.Namespace) -> None:
        self._engine, self._max_gb = engine, options.media_cache_gb
        self._config = make_config(options.max_tokens)
        self._template = copy(engine.template)
        self._template.set_mode("train")
        self._step_seconds = 0.0
        step = engine.engine.step

        def timed() -> Any:
            start = time.process_time()
            try:
                return step()
            finally:
                self._step_seconds += time.process_time() - start

        engine.engine.step = timed

    def compare(self, case: Case, repetitions: int) -> list[dict[str, Any]]:
        kept = self._media()
        self._ours(case, kept, 0)
        self._assert_equal_bits(case, kept)
        turns: dict[str, Turn] = {
            "ms-swift": lambda r: self._theirs(case, r),
            "ours, first epoch": lambda r: self._ours(case, self._media(), r),
            "ours, later epoch": lambda r: self._ours(case, kept, r),
            "ours, no cache": lambda r: self._ours(case, self._media(0), r),
        }
        measures = interleave(turns, repetitions, f"{case.name}, G = {case.group_size}")
        return make_rows({"benchmark": "media", **case.columns()}, measures)

    def _media(self, max_gb: float | None = None) -> RoundMedia:
        gigabytes = self._max_gb if max_gb is None else max_gb
        return RoundMedia(gigabytes, self._template, lambda own: [own])

    def _theirs(self, case: Case, repetition: int) -> Measures:
        samples = self._begin(case, repetition)
        start = time.process_time()
        draw_theirs(samples, self._infer)
        rollout = time.process_time() - start - self._step_seconds
        return self._train(samples, rollout)

    def _ours(self, case: Case, media: RoundMedia, repetition: int) -> Measures:
        def ask(requests: list[Any], metadatas: Sequence[Any]) -> list[list[Any]]:
            with media.in_rollout(self._engine):
                outputs = self._infer(requests)
            pairs = zip(outputs, metadatas, strict=True)
            return [to_rollout_outputs(output, metadata, "rank 0") for output, metadata in pairs]

        samples = self._begin(case, repetition)
        start = time.process_time()
        draw_ours(samples, RUN_SEED, ask)
        rollout = time.process_time() - start - self._step_seconds
        with media.in_training(self._template):
            measures = self._train(samples, rollout)
        counts = media.end_round()
        num_bytes = float(media.cache.num_bytes if media.cache else 0)
        return {**measures, "bytes": num_bytes, **counts}

    def _infer(self, requests: list[Any]) -> Any:
        return self._engine.infer(requests, copy(self._config), use_tqdm=False)

    def _begin(self, case: Case, repetition: int) -> list[Any]:
        self._engine.engine.reset_prefix_cache()
        self._engine.engine.reset_mm_cache()
        self._engine.engine.reset_encoder_cache()
        self._step_seconds = 0.0
        return make_samples(case, repetition)

    def _train(self, samples: Sequence[Any], rollout: float) -> Measures:
        rows = [as_trained(sample, number) for number, sample in enumerate(samples)]
        start = time.process_time()
        for row in rows:
            encode_sample(row, self._template)
        training = time.process_time() - start
        return {"cpu_seconds": rollout + training, "rollout": rollout, "training": training}

    def _assert_equal_bits(self, case: Case, media: RoundMedia) -> None:
        for sample in make_samples(case, 0)[:: case.group_size]:
            row = as_trained(sample, 0)
            alone = encode_sample(row, self._template)
            with media.in_training(self._template):
                shared = encode_sample(row, self._template)
            for name, value in alone.items():
                is_tensor = isinstance(value, torch.Tensor)
                assert torch.equal(value, shared[name]) if is_tensor else value == shared[name]


def as_trained(sample: Any, number: int) -> GRPOSample:
    answer = {"role": "assistant", "content": "Nothing."}
    row = {"messages": [*sample.messages, answer], "response_token_ids": [[number + 10] * 64]}
    return GRPOSample.from_row({**row, **({"images": sample.images} if sample.images else {})})


def as_markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| images | prompts x G | way | rollout + training, s | of ms-swift's (range) | at most "
        "| decoded, processed | held, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    theirs: dict[str, Any] = {}
    for row in rows:
        theirs = row if row["way"] == "ms-swift" else theirs
        share = ratios(row, theirs, "cpu_seconds")
        target = {"ours, first epoch": 1 / (2 * row["group_size"]) + MARGIN}
        target["ours, later epoch"] = MARGIN
        made = [f"{median(row.get(f'media/{kind}', [0])):g}" for kind in ("decoded", "processed")]
        lines.append(
            f"| {row['case']} | {row['num_prompts']} x {row['group_size']} | {row['way']} "
            f"| {median(row['rollout']):.3f} + {median(row['training']):.3f} "
            f"| {median(share):.4f} ({min(share):.4f} to {max(share):.4f}) "
            f"| {target.get(row['way'], 1.0):.4f} | {', '.join(made)} "
            f"| {median(row.get('bytes', [0])) / 1e6:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
