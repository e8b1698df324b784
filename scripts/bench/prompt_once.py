"""Measure training passes that read a group's prompt once, and passes that read it G times.

    python scripts/bench/prompt_once.py --output scripts/bench/results/prompt_once.json
    python scripts/bench/prompt_once.py --size 3b 7b --layers 4    on a machine with a GPU

The work is forward and backward of one group (`passes.py`) on a model with random weights: in
float32 on a CPU, in bfloat16 with gradient checkpointing on a GPU. Completions have 64 to 256
tokens, on a GPU always 256, because the plain pass uses its fastest kernel without padding. The
rows of a plain pass are independent, so on a CPU only about `--positions` positions run and the
time is scaled up. The column `expected` is the estimate of `--logps_shared_prompt auto`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from common import DEVICE, Results, as_markdown, make_rows
from tqdm import tqdm

from scripts.bench.measure import side_by_side
from scripts.bench.passes import (
    FLASH,
    group_of,
    make_model,
    once,
    packed,
    plain,
    shared,
    why_not_installed,
)
from swift_grpo_ext.logits.packed import reason_against, saving
from swift_grpo_ext.upstream.determinism import deterministic

FAMILIES = ("qwen2_5_vl", "qwen3_5", "gemma3")
IS_CPU = DEVICE == "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--families", choices=FAMILIES, nargs="+", default=FAMILIES[:1])
    add("--size", nargs="+", default=["passes"] if IS_CPU else ["3b"], help="in families.yaml")
    add("--layers", type=int, default=None if IS_CPU else 4, help="instead of the size's own")
    add("--attentions", nargs="+", default=["sdpa"], choices=("sdpa", "eager", *FLASH))
    add("--group-sizes", type=int, nargs="+", default=[4, 8, 16, 32], metavar="G")
    add("--prompts", type=int, nargs="+", default=[256, 1024, 4096, 8192], metavar="TOKENS")
    add("--completions", type=int, nargs=2, default=[64 if IS_CPU else 256, 256],
        metavar="TOKENS", help="the shortest and the longest")  # fmt: skip
    add("--deterministic", action="store_true", help="also run with --full_determinism true")
    add("--positions", type=int, default=8192, help="limit of a plain pass on a CPU")
    add("--repetitions", type=int, default=3, help="runs of each way, after a warm-up")
    add("--max-seconds", type=float, default=60.0, help="start no repetition after this time")
    add("--output", type=Path, help="write rows and environment there, as JSON")
    options = parser.parse_args()
    dtype = torch.float32 if IS_CPU else torch.bfloat16
    results = Results(options.output)
    points = list(product(options.prompts, options.group_sizes))
    for family, size, attention in product(options.families, options.size, options.attentions):
        if reason := why_not_installed(attention):
            print(f"{attention} does not run: {reason}", file=sys.stderr)
            continue
        model = make_model(family, size, options.layers, DEVICE, dtype, attention)
        label = f"{family} {size}, {attention}"
        for prompt, group_size in tqdm(points, desc=label, unit="point", dynamic_ncols=True):
            point = {"family": family, "size": size, "attention": attention, "prompt": prompt}
            results.add(run_point(model, {**point, "G": group_size}, options))
    names = ("family", "size", "attention", "prompt", "G", "rows run", "expected", "skipped", "way")
    print(as_markdown(results.rows, names, ("seconds", "peak_bytes")))


def run_point(
    model: Any, point: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each way, or one row with the reason why the point is skipped."""
    text = model.config.get_text_config()
    prompt, group_size = point["prompt"], point["G"]
    shortest, longest = options.completions
    completions = np.linspace(shortest, longest, group_size, dtype=int).tolist()
    num_rows = group_size
    if IS_CPU:
        num_rows = min(max(options.positions // (prompt + max(completions)), 1), group_size)
    prompt_T = torch.randint(200, text.vocab_size, (prompt,))
    group, part = (group_of(model, prompt_T, completions[:n]) for n in (group_size, num_rows))
    expected = round(1 - saving(shared(group).groups), 3)
    point |= {"rows run": f"{num_rows} of {group_size}", "expected": expected, "skipped": ""}
    reason = reason_against(model, group.inputs)
    if IS_CPU and not reason:
        # Measured maximum (gated delta nets): 72 numbers of the width for each position and layer.
        largest = max(part.predicts_BT.numel(), packed(model, group)[1].numel())
        needed = largest * text.num_hidden_layers * 80 * text.hidden_size * 4
        if needed > (free := psutil.virtual_memory().available):
            reason = f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} free"
    if reason:
        return [{**point, "skipped": reason, "way": ""}]

    passes: dict[str, Callable[[], torch.Tensor]] = {"plain": partial(plain, model, part)}
    passes["prompt once"] = partial(once, model, group)

    def work(compute: Callable[[], torch.Tensor], is_deterministic: bool) -> None:
        with deterministic(is_deterministic):
            model.zero_grad()
            compute().sum().backward()

    works = {way: partial(work, compute, False) for way, compute in passes.items()}
    if options.deterministic:
        works |= {f"{way}, deterministic": partial(work, p, True) for way, p in passes.items()}
    label, limit = f"prompt {prompt}, G = {group_size}", options.max_seconds
    measured = side_by_side(works, options.repetitions, label, limit)
    for way, turns in measured.items():
        if num_rows < group_size and not way.startswith("prompt once"):
            for turn in turns:
                turn["seconds"] *= group_size / num_rows
                del turn["peak_bytes"]  # only a part of the rows ran
    return make_rows(point, measured)


if __name__ == "__main__":
    main()
