"""Gives adapters to vLLM's own manager of adapters, and prints what is recorded of them.

    python -m tests.weights.adapter_manager

One line of JSON: for each kind of adapter the fault, the number of checksums, and whether the
trainer's tensors are as they were. A process of its own, since vLLM's layers want a world.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from swift.rlhf_trainers.utils import TensorLoRARequest, patch_vllm_load_adapter
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.interfaces import SupportsLoRA

from swift_grpo_ext.rollout.wire import ADAPTER_FAULT
from swift_grpo_ext.weights.adapters import recorded_adapter
from swift_grpo_ext.weights.checksums import WeightUpdateError
from tests.stack.processes import free_port

WIDTH = 16
PLAIN = ("up", "gate", "down")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank": {"r": 64},
    "rank pattern": {"rank_pattern": {"down": 32}},
    "DoRA": {"use_dora": True},
    "saved module": {"modules_to_save": ["head"]},
    "biases": {"bias": "lora_only"},
    "tower": {"target_modules": [*PLAIN, "tower"]},
}


class Served(nn.Module, SupportsLoRA):
    """Of vLLM's layers, two of them in one, and a tower of torch's."""

    packed_modules_mapping: ClassVar = {"gate_up": ["gate", "up"]}
    embedding_modules: ClassVar = {}
    is_3d_moe_weight = is_non_gated_moe = False

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.gate_up = MergedColumnParallelLinear(WIDTH, [WIDTH, WIDTH], bias=False)
        self.down = RowParallelLinear(WIDTH, WIDTH, bias=False)
        self.tower = nn.Linear(WIDTH, WIDTH)


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in (*PLAIN, "tower", "head"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))


@contextmanager
def manager() -> Iterator[LRUCacheWorkerLoRAManager]:
    """vLLM's own, for adapters of rank 16 at most, over a small model."""
    patch_vllm_load_adapter()
    lora = LoRAConfig(max_lora_rank=16, max_loras=1, lora_dtype=torch.float32)
    lora.max_cpu_loras = 1
    with set_current_vllm_config(VllmConfig()):
        address = f"tcp://127.0.0.1:{free_port()}"
        init_distributed_environment(1, 0, address, 0, "gloo")
        initialize_model_parallel()
        text = SimpleNamespace(max_position_embeddings=8)
        config: Any = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=2, max_num_batched_tokens=8),
            parallel_config=SimpleNamespace(enable_expert_parallel=False),
            model_config=SimpleNamespace(
                get_vocab_size=lambda: 8,
                is_encoder_decoder=False,
                hf_config=SimpleNamespace(get_text_config=lambda: text),
            ),
            lora_config=lora,
        )
        made = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), {})
        made.create_lora_manager(Served(), config)
        yield made


def give(to: LRUCacheWorkerLoRAManager, **changes: Any) -> tuple[str | None, int, bool]:
    settings = {"r": 8, "lora_alpha": 32, "target_modules": list(PLAIN)} | changes
    config = LoraConfig(**settings, init_lora_weights=False)
    model = get_peft_model(Trained(), config)
    tensors = {name: t.detach() for name, t in get_peft_model_state_dict(model).items()}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    request = TensorLoRARequest(
        lora_name="a",
        lora_int_id=111,
        lora_path="none",
        load_inplace=True,
        peft_config=asdict(config),
        lora_tensors=tensors,
    )
    fault = None
    try:
        with recorded_adapter(to) as sums:
            to.add_adapter(request)
    except WeightUpdateError as e:
        fault = str(e)
    assert "add_adapter" not in vars(to)
    assert sums.pop(ADAPTER_FAULT, None) == fault
    is_kept = all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())
    return fault, len(sums), is_kept


def main() -> None:
    with manager() as made:
        print(json.dumps({name: give(made, **changes) for name, changes in KINDS.items()}))


if __name__ == "__main__":
    main()
