"""What runs: parts with their seconds, and their cases, on a GPU and in small on a CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

TINY = ("Qwen2", "Qwen2.5-VL", "InternVL", "Qwen3.5", "Gemma3")
BY_KEYWORD = ("new spelling", "old spelling")
FLASH = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}
"""Each needs this distribution; transformers would ask its hub otherwise."""
ATTENTIONS = {"cpu": ("sdpa", "eager"), "cuda": ("sdpa", "eager", *FLASH)}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """A case is one call of a function; a process can be given it."""

    name: str
    function: str
    """`module:function`."""

    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A part is a table of the page."""

    name: str
    says: str
    seconds: float
    """After so many, its further cases are left out."""

    cases: list[Case]


def plan(device: str) -> list[Part]:
    """Return the parts for "cuda" or "cpu", in the order in which they run."""
    on_gpu = device == "cuda"

    def case(name: str, function: str, **arguments: Any) -> Case:
        return Case(name, f"scripts.gpu.{function}", {"device": device, **arguments})

    head = {"positions": 8192, "vocabulary": 151_936} if on_gpu else {
        "positions": 256, "vocabulary": 4096,
    }  # fmt: skip
    logits = [
        case(f"{model}, {dtype}", "logits:run", model=model, dtype=dtype)
        for model in (*TINY, *BY_KEYWORD)
        for dtype in DTYPES
    ]
    logits += [
        case(
            f"a head of width {width}, {dtype}", "logits:run_head", width=width, dtype=dtype, **head
        )
        for width in (64, 3584 if on_gpu else 96)
        for dtype in DTYPES
    ]
    ways = [
        (attention, dtype, "")
        for attention in ATTENTIONS[device]
        for dtype in DTYPES
        if not (dtype == "float32" and attention in FLASH)
    ]
    ways += [("sdpa", "float32", kind) for kind in ("reentrant", "not reentrant")]
    # The last, since each of its shapes is compiled.
    ways += [("flex_attention", dtype, "") for dtype in DTYPES if on_gpu]
    prompt_once = [
        case(
            f"{model}, {attention}, {dtype}" + (f", {kind} checkpointing" if kind else ""),
            "prompt_once:run",
            model=model,
            attention=attention,
            dtype=dtype,
            checkpointing=kind,
        )
        for attention, dtype, kind in ways
        for model in TINY
    ]
    megabytes = 256 if on_gpu else 4
    media = [case(f"{megabytes} MB, joined late", "media:run_late_joining", megabytes=megabytes)]
    media += [
        case(f"{model}, {dtype}", "media:run", model=model, dtype=dtype)
        for model in TINY[1:]
        for dtype in DTYPES
    ]
    sizes_in_full = {"3b": 36, "7b": 28} if on_gpu else {"small": 2}
    media += [
        case(
            f"Qwen2.5-VL {size}, in full",
            "media:run_width",
            size=size,
            layers=layers,
            side=64 if on_gpu else 8,
            completion=256 if on_gpu else 16,
            group_size=8 if on_gpu else 4,
            repetitions=2 if on_gpu else 1,
        )
        for size, layers in sizes_in_full.items()
    ]
    megabytes = 4096 if on_gpu else 8
    checksums = [
        case("against arithmetic", "checksums:run"),
        case(f"{megabytes} MB of bfloat16", "checksums:run_bandwidth", megabytes=megabytes),
    ]
    return [
        Part("machine", "What this machine is.", 60, [case("versions", "machine:run")]),
        Part(
            "logits",
            "Log-probabilities, entropies and gradients from the logits of chosen positions, at "
            "once and in chunks, against those of all positions.",
            60,
            logits,
        ),
        Part(
            "prompt once",
            "Log-probabilities and gradients where samples share a prompt that is read once, "
            "against the pass over the whole batch.",
            100,
            prompt_once,
        ),
        Part(
            "media",
            "Images that a frozen tower encodes once, from pinned memory and on streams, against "
            "the pass that encodes each. Times and peaks: one pass without gradients, all layers, "
            "bfloat16, sdpa, random weights.",
            90,
            media,
        ),
        Part("checksums", "Checksums of weights, and their speed beside a copy.", 20, checksums),
        Part(
            "deterministic",
            "Four steps made twice as with --full_determinism true: values, gradients and weights "
            "bit by bit, and what it costs in forward and backward. bfloat16, gradient "
            "checkpointing, random weights. The same GPU and releases leave the same checksum.",
            60,
            list(deterministic(device)),
        ),
        Part(
            "widths",
            "Forward and backward over one group, in turns: bfloat16, gradient checkpointing, "
            "random weights, samples of one length.",
            400,
            list(widths(device)),
        ),
    ]


def widths(device: str) -> Iterable[Case]:
    """Yield the cases of times and peaks; what is asked first comes first."""
    on_gpu = device == "cuda"
    sizes = ("3b", "7b") if on_gpu else ("small",)
    attentions = ("sdpa", *FLASH) if on_gpu else ("sdpa",)
    prompts = (1000, 4000, 8000, 2000) if on_gpu else (64, 128)
    group_sizes = (8, 16) if on_gpu else (4,)
    of_all = {"device": device, "layers": 4, "completion": 256, "repetitions": 2}
    if not on_gpu:
        of_all |= {"layers": 2, "completion": 16, "repetitions": 1}
    for attention in attentions:
        for size in sizes:
            for prompt in prompts:
                for group_size in group_sizes:
                    yield Case(
                        f"Qwen2.5 {size}, {attention}, prompt {prompt}, G = {group_size}",
                        "scripts.gpu.widths:run",
                        {
                            **of_all, "size": size, "attention": attention, "prompt": prompt,
                            "group_size": group_size,
                        },
                    )  # fmt: skip


def deterministic(device: str) -> Iterable[Case]:
    """Yield the cases of steps that are made twice."""
    on_gpu = device == "cuda"
    sizes = {"size": "3b", "layers": 4, "side": 64, "completion": 256, "group_size": 8}
    if not on_gpu:
        sizes = {"size": "small", "layers": 2, "side": 8, "completion": 16, "group_size": 4}
    for attention in ("sdpa", "flash_attention_2") if on_gpu else ("sdpa",):
        arguments = {**sizes, "device": device, "attention": attention, "repetitions": 3}
        yield Case(
            f"Qwen2.5-VL {sizes['size']}, {attention}", "scripts.gpu.deterministic:run", arguments
        )
