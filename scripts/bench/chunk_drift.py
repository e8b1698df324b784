"""Whether 50 bf16 optimizer steps drift when log-probabilities come in chunks.

    python scripts/bench/chunk_drift.py --output scripts/bench/results/chunk_drift.json

A Qwen2 with random weights trains on CPU with a policy gradient: the same tokens and advantages for
every way. Each bf16 way is held against a float32 run that begins with the same weights. Drift is
the distance of the weights from that run's, as a share of how far that run has moved. `partial sums
in bf16` is what autograd does by itself: the gradients of the head's calls are added in the type of
its weight. Writes JSON, and prints a table of medians and ranges over seeds.
"""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

from swift_grpo_ext.logits import LogitsShim

STEPS = 50
ROWS, PROMPT, NEW = 4, 16, 128
"""Of a batch: rows, and tokens of each prompt and completion."""

CHUNK = 32
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Way:
    """How a run computes."""

    name: str

    weights: torch.dtype = torch.bfloat16

    is_mixed: bool = False
    """Whether it computes in bf16 under autocast (`--bf16 true`), on float32 weights."""

    chunk_size: int = 0

    sums_in_type: bool = False
    """Whether the gradients of the chunks are added as autograd adds them."""


WHOLE, CHUNKED, ROUNDED = "unchunked", "chunks of 32, ours", "chunks of 32, partial sums in bf16"
REFERENCE = Way("float32", weights=torch.float32)
WAYS = [
    way
    for kind, settings in {
        "bf16 weights": {},
        "bf16 autocast": {"weights": torch.float32, "is_mixed": True},
    }.items()
    for way in (
        Way(f"{kind}: {WHOLE}", **settings),
        Way(f"{kind}: {CHUNKED}", **settings, chunk_size=CHUNK),
        Way(f"{kind}: {ROUNDED}", **settings, chunk_size=CHUNK, sums_in_type=True),
    )
]


@dataclass(frozen=True)
class Trained:
    """A run: its loss at each step, the weights at its end, and how far they have moved."""

    losses: list[float]
    weights: dict[str, Tensor]
    moved: dict[str, Tensor]


def train(way: Way, seed: int, *, vocabulary: int, hidden: int, steps: int = STEPS) -> Trained:
    """One run on CPU. Batches, advantages and first weights follow from the seed alone."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.05,
    )  # fmt: skip
    # Rounded, so that all ways begin with one policy.
    model: Any = Qwen2ForCausalLM(config).bfloat16().to(way.weights).train()
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    shim = LogitsShim(model)
    generator = torch.Generator().manual_seed(seed)
    losses = [_step(model, shim, optimizer, way, generator, vocabulary) for _ in range(steps)]
    after = {name: p.detach().float() for name, p in model.named_parameters()}
    return Trained(losses, after, {name: after[name] - before[name] for name in after})


def _step(
    model: Any, shim: LogitsShim, optimizer: Any, way: Way, generator: Any, vocabulary: int
) -> float:
    draw = partial(torch.randint, vocabulary, generator=generator)
    ids_BT = draw(size=(ROWS, PROMPT + NEW))
    ids_BT[:, PROMPT:] %= 97  # tokens that come again, which a policy can learn to prefer
    mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    mask_BT[:, PROMPT - 1 : -1] = True
    advantages_B = torch.randn(ROWS, generator=generator)
    with _precision(way), _sums(way):
        logps_N = shim.logps(
            model, {"input_ids": ids_BT}, mask_BT, ids_BT[:, PROMPT:].flatten(),
            chunk_size=way.chunk_size,
        ).logps_N  # fmt: skip
        weights_N = advantages_B.repeat_interleave(NEW) / (ROWS * NEW)
        loss = -(weights_N * logps_N).sum()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def _precision(way: Way) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if way.is_mixed else nullcontext()


def _sums(way: Way) -> AbstractContextManager[Any]:
    def as_autograd(head: Any, _: int) -> Any:
        return head

    target = "swift_grpo_ext.logits.shim.summed_in_float32"
    return patch(target, as_autograd) if way.sums_in_type else nullcontext()


def drift(found: Trained, exact: Trained) -> dict[str, float]:
    """Of all weights, of the head alone, and the mean difference of losses."""

    def distance(names: list[str]) -> float:
        apart = sum(float((found.weights[n] - exact.weights[n]).square().sum()) for n in names)
        moved = sum(float(exact.moved[n].square().sum()) for n in names)
        return (apart / moved) ** 0.5

    pairs = zip(found.losses, exact.losses, strict=True)
    return {
        "weights": distance(list(exact.weights)),
        "head": distance(["lm_head.weight"]),
        "loss": sum(abs(a - b) for a, b in pairs) / len(exact.losses),
    }


def measure(seeds: int, **sizes: int) -> list[dict[str, Any]]:
    """A row for each way, with a list over seeds of each measure."""
    rows: list[dict[str, Any]] = [
        {"way": way.name, "weights": [], "head": [], "loss": []} for way in WAYS
    ]
    for seed in tqdm(range(seeds), unit="seed"):
        exact = train(REFERENCE, seed, **sizes)
        for row, way in zip(rows, WAYS, strict=True):
            for name, value in drift(train(way, seed, **sizes), exact).items():
                row[name].append(value)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| | weights | head | loss |", "|---|---|---|---|"]
    for row in rows:
        cells = [
            f"{median(row[n]):.4g} ({min(row[n]):.4g} to {max(row[n]):.4g})"
            for n in ("weights", "head", "loss")
        ]
        lines.append(f"| {row['way']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    from common import command, environment

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = measure(
        arguments.seeds, vocabulary=arguments.vocabulary, hidden=arguments.hidden, steps=STEPS
    )
    if arguments.output:
        content = {"command": command(), **environment(), "steps": STEPS, "rows": rows}
        arguments.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
