"""Feeds updates to the worker of one real engine, and writes the watch's findings to OUTPUT.

    python -m tests.rig.watched_engine MODEL MODEL_TYPE TEMPLATE DTYPE (faults | NUMBER) OUTPUT

`faults`: each fault of the table that fits the model, between two sound updates. NUMBER: the number
of updates of simulated trainings, full and LoRA, merged and apart. It is a program of its own
because vLLM's engines leave processes and globals behind.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from swift.model import get_processor
from swift.rlhf_trainers.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, TensorLoRARequest
from swift.template import get_template

from swift_grpo_ext.cpu.settings import apply_cpu_settings
from swift_grpo_ext.upstream.accelerator import has_accelerator
from swift_grpo_ext.weights.watch import FEWEST_ENTRIES
from tests.rig.releases import IS_BEFORE_0_28

Weights = dict[str, torch.Tensor]
RANK = 8
HAS_ADAPTERS = not IS_BEFORE_0_28 or has_accelerator()
LAST = r"layers\.1\."
"""The language model's second layer, and a tower's of the same name."""


def found(weights: Weights, pattern: str) -> list[str]:
    return [name for name in weights if re.search(pattern + "$", name)]


def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like) * like.std()


def changed(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a fault that changes each tensor whose name ends with the pattern."""

    def spoil(weights: Weights) -> Weights | None:
        names = found(weights, pattern)
        return {**weights, **{n: change(weights[n].clone()) for n in names}} if names else None

    return spoil


def set_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def without(pattern: str) -> Any:
    def spoil(weights: Weights) -> Weights | None:
        names = found(weights, pattern)
        return {n: t for n, t in weights.items() if n not in names} if names else None

    return spoil


def taken_from(pattern: str, source: str) -> Any:
    """Return a fault that replaces tensors by others of their shape."""

    def spoil(weights: Weights) -> Weights | None:
        names, sources = found(weights, pattern), found(weights, source)
        pairs = {
            n: weights[o].clone()
            for n, o in zip(names, sources, strict=False)
            if weights[o].shape == weights[n].shape
        }
        return {**weights, **pairs} if pairs else None

    return spoil


FUSED = r"experts\.(gate_up_proj|down_proj)"
FAULTS: dict[str, tuple[Any, str]] = {
    "random matrix": (changed(LAST + r"self_attn\.o_proj\.weight", noise), "moved by 1"),
    "NaN in a matrix": (
        changed(LAST + r"mlp\.(down_proj|gate)\.weight", set_first(float("nan"))),
        "NaN",
    ),
    "infinity in a matrix": (
        changed(LAST + r"self_attn\.q_proj\.weight", set_first(float("inf"))),
        "NaN or infinity",
    ),
    "NaN in a norm": (changed(LAST + r"input_layernorm\.weight", set_first(float("nan"))), "NaN"),
    "zeros": (changed(LAST + r"self_attn\.v_proj\.weight", torch.zeros_like), "is all zeros"),
    "transposed": (
        changed(LAST + r"self_attn\.[qo]_proj\.weight", lambda t: t.T.reshape(t.shape).clone()),
        "moved by 1",
    ),
    "scale lost": (changed(LAST + r"self_attn\.q_proj\.weight", lambda t: t * 20), "moved by 19"),
    "rows shifted": (
        changed(LAST + r"self_attn\.o_proj\.weight", lambda t: t.roll(1, 0)),
        "moved by 1",
    ),
    "another layer's": (
        taken_from(r"layers\.0\.self_attn\.o_proj\.weight", LAST + r"self_attn\.o_proj\.weight"),
        "moved by 1",
    ),
    "gate is up": (
        taken_from(LAST + r"mlp\.gate_proj\.weight", LAST + r"mlp\.up_proj\.weight"),
        "gate_proj moved by 1",
    ),
    "value is key": (
        taken_from(LAST + r"self_attn\.v_proj\.weight", LAST + r"self_attn\.k_proj\.weight"),
        "v_proj moved by 1",
    ),
    "tied head overwritten": (changed(r"(embed_tokens|lm_head)\.weight", noise), "moved by 1"),
    "tower's matrix": (
        changed(r"(visual|vision|vit).*\.0\..*(qkv|q_proj|fc1|gate_proj)\.weight", noise),
        "moved by 1",
    ),
    "shard left out": (without(LAST + r"self_attn\.k_proj\.weight"), "did not arrive"),
    "matrix left out": (without(LAST + r"self_attn\.o_proj\.weight"), "did not arrive"),
    "experts transposed": (
        changed(FUSED, lambda t: t.mT.reshape(t.shape).clone()),
        "moved by 1",
    ),
    "experts in another order": (changed(FUSED, lambda t: t.roll(1, 0)), "moved by 1"),
    "one expert random": (
        changed(FUSED, lambda t: torch.cat([t[:-1], noise(t)[-1:]])),
        "blocks)",
    ),
    "an expert's matrix left out": (without(r"1\.mlp\.experts\.3\.up_proj\.weight"), "did not arr"),
}
"""By name: the function that spoils weights (None if the model has no such tensor), and a part of
the finding."""


