"""Time training passes that read a group's prompt once, against passes that read it G times.

    python scripts/bench/prompt_once.py --output scripts/bench/results/prompt_once.json

Forward and backward of one group, with the passes that `scripts/gpu.sh` measures on a GPU, on
models with random weights and 1,024 words, with `sdpa` in float32. Completions have 64 to 256
tokens. The rows of a plain pass do not depend on one another: of those beyond `--positions`, some
are run, and their time is multiplied. The ratio that is expected is that of `--logps_shared_prompt
auto`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Results, as_markdown, make_rows
from tiny_vlm.families import draw, make_config, numbering, sized
from tqdm import tqdm
from transformers import AutoModelForImageTextToText

from scripts.bench.measure import Measures, Turn, interleave, stopwatch
from scripts.gpu.models import Batch, group_of
from scripts.gpu.prompt_once import once, packed, plain
from swift_grpo_ext.logits.logps import free_bytes
from swift_grpo_ext.logits.shared_prompt import (
    GroupLengths,
    groups_of,
    reason_against,
    samples_of,
    saving,
)

FAMILIES = ("qwen2_5_vl", "qwen3_5", "gemma3")
PLAIN, ONCE = "plain", "prompt once"
LIMIT = 1e-3
"""The mean difference in nats that rounding explains."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--families", choices=FAMILIES, nargs="+", default=FAMILIES)
    add("--group-sizes", type=int, nargs="+", default=[4, 8, 16, 32], metavar="G")
    add("--prompts", type=int, nargs="+", default=[256, 1024, 4096, 8192], metavar="TOKENS")
    add("--positions", type=int, default=8192, help="of a plain pass, unless one row has more")
    add("--repetitions", type=int, default=3, help="of both ways, after one that warms up")
    add("--max-seconds", type=float, default=60.0, help="begin no further repetition after these")
    add("--output", type=Path, help="write rows and environment there, as JSON")
    options = parser.parse_args()
    results = Results(options.output)
    sizes = list(product(options.prompts, options.group_sizes))
    for family in options.families:
        model = make_model(family)
        for prompt, group_size in tqdm(sizes, desc=family, unit="point", dynamic_ncols=True):
            completions = np.linspace(64, 256, group_size, dtype=int).tolist()
            point = {"family": family, "prompt": prompt, "G": group_size}
            results.add(run_point(model, point, completions, options))
    names = ("family", "prompt", "G", "rows run", "expected", "skipped", "way")
    print(as_markdown(results.rows, names, ("seconds",)))


def make_model(family: str) -> Any:
    """Return a model of the family, whose passes agree in a prompt that is longer than a window."""
    torch.manual_seed(0)
    config = make_config(sized(family, "passes"), numbering())
    config._attn_implementation = "sdpa"
    model = draw(AutoModelForImageTextToText, config, "cpu", torch.float32).train()
    batch = make_batch(model, 640, [16, 16])
    with torch.no_grad():
        nats = float((once(model, batch) - plain(model, batch)).abs().mean())
    assert nats < LIMIT, f"{family}: {nats} nats between the passes"
    return model


def make_batch(model: Any, prompt: int, completions: Sequence[int]) -> Batch:
    vocabulary = model.config.get_text_config().vocab_size
    return group_of(model, torch.randint(200, vocabulary, (prompt,)), completions)


def run_point(
    model: Any, point: dict[str, Any], completions: list[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each way, or one that says why there are none."""
    text = model.config.get_text_config()
    prompt, group_size = point["prompt"], len(completions)
    num_rows = min(max(options.positions // (prompt + max(completions)), 1), group_size)
    group = make_batch(model, prompt, completions)
    batches = {PLAIN: make_batch(model, prompt, completions[:num_rows]), ONCE: group}
    attended = group.inputs["attention_mask"].bool()
    samples = samples_of(group.inputs["input_ids"], attended, group.predicts_BT)
    lengths = [*map(GroupLengths.of, groups_of(samples, lambda a, b: True))]
    expected = round(1 - saving(lengths, text), 3)
    point |= {"rows run": f"{num_rows} of {group_size}", "expected": expected, "skipped": ""}
    # Up to 72 numbers of the width for each position and layer, as measured (gated delta nets).
    largest = max(batches[PLAIN].predicts_BT.numel(), packed(model, group).predicts_1L.numel())
    needed = largest * text.num_hidden_layers * 80 * text.hidden_size * 4
    reason = reason_against(model, group.inputs)
    if needed > (free := free_bytes(torch.device("cpu"))):
        reason = f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} free"
    if reason:
        return [{**point, "skipped": reason, "way": ""}]

    def turn(way: str, _: int) -> Measures:
        measures: Measures = {}
        model.zero_grad()
        with stopwatch(measures):
            (plain if way == PLAIN else once)(model, batches[way]).sum().backward()
        share = group_size / num_rows if way == PLAIN else 1.0
        return {"seconds": measures["seconds"] * share}

    ways: dict[str, Turn] = {way: partial(turn, way) for way in batches}
    label = f"prompt {prompt}, G = {group_size}"
    limit = options.max_seconds
    return make_rows(point, interleave(ways, options.repetitions, label, max_seconds=limit))


if __name__ == "__main__":
    main()
