"""What a run takes of each GPU's memory, estimated. Pure.

Weights, gradients and optimizer after Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3):
with DeepSpeed in 16 bits, 2 bytes a parameter for weights, 2 for gradients and 12 for Adam in 32
bits; stage 1 spreads the optimizer over the ranks, 2 the gradients too, 3 the weights too. Without
DeepSpeed, Adam's two moments have the weights' own type. Activations with gradient checkpointing:
one hidden state a layer and token (Chen et al. 2016, arXiv:1604.06174). None of it was measured on
GPUs; fragmentation, NCCL's buffers and images that become many tokens come on top.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from swift_grpo_ext.checks.presets import Run

GIB = 2**30
OVERHEAD_GIB = 3.0
"""CUDA context, kernels' workspaces, NCCL."""

LOGITS_COPIES = 3
"""Logits in 32 bits, their log-softmax, and the gradient."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """What counts of a model's size, from its config.json."""

    num_parameters: float
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    num_layers: int
    vocabulary_size: int
    head_size: int = 128
    num_vision_heads: int = 16

    def kv_bytes(self, bytes_per_value: int) -> int:
        """Of a token's keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * bytes_per_value


def _model(billions: float, heads: int, kv: int, hidden: int, layers: int, vocab: int) -> Model:
    return Model(
        num_parameters=billions * 1e9,
        num_heads=heads,
        num_kv_heads=kv,
        hidden_size=hidden,
        num_layers=layers,
        vocabulary_size=vocab,
    )


MODELS = {
    "Qwen2.5-VL-3B": _model(3.75, 16, 2, 2048, 36, 151_936),
    "Qwen2.5-VL-7B": _model(8.29, 28, 4, 3584, 28, 152_064),
    "Qwen2.5-VL-32B": _model(33.5, 40, 8, 5120, 64, 152_064),
    "Qwen2.5-VL-72B": _model(73.4, 64, 8, 8192, 80, 152_064),
}


def known_model(name: object) -> Model | None:
    """The model that a name or a path says; None for one that we do not know."""
    found = [model for key, model in MODELS.items() if re.search(rf"{key}(?!\d)", str(name or ""))]
    return found[0] if found else None


def estimate_training(run: Run, model: Model) -> dict[str, float]:
    """GiB on each training GPU, by part."""
    stage = _zero_stage(run)
    bytes_per_value = 4 if run.train("torch_dtype") == "float32" else 2
    ranks, weights = run.num_ranks, model.num_parameters * bytes_per_value
    full = run.train("tuner_type") == "full"
    # An adapter on all linear layers has about 0.1% of the parameters for each 4 of its rank.
    trained = model.num_parameters * (1 if full else int(run.train("lora_rank")) * 2.5e-4)
    gradients = trained * bytes_per_value / (ranks if stage >= 2 else 1)
    optimizer = trained * (12 / ranks if stage >= 1 else 2 * bytes_per_value)
    if "offload" in str(run.train("deepspeed")):
        optimizer = 0.0
    parts = {
        "weights": weights / (ranks if stage == 3 else 1),
        "gradients and optimizer": gradients + optimizer,
        **_activations(run, model, bytes_per_value),
    }
    parts = {name: size / GIB for name, size in parts.items()}
    if run.train("beta") != 0 and full:
        parts["reference model"] = parts["weights"]
    return {**parts, "vLLM": _colocated(run, parts), "other": OVERHEAD_GIB}


def _activations(run: Run, model: Model, bytes_per_value: int) -> dict[str, float]:
    rows = int(run.train("per_device_train_batch_size"))
    completion = int(run.train("max_completion_length")) * int(run.train("max_turns") or 1)
    tokens = rows * (int(run.train("max_length") or 1024) + completion)
    hidden = tokens * model.hidden_size * bytes_per_value
    layers = 1 if run.train("gradient_checkpointing") else 16  # values kept a layer, roughly
    # A layer that is computed again holds about 16 hidden states a token.
    activations = hidden * (layers * model.num_layers + 16)
    positions = rows * completion
    chunk = int((run.training or {}).get("logps_chunk_size") or 0)
    logits = LOGITS_COPIES * 4 * model.vocabulary_size * min(chunk or positions, positions)
    return {"activations": activations, "logits": logits}


def _colocated(run: Run, training: Mapping[str, float]) -> float:
    """What vLLM takes beside the training; where it sleeps, beyond what the training then needs."""
    if not run.train("use_vllm") or run.has_servers:
        return 0.0
    share = float(run.train("vllm_gpu_memory_utilization")) * run.gpu_gib
    if not int(run.train("sleep_level")):
        return share
    # While vLLM works, nothing is differentiated, and what is offloaded is not there.
    free = training["activations"] + training["logits"]
    free += training["gradients and optimizer"] if run.train("offload_optimizer") else 0
    free += training["weights"] if run.train("offload_model") else 0
    return max(share - free, 0.0)


def estimate_rollout(run: Run, model: Model) -> dict[str, float]:
    """GiB on each of a server's GPUs, by part; the cache is what vLLM has left of its share."""
    parallel = int(run.serve("vllm_tensor_parallel_size"))
    bytes_per_value = 4 if run.serve("torch_dtype") == "float32" else 2
    weights = model.num_parameters * bytes_per_value / parallel / GIB
    share = float(run.serve("vllm_gpu_memory_utilization")) * run.gpu_gib
    length = int(run.serve("vllm_max_model_len") or 32_768)
    least = length * model.kv_bytes(bytes_per_value) / parallel / GIB
    cache = max(share - weights - OVERHEAD_GIB, least)
    return {"weights": weights, "KV cache": cache, "other": OVERHEAD_GIB}


def _zero_stage(run: Run) -> int:
    match = re.search(r"zero(\d)", str(run.train("deepspeed") or ""))
    return int(match[1]) if match else 0
