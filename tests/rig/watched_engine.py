"""Feeds updates to the worker of one real engine, and writes the watch's findings to OUTPUT.

    python -m tests.rig.watched_engine MODEL MODEL_TYPE TEMPLATE DTYPE OUTPUT

Each fault of the table that fits the model comes between two sound updates. It is a program of its
own because vLLM's engines leave processes and globals behind.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from swift.model import get_processor
from swift.rlhf_trainers.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, TensorLoRARequest
from swift.template import get_template

from swift_grpo_ext.cpu.settings import apply_cpu_settings
from swift_grpo_ext.upstream.accelerator import has_accelerator
from tests.rig.processes import run_module
from tests.rig.releases import IS_BEFORE_0_28

if TYPE_CHECKING:
    from tiny_vlm.families import Family

Weights = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor] | None
RANK = 8
HAS_ADAPTERS = not IS_BEFORE_0_28 or has_accelerator()


def noise(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1)).to(like) * like.std()


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[0] = float("nan")
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.reshape(tensor.shape).clone()


LAST = r"layers\.1\."
"""The language model's second layer, and a tower's of the same name."""

ATTENTION = LAST + r"self_attn\."
TOWER = r"(visual|vision|vit).*\.0\..*(qkv|q_proj|fc1|gate_proj)\.weight"
EXPERTS = r"experts\.(gate_up_proj|down_proj)"
FAULTS: dict[str, tuple[str, Change, str]] = {
    "random matrix": (ATTENTION + r"o_proj\.weight", noise, "moved by 1"),
    "NaN in a norm": (LAST + r"input_layernorm\.weight", with_nan, "NaN"),
    "zeros": (ATTENTION + r"v_proj\.weight", torch.zeros_like, "is all zeros"),
    "transposed": (ATTENTION + r"[qo]_proj\.weight", transposed, "moved by 1"),
    "tied head overwritten": (r"(embed_tokens|lm_head)\.weight", noise, "moved by 1"),
    "tower's matrix": (TOWER, noise, "moved by 1"),
    "shard left out": (ATTENTION + r"k_proj\.weight", None, "did not arrive"),
    "matrix left out": (ATTENTION + r"o_proj\.weight", None, "did not arrive"),
    "experts transposed": (EXPERTS, transposed, "moved by 1"),
    "one expert random": (EXPERTS, lambda t: torch.cat([t[:-1], noise(t)[-1:]]), "blocks)"),
    "an expert's matrix left out": (r"1\.mlp\.experts\.3\.up_proj\.weight", None, "did not arrive"),
}
"""Each name has the end of the names of tensors (a pattern), their change, or None if none arrive,
and a part of the finding."""


def found(weights: Weights, pattern: str) -> list[str]:
    return [name for name in weights if re.search(pattern + "$", name)]


def spoiled(weights: Weights, pattern: str, change: Change) -> Weights | None:
    """Return the weights after a change; None if the model has no such tensor."""
    names, result = found(weights, pattern), dict(weights)
    for name in names:
        tensor = result.pop(name)
        if change is not None:
            result[name] = change(tensor.clone())
    return result if names else None


class Fed:
    """An engine, and updates of its worker."""

    def __init__(self, model: str, model_type: str, template: str, dtype: str) -> None:
        from swift_grpo_ext.rollout.engine import UPSTREAM_EXTENSION, RolloutEngine

        apply_cpu_settings(SimpleNamespace(ddp_backend=None), ())
        settings: Any = {"model_type": model_type, "torch_dtype": getattr(torch, dtype)}
        processor = get_processor(model, **settings)
        self.has_adapters = HAS_ADAPTERS and model_type == "qwen2_5_vl"
        self.engine = RolloutEngine(
            model,
            template=get_template(processor, template_type=template),
            max_model_len=512,
            enforce_eager=True,
            enable_lora=self.has_adapters,
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

    def update(self, weights: Weights) -> list[str]:
        self.worker.received = [(name, tensor.clone()) for name, tensor in weights.items()]
        self.worker.process_weights_after_loading()
        return self.faults()

    def adapt(self, adapter: Weights, rank: int = RANK) -> list[str]:
        config = {"r": rank, "lora_alpha": 2 * rank, "peft_type": "LORA", "bias": "none"}
        request = TensorLoRARequest(
            lora_name=VLLM_LORA_NAME,
            lora_int_id=VLLM_LORA_INT_ID,
            lora_path="/nowhere",
            peft_config={**config, "target_modules": ["q_proj", "v_proj"]},
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


MODULES = r"layers\.\d+\.self_attn\.[qv]_proj\.weight"


def make_adapter(weights: Weights, rank: int = RANK, modules: str = MODULES) -> Weights:
    torch.manual_seed(2)
    adapter: Weights = {}
    for name in found(weights, modules):
        matrix_OH = weights[name]
        path = f"base_model.model.{name.removesuffix('.weight')}"
        adapter[f"{path}.lora_A.weight"] = torch.randn(rank, matrix_OH.shape[1]) * 0.1
        adapter[f"{path}.lora_B.weight"] = torch.randn(matrix_OH.shape[0], rank) * 0.1
    return adapter


def merged(weights: Weights, adapter: Weights) -> Weights:
    result = dict(weights)
    for name, b_OR in adapter.items():
        if name.endswith("lora_B.weight"):
            a_RH = adapter[name.replace("lora_B", "lora_A")]
            plain = name.removeprefix("base_model.model.").replace(".lora_B", "")
            result[plain] = weights[plain] + 2 * (b_OR @ a_RH).to(weights[plain].dtype)
    return result


def step(weights: Weights, seed: int) -> Weights:
    """Return the weights after an optimizer's step."""
    torch.manual_seed(seed)
    return {n: t + 1e-4 * torch.randn(t.shape).to(t) for n, t in weights.items()}


