"""Time rollouts inside the training process: ours, ms-swift's and bare vLLM's, in one engine.

    python scripts/bench/rollout_colocate.py --model DIR --output colocate.json

All ways use one `RolloutEngine`: a request without our envelope is served just as ms-swift does.

- `ours`: fingerprints of the samples, groups, requests, the engine, and one output a sample (what
  the trainer's `_rollout` does); `ours unseeded` is the same with `--rollout_seed_mode engine`.
- `ms-swift`: one request a sample, and the engine.
- `bare vLLM`: images decoded from their bytes, `add_request` with `n` = G and the prompt's token
  ids, `step` until all are done (what `LLM.generate` does); none of ms-swift's encoding, no seeds.

Before each turn, untimed: the samples are made, and vLLM's caches of prefixes, of processed images
and of encoded images are emptied. Loading the model and syncing weights are not timed.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace
from typing import Any

from cases import Case
from colocate_ways import ColocateWays, make_engine
from common import Results, Turn, interleave, make_parser, make_rows
from tables import as_markdown

from swift_grpo_ext.upstream.cpu import apply_cpu_settings

PARTS = ("ways", "scaling", "seeds")
GROUP_SIZE = 8
"""Of scaling and seeds."""


def main() -> None:
    options = parse_options()
    apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # as in ms-swift's training
    cases = [
        Case(image_side=side, num_prompts=options.num_prompts, group_size=size)
        for side in options.image_sides
        for size in options.group_sizes
    ]
    most = max(*options.scaling_samples, *(case.num_samples for case in cases))
    ways = ColocateWays(make_engine(options.model, max_num_seqs=most), options.max_tokens)
    results = Results(options.output)
    for case in cases if "ways" in options.parts else ():
        results.add(compare(ways, case, options.repetitions))
    for side in options.scaling_sides if "scaling" in options.parts else ():
        results.add(scale(ways, side, options.scaling_samples, options.repetitions))
    if "seeds" in options.parts:
        results.add(compare_seeds(ways, options.num_prompts, options.seed_pairs))
    print(as_markdown(results.rows))


def parse_options() -> argparse.Namespace:
    parser = make_parser(__doc__ or "", repetitions=5)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    add("--scaling-samples", type=int, nargs="+", default=[64, 128, 256, 512, 1024], metavar="N",
        help="sizes of batches, multiples of 8")  # fmt: skip
    add("--scaling-sides", type=int, nargs="+", default=[0, 256], metavar="PIXELS",
        help="images of the batches that grow; 0: text alone")  # fmt: skip
    add("--seed-pairs", type=int, default=30, help="repetitions of seeded against unseeded")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.seed_pairs = 1, 2
        options.num_prompts, options.group_sizes, options.image_sides = 2, [4], [0, 256]
        options.scaling_samples, options.scaling_sides = [8, 16], [0]
    return options


def compare(ways: ColocateWays, case: Case, repetitions: int) -> list[dict[str, Any]]:
    turns: dict[str, Turn] = {
        "ms-swift": ways.theirs(case),
        "bare vLLM": ways.bare(case),
        "ours": ways.ours(case),
        "ours unseeded": ways.ours(case, run_seed=None),
    }
    measures = interleave(turns, repetitions, f"{case.name}, G = {case.group_size}")
    return make_rows({"benchmark": "colocate", **case.columns()}, measures)


def scale(
    ways: ColocateWays, side: int, sizes: list[int], repetitions: int
) -> list[dict[str, Any]]:
    """Our cost against the number of samples: sizes take turns as ways do."""
    cases = {
        f"{size}": Case(image_side=side, num_prompts=size // GROUP_SIZE, group_size=GROUP_SIZE)
        for size in sizes
    }
    turns = {name: ways.ours(case) for name, case in cases.items()}
    measures = interleave(turns, repetitions, f"Scaling, {'images' if side else 'text'}")
    rows = []
    for name, case in cases.items():
        fixed = {"benchmark": "scaling", **case.columns()}
        rows += make_rows(fixed, {"ours": measures[name]})
    return rows


def compare_seeds(ways: ColocateWays, num_prompts: int, pairs: int) -> list[dict[str, Any]]:
    """Seeded against unseeded in neighbouring turns, on text: there, sampling weighs most."""
    case = Case(image_side=0, num_prompts=num_prompts, group_size=GROUP_SIZE)
    turns = {"ours": ways.ours(case), "ours unseeded": ways.ours(case, run_seed=None)}
    measures = interleave(turns, pairs, "Seeded and unseeded")
    return make_rows({"benchmark": "seeds", **case.columns()}, measures)


if __name__ == "__main__":
    main()
