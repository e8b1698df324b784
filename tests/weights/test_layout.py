"""Tensors as checkpoints have them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, VeraConfig, get_peft_model
from safetensors.torch import save_file
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

from scripts.bench.peak import peak_bytes
from swift_grpo_ext.rollout.rank_group import SingleRank
from swift_grpo_ext.weights.layout import checkpoint_buffers, checkpoint_layout, one_by_one
from swift_grpo_ext.weights.sync import WeightSync

TEXT = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 2},
    **{"num_experts_per_tok": 1, "moe_intermediate_size": 8},
    "rope_scaling": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
}
VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    **{"out_hidden_size": 16, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
}


@pytest.mark.parametrize("lora", [False, True])
def test_experts_are_transposed_and_nothing_else(lora: bool) -> None:
    """Here twice the experts' width is the hidden size: shapes alone would tell nothing."""
    config = transformers.Qwen3VLMoeConfig(text_config=TEXT, vision_config=VISION)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    runtime = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if lora else model
    sent = checkpoint_layout(wrapped, runtime)
    experts = [name for name in runtime if ".experts." in name]
    assert len(experts) == 2
    # transformers 4 keeps them as files do.
    transposed = [] if transformers.__version__.startswith("4.") else experts
    for name, tensor in runtime.items():
        expected = tensor.transpose(1, 2) if name in transposed else tensor
        assert torch.equal(sent[name], expected)


BUCKET = 2**20


class Client:
    """Copies out what ms-swift's client would broadcast, and keeps none of it."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def update_flattened_params(self, metadatas: list[Any], flattened: torch.Tensor) -> None:
        self.sent.append(flattened.numel())

    def update_named_param(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()  # NCCL sends memory as it lies
        self.sent.append(tensor.numel() * tensor.element_size())


@pytest.mark.parametrize("flattens", [True, False])
def test_experts_are_transposed_as_they_are_sent(
    flattens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no time are there more transposed experts than those of ms-swift's bucket (which it holds
    twice), and one more for its checksum."""
    text = {**TEXT, "num_hidden_layers": 32, "num_experts": 16, "moe_intermediate_size": 128}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=VISION)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    runtime = dict(model.state_dict())
    experts = [t.numel() * t.element_size() for n, t in runtime.items() if ".experts." in n]
    client = Client()
    trainer: Any = SimpleNamespace(
        rollout_enable_lora=False,
        vllm_mode="server",
        accelerator=SimpleNamespace(is_main_process=True),
        args=SimpleNamespace(enable_flattened_weight_sync=flattens),
        vllm_client=client,
    )
    weights = WeightSync(SingleRank(), None)
    load = partial(RolloutTrainerMixin._load_state_dict_to_vllm, trainer)
    load = load if flattens else one_by_one(load)
    monkeypatch.setenv("SWIFT_UPDATE_WEIGHTS_BUCKET_SIZE", str(BUCKET // 2**20))

    def send() -> None:
        weights.send(checkpoint_layout(model, runtime), load)

    peak = peak_bytes(send)
    assert weights._failure is None
    assert sum(client.sent) == sum(t.numel() * t.element_size() for t in runtime.values())
    assert peak < 2 * BUCKET + 2 * max(experts) + 2**20
    assert sum(experts) > 2 * (2 * BUCKET + 2 * max(experts) + 2**20)


@pytest.mark.parametrize("lora", [False, True])
def test_buffers_of_a_checkpoint(lora: bool) -> None:
    """A router's own bias, which vLLM holds as a parameter; no frequencies, which no file has."""
    config = transformers.Glm4MoeConfig(
        **{"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
        **{"intermediate_size": 16, "num_key_value_heads": 1, "head_dim": 8},
    )
    model = transformers.Glm4MoeForCausalLM(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = model.state_dict()[name]
    targets = ["q_proj", "k_proj", "lm_head"]
    wrapped = get_peft_model(model, LoraConfig(target_modules=targets)) if lora else model
    [(found, buffer)] = checkpoint_buffers(wrapped).items()
    assert found == name
    assert buffer.data_ptr() == bias.data_ptr()


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_transformers_loads_quantized(lora: bool, tmp_path: Path) -> None:
    """BitNet's layers are buffers too, and load without a GPU."""
    config = transformers.Qwen2Config(
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False},
    )
    tensors = transformers.Qwen2ForCausalLM(config).state_dict()
    for name in [n for n in tensors if "_proj.weight" in n]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.zeros(rows // 4, columns, dtype=torch.uint8)
        tensors[f"{name}_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    settings = {**config.to_dict(), "quantization_config": {"quant_method": "bitnet"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model: Any = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path)
    assert any(name.endswith("q_proj.weight") for name, _ in model.named_buffers())
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["lm_head"]))
    assert checkpoint_buffers(model) == {}


def test_other_models_are_left_as_they_are_and_an_adapters_buffers_are_its_own() -> None:
    config = transformers.Qwen2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.Qwen2ForCausalLM(config)
    state_dict = model.state_dict()
    assert checkpoint_layout(model, state_dict) is state_dict
    assert checkpoint_buffers(model) == {}
    wrapped = get_peft_model(model, VeraConfig(target_modules=["q_proj"]))
    assert any("vera_A" in name for name, _ in wrapped.get_base_model().named_buffers())
    assert checkpoint_buffers(wrapped) == {}