class Fed:
    """An engine, and updates of its worker."""

    def __init__(self, model: str, model_type: str, template: str, dtype: str) -> None:
        from swift_grpo_ext.rollout.engine import UPSTREAM_EXTENSION, RolloutEngine

        apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
        settings: Any = {"model_type": model_type, "torch_dtype": getattr(torch, dtype)}
        processor = get_processor(model, **settings)
        self.engine = RolloutEngine(
            model,
            template=get_template(processor, template_type=template),
            max_model_len=512,
            enforce_eager=True,
            enable_lora=HAS_ADAPTERS and (sys.argv[5] != "faults" or model_type == "qwen2_5_vl"),
            max_lora_rank=RANK,
            engine_kwargs={
                "kv_cache_memory_bytes": 2**27,
                "worker_extension_cls": UPSTREAM_EXTENSION,
            },
            **settings,
        )
        self.worker = self.engine.inner_model_executor.driver_worker.worker
        self.worker.received = []
        self.worker.engine_weights.begin_watch()
        self.weights: Weights = load_file(Path(model, "model.safetensors"))
        self.seconds: list[float] = []

    def update(self, weights: Weights) -> list[str]:
        self.worker.received = [(name, tensor.clone()) for name, tensor in weights.items()]
        began = time.perf_counter()
        self.worker.process_weights_after_loading()
        self.seconds.append(time.perf_counter() - began)
        return self.faults()

    def adapt(self, adapter: Weights, rank: int = RANK) -> list[str]:
        config = {"r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
        request = TensorLoRARequest(
            lora_name=VLLM_LORA_NAME,
            lora_int_id=VLLM_LORA_INT_ID,
            lora_path="/nowhere",
            peft_config={**config, "peft_type": "LORA", "bias": "none"},
            lora_tensors={name: tensor.clone() for name, tensor in adapter.items()},
            load_inplace=True,
        )
        try:
            with self.worker.engine_weights.adapter():
                self.worker.add_lora(request)
        except Exception as e:  # a server logs it
            print(e)
        return self.faults()

    def faults(self) -> list[str]:
        report = self.worker.engine_weights.report()
        return [*report.faults, *filter(None, [report.adapter_fault])]


def make_adapter(weights: Weights, size: float, rank: int = RANK) -> Weights:
    torch.manual_seed(2)
    adapter: Weights = {}
    for name in found(weights, r"layers\.\d+\.self_attn\.[qv]_proj\.weight"):
        matrix_OH = weights[name]
        path = f"base_model.model.{name.removesuffix('.weight')}"
        adapter[f"{path}.lora_A.weight"] = torch.randn(rank, matrix_OH.shape[1]) * size
        adapter[f"{path}.lora_B.weight"] = torch.randn(matrix_OH.shape[0], rank) * size
    return adapter


def merged(weights: Weights, adapter: Weights) -> Weights:
    result = dict(weights)
    for name, b_OR in adapter.items():
        if name.endswith("lora_B.weight"):
            a_RH = adapter[name.replace("lora_B", "lora_A")]
            plain = name.removeprefix("base_model.model.").replace(".lora_B", "")
            result[plain] = weights[plain] + 2 * (b_OR @ a_RH).to(weights[plain].dtype)
    return result


def step(weights: Weights, size: float, seed: int) -> Weights:
    """Return the weights after an optimizer's step: each number moves by about `size`."""
    torch.manual_seed(seed)
    return {n: t + size * torch.randn(t.shape).to(t) for n, t in weights.items()}


def try_faults(fed: Fed) -> dict[str, Any]:
    results: dict[str, Any] = {}
    sound = step(fed.weights, 1e-4, 1)
    results["first"] = fed.update(fed.weights) + fed.update(sound)

    def note(name: str, expected: str, faults: list[str], recovered: list[str]) -> None:
        results[name] = {"expected": expected, "faults": faults, "recovered": recovered}

    for number, (name, (spoil, expected)) in enumerate(FAULTS.items()):
        spoiled = spoil(step(fed.weights, 1e-4, number))
        if spoiled is not None:
            note(name, expected, fed.update(spoiled), fed.update(sound))
    load = fed.worker.model_runner.model.load_weights
    try:
        old = list(sound.items())
        fed.worker.model_runner.model.load_weights = lambda weights: load(old)
        faults = fed.update(step(fed.weights, 1e-4, 98))
    finally:
        del fed.worker.model_runner.model.load_weights
    note("stale", "(stale)", faults, fed.update(sound))
    if fed.engine.enable_lora:
        adapter = make_adapter(fed.weights, 0.1)
        twice = fed.update(merged(fed.weights, adapter)) + fed.adapt(adapter)
        note("adapter twice", "counts twice", twice, fed.update(fed.weights) + fed.adapt(adapter))
        refused = fed.adapt(make_adapter(fed.weights, 0.1, 64), 64)
        note("adapter refused", "vLLM refuses the adapter", refused, fed.adapt(adapter))
    return results


def try_sound(fed: Fed, count: int) -> dict[str, Any]:
    """Simulate trainings; a full one starts from weights that differ from the engine's by 5%."""
    alarms: list[str] = []
    cosines: dict[str, float] = {}

    def update(kind: str, weights: Weights) -> None:
        watch = fed.worker.engine_weights._watch
        before = watch._now
        alarms.extend(f"{kind}: {fault}" for fault in fed.update(weights))
        for name, a in watch._now.items():
            if a.shape[1] >= FEWEST_ENTRIES:
                cosine = torch.cosine_similarity(before[name], a).min().item()
                cosines[kind] = min(cosines.get(kind, 1.0), cosine)

    for kind, lr in (("full", 1e-5), ("full", 1e-4), ("merged", 1e-4), ("apart", 1e-4)):
        label, start = f"{kind} {lr:g}", fed.weights
        if kind == "full":  # resumed: further away than any step goes
            start = {n: t + 0.05 * noise(t) if t.ndim > 1 else t for n, t in fed.weights.items()}
        adapter = make_adapter(fed.weights, 0.02)
        trained = {n: t.float().clone() for n, t in (start if kind == "full" else adapter).items()}
        optimizer = torch.optim.AdamW(trained.values(), lr=lr)
        drift = {n: torch.randn_like(t) for n, t in trained.items()}
        for number in range(count // 4):
            torch.manual_seed(number)
            for name, tensor in trained.items():
                tensor.grad = drift[name] + torch.randn_like(tensor)
            optimizer.step()
            now = {n: t.to(start[n].dtype) if kind == "full" else t for n, t in trained.items()}
            if kind == "apart":
                if number == 0:
                    update(label, start)
                alarms.extend(f"{label}: {fault}" for fault in fed.adapt(now))
            else:
                update(label, now if kind == "full" else merged(start, now))
    return {"alarms": alarms, "least cosines": cosines, "seconds": sum(fed.seconds)}


if __name__ == "__main__":
    *settings, task, output = sys.argv[1:]
    fed = Fed(*settings)
    result = try_faults(fed) if task == "faults" else try_sound(fed, int(task))
    Path(output).write_text(json.dumps(result, indent=1), encoding="utf-8")
