"""Time training passes that read a group's prompt once, against passes that read it G times.

    python scripts/bench/prompt_once.py --output scripts/bench/results/prompt_once.json

Forward and backward of one group through `SharedPrompt` and `LogitsShim`, as a training makes them,
on models with random weights and 1,024 words, with `sdpa` in float32. Completions have 64 to 256
tokens. The rows of a plain pass do not depend on one another: of those beyond `--positions`, some
are run, and their time is multiplied. The ratio that is expected is that of `--logps_shared_prompt
auto`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from common import Results, rotated
from models import SIZES, make_config, widened
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from swift_grpo_ext.logits.logps import free_bytes
from swift_grpo_ext.logits.shared_prompt import (
    GroupLengths,
    SharedPrompt,
    groups_of,
    samples_of,
    saving,
)
from swift_grpo_ext.logits.shim import LogitsShim

VOCABULARY = 1024
NUM_SPECIAL = 32
"""Ids below this one are special tokens', of which a prompt has none."""

LAYERS = {"qwen2_5_vl": 4, "qwen3_5": 4, "gemma3": 6}
HEAD = 128
PLAIN, ONCE = "plain", "prompt once"
LIMIT = 1e-3
"""The mean difference in nats that rounding explains, for the proof of a first batch."""


class Point(NamedTuple):
    """A point of the curve is one group."""

    prompt: int
    """Tokens."""

    completions: tuple[int, ...]
    """Tokens of each sample."""

    @property
    def length(self) -> int:
        """Return the positions of a row of the batch."""
        return self.prompt + max(self.completions)

    @property
    def num_once(self) -> int:
        """Return the positions of a pass that reads the prompt once."""
        return self.prompt - 1 + sum(self.completions)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--families", choices=SIZES, nargs="+", default=list(SIZES))
    add("--width", type=int, default=512)
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
        passes = Passes(make_model(family, options.width))
        for prompt, group_size in tqdm(sizes, desc=family, unit="point", dynamic_ncols=True):
            point = Point(prompt, tuple(np.linspace(64, 256, group_size, dtype=int).tolist()))
            row: dict[str, Any] = {"family": family, "prompt": prompt, "group_size": group_size}
            row["completion"] = round(mean(point.completions))
            results.add([row | run_point(passes, point, options)])
    print(as_markdown(results.rows))


def make_model(family: str, width: int) -> PreTrainedModel:
    """Return a model of the family with few words, special tokens numbered as they come."""
    made = widened(family, LAYERS[family], width, HEAD)
    text = {**made.config["text_config"], "vocab_size": VOCABULARY}
    made = replace(made, config={**made.config, "text_config": text})
    ids: dict[str, int] = {}
    tokenizer = SimpleNamespace(encode=lambda token: [ids.setdefault(token, len(ids))])
    torch.manual_seed(0)
    config = make_config(made, tokenizer)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.train()


class Passes:
    """The passes of one model. The first batch that is read once has to agree with the plain one,
    as in a training."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._shim = LogitsShim(model, strict=True)
        self._shared_prompt = SharedPrompt(model, LIMIT)
        # Longer than a window: what is shorter says nothing of it.
        self.run(Point(640, (16, 16)), ONCE, 2)

    def run(self, point: Point, way: str, num_rows: int) -> bool:
        """Make a forward and a backward of the first rows of a point; return whether they could be
        made this way."""
        inputs, predicts_BT = self.batch(Point(point.prompt, point.completions[:num_rows]))
        targets_N = inputs["input_ids"].roll(-1, 1)[predicts_BT]

        def logps(inputs: Mapping[str, Any], predicts_BT: Tensor) -> Tensor:
            return self._shim.logps(
                self.model, inputs, predicts_BT, targets_N, chunk_size=0
            ).logps_N

        packed = None
        if way == ONCE:
            ranks = self._shim.ranks(self.model)
            packed = self._shared_prompt.pack(inputs, predicts_BT, logps, ranks)
            if packed is None:
                return False
        logps(*(packed or (inputs, predicts_BT))).sum().backward()
        return True

    def batch(self, point: Point) -> tuple[dict[str, Tensor], Tensor]:
        """Return what ms-swift gives to a model's forward, and the positions that predict."""
        completions = torch.tensor(point.completions)[:, None]
        columns = torch.arange(point.length)[None]
        ids = torch.randint(NUM_SPECIAL, VOCABULARY, (len(completions), point.length))
        ids[:, : point.prompt] = ids[0, : point.prompt].clone()
        is_real = columns < point.prompt + completions
        inputs = {"input_ids": ids, "attention_mask": is_real.long()}
        config: PretrainedConfig = self.model.config
        if "mrope_section" in config.get_text_config().rope_parameters:
            inputs["position_ids"] = columns.expand(3, *ids.shape)
        if config.model_type == "gemma3":
            inputs["token_type_ids"] = torch.zeros_like(ids)
        predicts_BT = (columns >= point.prompt - 1) & (columns < point.prompt + completions - 1)
        return inputs, predicts_BT


def run_point(passes: Passes, point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of both ways, in turns, and the ratios; or why there are none."""
    text = passes.model.config.get_text_config()
    group_size = len(point.completions)
    num_rows = min(max(options.positions // point.length, 1), group_size)
    # Up to 72 numbers of the width for each position and layer, as measured (gated delta nets).
    largest = max(num_rows * point.length, point.num_once)
    needed = largest * text.num_hidden_layers * 80 * text.hidden_size * 4
    if needed > (free := free_bytes(torch.device("cpu"))):
        return {"skipped": f"{needed / 2**30:.0f} GiB needed, {free / 2**30:.0f} free"}
    inputs, predicts_BT = passes.batch(point)
    samples = samples_of(inputs["input_ids"], inputs["attention_mask"].bool(), predicts_BT)
    groups = groups_of(samples, lambda a, b: True)
    expected = 1 - saving([*map(GroupLengths.of, groups)], text)
    rows_of = {ONCE: group_size, PLAIN: num_rows}
    seconds: dict[str, list[float]] = {way: [] for way in rows_of}
    start = time.perf_counter()
    for repetition in range(options.repetitions + 1):
        for way in rotated(list(rows_of), repetition):
            passes.model.zero_grad()
            gc.collect()
            begin = time.perf_counter()
            is_made = passes.run(point, way, rows_of[way])
            taken = time.perf_counter() - begin
            if not is_made:
                return {"skipped": "not read once (the log says why)", "expected": expected}
            seconds[way].append(taken * group_size / rows_of[way])
        if time.perf_counter() - start > options.max_seconds:
            break
    if len(seconds[ONCE]) > 1:
        seconds = {way: values[1:] for way, values in seconds.items()}
    return {"num_rows": num_rows, "seconds": seconds, "expected": expected}


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians of seconds, and ratios of turns that ran beside each other."""
    names = ("family", "prompt", "G", "completion", PLAIN, ONCE, "ratio", "expected", "rows run")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        cells = [str(row[n]) for n in ("family", "prompt", "group_size", "completion")]
        if "skipped" in row:
            cells.append(f"skipped: {row['skipped']}")
        else:
            cells += [f"{median(row['seconds'][way]):.2f}" for way in (PLAIN, ONCE)]
            pairs = zip(row["seconds"][ONCE], row["seconds"][PLAIN], strict=True)
            cells.append(f"{median(a / b for a, b in pairs):.3f}")
            cells += [f"{row['expected']:.3f}", f"{row['num_rows']} of {row['group_size']}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
