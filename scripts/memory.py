"""Works out what training Qwen2.5-VL takes of GPUs: the table of docs/quickstart.md.

    python scripts/memory.py            print the table
    python scripts/memory.py --write    into the page, in both languages

Nothing here was measured. A colocated training has three peaks, and the largest counts:

- a weight update: the trainer's weights and optimizer, and the engine's weights;
- a rollout: the trainer's weights and optimizer, and all that the engine takes for itself;
- training: weights, optimizer, gradients and activations, while the engine sleeps.

Weights and gradients take 2 bytes a parameter, DeepSpeed's optimizer 12 (weights, mean and variance
in float32), adapters 16 in all. ZeRO-2 divides optimizer and gradients by the GPUs, ZeRO-3 weights
too; `_offload` moves the optimizer (ZeRO-3: and weights) into the machine's memory. With gradient
checkpointing, activations are a tensor for each layer, one layer's own (about 20), and the logits
of a chunk, three times in 4 bytes. Full training without KL term: no reference model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from pages import ROOT, markdown, write_into

TABLE = "memory"
GIB = 2**30
CARDS = (24, 40, 80)  # GiB of a GPU
RESERVE = 1.5  # GiB for CUDA, NCCL and fragments
ENGINE = 2.0  # GiB for vLLM's graphs and its largest pass
LENGTH = 2048 + 1024  # tokens of a sample
NUM_RUNNING = 16  # samples that vLLM has room for at a time (else they take turns)
CHUNK = 1024  # positions of a chunk
BATCH = 8  # `--per_device_train_batch_size`
SHARE = 0.45  # `--vllm_gpu_memory_utilization`
ROOMY = 0.9  # up to this part of a GPU's memory there is room to spare


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    trained: float  # without the vision tower, which is frozen
    adapter: float  # parameters of LoRA of rank 16 on all linear layers
    layers: int
    hidden: int
    cache: int  # bytes of vLLM's cache for a token


MODELS = (
    Model("3B", 3.755e9, 3.09e9, 30e6, 36, 2048, 36 * 1024),
    Model("7B", 8.292e9, 7.62e9, 40e6, 28, 3584, 56 * 1024),
    Model("32B", 33.45e9, 32.76e9, 134e6, 64, 5120, 256 * 1024),
)
VOCABULARY = 152064


@dataclass(frozen=True)
class Setting:
    """Holds what is set otherwise than in the quickstart's file."""

    deepspeed: str = ""
    parallel: int = 1  # `--vllm_tensor_parallel_size`
    share: float = SHARE
    batch: int = BATCH

    def __str__(self) -> str:
        names = [self.deepspeed, f"tp {self.parallel}" if self.parallel > 1 else ""]
        names.append(f"{self.share:.2f}" if self.share != SHARE else "")
        names.append(f"batch {self.batch}" if self.batch != BATCH else "")
        return ", ".join(f"`{name}`" for name in names if name)


def peak(model: Model, setting: Setting, *, is_full: bool, gpus: int, card: int) -> float:
    """Return the GiB of a GPU that a training takes; infinite where the engine has too few."""
    is_offloaded, is_sharded = setting.deepspeed.endswith("offload"), "zero3" in setting.deepspeed
    weights = 2 * model.parameters / (gpus if is_sharded else 1)
    if is_sharded and is_offloaded:
        weights = 0.0
    gathered = 2.0 if is_sharded else 0.0
    optimizer, gradients = 12 * model.adapter, 4 * model.adapter
    if is_full:
        optimizer = 0.0 if is_offloaded else 12 * model.trained / gpus
        gradients = 2 * model.trained / gpus
    tokens = setting.batch * LENGTH
    activations = 2 * model.hidden * tokens * (model.layers + 20) + 12 * VOCABULARY * CHUNK
    engine = 2 * model.parameters / setting.parallel
    cache = NUM_RUNNING * LENGTH * model.cache / setting.parallel
    pool = setting.share * card
    if pool < (engine + cache) / GIB + ENGINE:
        return float("inf")
    trainer = (weights + optimizer) / GIB
    training = trainer + gathered + (gradients + activations) / GIB
    return RESERVE + max(trainer + gathered + engine / GIB, trainer + pool, training)


def settings(*, is_full: bool, gpus: int) -> Iterator[Setting]:
    """Yield what may be set, the simplest first."""
    ways = ["zero2", "zero3", "zero2_offload", "zero3_offload"] if is_full else ["", "zero3"]
    if gpus == 1:  # nothing to shard
        ways = ["zero2", "zero2_offload"] if is_full else [""]
    shares = (SHARE, *(n / 20 for n in range(3, 17)))
    for batch, way, parallel, share in product((BATCH, 2), ways, (1, 2, 4, 8), shares):
        if parallel <= gpus:
            yield Setting(way, parallel, share, batch)


def cell(model: Model, *, is_full: bool, gpus: int, card: int) -> str:
    """Return the peak and the settings of the simplest way that fits with room to spare, else of
    the simplest that fits, with a mark; `-` where none does."""
    found = {
        setting: peak(model, setting, is_full=is_full, gpus=gpus, card=card)
        for setting in settings(is_full=is_full, gpus=gpus)
    }
    for limit, mark in ((ROOMY * card, ""), (card, "!")):
        for setting, gib in found.items():
            if gib <= limit:
                return f"{gib:.0f}{mark} {setting}".rstrip()
    return "-"


def made() -> str:
    """Return the table as Markdown."""
    rows = [
        [f"{gpus} x {model.name}", f"`{tuner}`"]
        + [cell(model, is_full=tuner == "full", gpus=gpus, card=card) for card in CARDS]
        for gpus, model, tuner in product((1, 8), MODELS, ("lora", "full"))
        if gpus > 1 or model.name != "32B"
    ]
    return markdown(["GPU", "`--tuner_type`", *(f"{card} GB" for card in CARDS)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into docs/quickstart.md and _CN.md")
    options = parser.parse_args()
    print(made())
    if options.write:
        for name in ("quickstart.md", "quickstart_CN.md"):
            write_into(ROOT / "docs" / name, TABLE, made())


if __name__ == "__main__":
    main()