def try_faults(fed: Fed) -> dict[str, Any]:
    results: dict[str, Any] = {}
    sound = step(fed.weights, 1)
    results["first"] = fed.update(fed.weights) + fed.update(sound)

    def note(name: str, expected: str, faults: list[str], recovered: list[str]) -> None:
        results[name] = {"expected": expected, "faults": faults, "recovered": recovered}

    for number, (name, (pattern, change, expected)) in enumerate(FAULTS.items()):
        weights = spoiled(step(fed.weights, number), pattern, change)
        if weights is not None:
            note(name, expected, fed.update(weights), fed.update(sound))
    if fed.has_adapters:
        adapter = make_adapter(fed.weights)
        twice = fed.update(merged(fed.weights, adapter)) + fed.adapt(adapter)
        note("adapter twice", "counts twice", twice, fed.update(fed.weights) + fed.adapt(adapter))
        large = fed.adapt(make_adapter(fed.weights, 64), 64)
        note("adapter refused", "greater than max_lora_rank 8", large, fed.adapt(adapter))
        beside = make_adapter(fed.weights, modules=r"blocks\.\d+\.attn\.proj\.weight")
        ignored = "ignores the adapter's parts for 2 modules (visual.blocks.0.attn.proj"
        note("tower's adapter", ignored, fed.adapt({**adapter, **beside}), fed.adapt(adapter))
    return results


def assert_each_fault_is_named(
    family: Family, model: Path, folder: Path, num_faults: int, dtype: str = "float32"
) -> None:
    """Assert that each fault is named at its update, and no sound update is.

    Args:
        num_faults: the least number of faults that fit the model.
    """
    output = folder / "found.json"
    settings = [str(model), family.model_type or family.name, family.template, dtype]
    run_module(__name__, *settings, str(output), log=folder / "log")
    faults = json.loads(output.read_text(encoding="utf-8"))
    assert faults.pop("first") == []
    for name, result in faults.items():
        assert any(result["expected"] in fault for fault in result["faults"]), (name, result)
        assert result["recovered"] == [], name
    assert len(faults) >= num_faults


if __name__ == "__main__":
    *settings, output = sys.argv[1:]
    result = try_faults(Fed(*settings))
    Path(output).write_text(json.dumps(result, indent=1), encoding="utf-8")
