"""The trainer sends tensors in the layout of checkpoints, which vLLM loads (M4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, VeraConfig, get_peft_model

from swift_grpo_ext.weights.layout import checkpoint_buffers, checkpoint_layout

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
MOE = {
    **{"num_experts_per_tok": 1, "moe_intermediate_size": 8, "num_key_value_heads": 1},
    **{"intermediate_size": 16},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    **{"out_hidden_size": 16, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
}
LORA = LoraConfig(target_modules=["q_proj", "lm_head"])


def qwen() -> Any:
    config = transformers.Qwen2Config(**SMALL, num_hidden_layers=1, tie_word_embeddings=False)
    return transformers.Qwen2ForCausalLM(config)


def qwen_moe() -> Any:
    """Here twice the experts' width is the hidden size, so shapes alone would not decide."""
    text = {**SMALL, **MOE, "num_hidden_layers": 1, "num_experts": 2, "rope_scaling": ROPE}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=VISION)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


@pytest.mark.parametrize("lora", [False, True])
def test_experts_are_transposed_and_nothing_else(lora: bool) -> None:
    model = qwen_moe()
    runtime = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent = checkpoint_layout(get_peft_model(model, LORA) if lora else model, runtime)
    experts = [name for name in runtime if ".experts." in name]
    assert len(experts) == 2
    for name, tensor in runtime.items():
        expected = tensor.transpose(1, 2) if name in experts else tensor
        assert torch.equal(sent[name], expected)
        assert sent[name].data_ptr() == tensor.data_ptr()  # copies of 30B weights take 57 GB
    # `from_pretrained` may have read the model's files by other conversions.
    model._weight_conversions = []
    assert checkpoint_layout(model, runtime) == runtime


@pytest.mark.parametrize("lora", [False, True])
def test_a_routers_bias_is_sent(lora: bool) -> None:
    """vLLM has it as a parameter; frequencies are in no file."""
    config = transformers.Glm4MoeConfig(**SMALL, **MOE, n_routed_experts=4, num_hidden_layers=2)
    model = transformers.Glm4MoeForCausalLM(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = model.state_dict()[name]
    wrapped = get_peft_model(model, LORA) if lora else model
    [(found, buffer)] = checkpoint_buffers(wrapped).items()
    assert found == name
    assert buffer.data_ptr() == bias.data_ptr()


def test_what_vllm_has_no_parameter_for_is_not_sent() -> None:
    """These are the packed layers of a quantized model, an adapter's own buffers, and AdaLoRA's
    numbers of ranks: ms-swift leaves out only names with an adapter's prefix."""
    model = qwen()
    state_dict = model.state_dict()
    ranks = {"model.layers.0.self_attn.q_proj.ranknum.default": torch.ones(1)}
    assert checkpoint_layout(model, state_dict | ranks) == state_dict
    assert checkpoint_buffers(model) == {}
    wrapped = get_peft_model(qwen(), VeraConfig(target_modules=["q_proj"]))
    assert any("vera_A" in name for name, _ in wrapped.get_base_model().named_buffers())
    assert checkpoint_buffers(wrapped) == {}
    projection = "model.layers.0.self_attn.q_proj"
    for path in ("", projection):
        model.get_submodule(path).register_buffer("qweight", torch.zeros(2))
    wrapped = get_peft_model(model, LORA)
    assert checkpoint_buffers(wrapped).keys() == {"qweight", f"{projection}.qweight"}
    model.is_quantized = True  # as `from_pretrained` marks it
    assert checkpoint_buffers(wrapped) == {}
