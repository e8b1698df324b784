"""Compute the GPU memory that training Qwen2.5-VL needs: the table of docs/quickstart.md.

    python scripts/memory.py            print the table
    python scripts/memory.py --write    write it into the page in both languages

This is arithmetic; nothing was measured. A colocated training needs the largest of three peaks:

- weight update: the trainer's weights and optimizer, and the engine's weights;
- rollout: the trainer's weights and optimizer, and the engine's whole share of the GPU;
- training: weights, optimizer, gradients and activations, while the engine sleeps.

Weights and gradients take 2 bytes for each parameter, DeepSpeed's optimizer 12 (weights, mean and
variance in float32), adapters 16 in all. ZeRO-2 divides optimizer and gradients by the number of
GPUs; ZeRO-3 divides the weights too. `_offload` moves the optimizer (with ZeRO-3 also the weights)
into the machine's memory. With gradient checkpointing, activations are one tensor for each layer,
about 20 tensors within one layer, and three float32 copies of a chunk's logits. There is no
reference model, because full training has no KL term.
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
NUM_RUNNING = 16  # samples that vLLM can run at once; the others wait
CHUNK = 1024  # positions in a chunk of logits
BATCH = 8  # `--per_device_train_batch_size`
SHARE = 0.45  # `--vllm_gpu_memory_utilization`
ROOMY = 0.9  # a peak above this share of the GPU's memory gets a mark


@dataclass(frozen=True)
class Model:
    name: str
    parameters: float
    trained: float  # parameters without the frozen vision tower
    adapter: float  # parameters of LoRA with rank 16 on all linear layers
    layers: int
    hidden: int
    cache: int  # bytes of vLLM's cache for each token


MODELS = (
    Model("3B", 3.755e9, 3.09e9, 30e6, 36, 2048, 36 * 1024),
    Model("7B", 8.292e9, 7.62e9, 40e6, 28, 3584, 56 * 1024),
    Model("32B", 33.45e9, 32.76e9, 134e6, 64, 5120, 256 * 1024),
)
VOCABULARY = 152064


@dataclass(frozen=True)
class Setting:
    """Settings that may differ from the quickstart's file."""

    deepspeed: str = ""
    tensor_parallel: int = 1
    share: float = SHARE
    batch: int = BATCH

    def __str__(self) -> str:
        names = [self.deepspeed, f"tp {self.tensor_parallel}" if self.tensor_parallel > 1 else ""]
        names.append(f"{self.share:.2f}" if self.share != SHARE else "")
        names.append(f"batch {self.batch}" if self.batch != BATCH else "")
        return ", ".join(f"`{name}`" for name in names if name)


def peak(model: Model, setting: Setting, *, is_full: bool, gpus: int, card: int) -> float:
    """Return the peak in GiB on each GPU; infinity if the engine's share is too small."""
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
    engine = 2 * model.parameters / setting.tensor_parallel
    cache = NUM_RUNNING * LENGTH * model.cache / setting.tensor_parallel
    pool = setting.share * card
    if pool < (engine + cache) / GIB + ENGINE:
        return float("inf")
    trainer = (weights + optimizer) / GIB
    training = trainer + gathered + (gradients + activations) / GIB
    return RESERVE + max(trainer + gathered + engine / GIB, trainer + pool, training)


def settings(*, is_full: bool, gpus: int) -> Iterator[Setting]:
    """Yield the possible settings, the simplest first."""
    zeros = ["zero2", "zero3", "zero2_offload", "zero3_offload"] if is_full else ["", "zero3"]
    if gpus == 1:  # nothing to shard
        zeros = ["zero2", "zero2_offload"] if is_full else [""]
    shares = (SHARE, *(n / 20 for n in range(3, 17)))
    for batch, zero, parallel, share in product((BATCH, 2), zeros, (1, 2, 4, 8), shares):
        if parallel <= gpus:
            yield Setting(zero, parallel, share, batch)


def cell(model: Model, *, is_full: bool, gpus: int, card: int) -> str:
    """Return the peak and the simplest settings that fit.

    Settings below `ROOMY` come first. A larger peak is marked with `!`; `-` means that none fits.
    """
    peaks = {
        setting: peak(model, setting, is_full=is_full, gpus=gpus, card=card)
        for setting in settings(is_full=is_full, gpus=gpus)
    }
    for limit, mark in ((ROOMY * card, ""), (card, "!")):
        for setting, gib in peaks.items():
            if gib <= limit:
                return f"{gib:.0f}{mark} {setting}".rstrip()
    return "-"


def table() -> str:
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
    parser.add_argument("--write", action="store_true", help="write it into docs/quickstart*.md")
    options = parser.parse_args()
    print(table())
    if options.write:
        for name in ("quickstart.md", "quickstart_CN.md"):
            write_into(ROOT / "docs" / name, TABLE, table())


if __name__ == "__main__":
    main()
