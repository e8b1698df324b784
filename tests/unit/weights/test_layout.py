"""The trainer sends tensors in the layout of checkpoints, which vLLM loads (M4)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, VeraConfig, get_peft_model
from tiny_vlm.families import FAMILIES, draw, make_config, merged, numbering

from swift_grpo_ext.weights.layout import checkpoint_buffers, checkpoint_layout
from tests.rig.logits.models import build

LORA = LoraConfig(target_modules=["q_proj", "lm_head"])


def model_of(name: str) -> Any:
    """Return a model with experts half as wide as the model, so that the shape of a gate and an up
    projection together would not show whether they are transposed."""
    family = FAMILIES[name]
    width = {"moe_intermediate_size": family.config["text_config"]["hidden_size"] // 2}
    changed = replace(family, config=merged(family.config, {"text_config": width}))
    kind = getattr(transformers, family.model_class)
    return draw(kind, make_config(changed, numbering()), "cpu", torch.float32)


@pytest.mark.parametrize("lora", [False, True])
def test_experts_are_transposed_and_nothing_else(lora: bool) -> None:
    model = model_of("qwen3_vl_moe")
    runtime = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent = checkpoint_layout(get_peft_model(model, LORA) if lora else model, runtime)
    experts = [name for name in runtime if ".experts." in name]
    assert len(experts) == 2 * 2
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
    model = model_of("glm4v_moe")
    expected = {n: t for n, t in model.state_dict().items() if "correction_bias" in n}
    found = checkpoint_buffers(get_peft_model(model, LORA) if lora else model)
    assert found.keys() == expected.keys() != set()
    assert all(found[name].data_ptr() == expected[name].data_ptr() for name in found)


def test_what_vllm_has_no_parameter_for_is_not_sent() -> None:
    """These are the packed layers of a quantized model, an adapter's own buffers, and AdaLoRA's
    numbers of ranks: ms-swift leaves out only names with an adapter's prefix."""
    model = build("Qwen2")
    state_dict = model.state_dict()
    ranks = {"model.layers.0.self_attn.q_proj.ranknum.default": torch.ones(1)}
    assert checkpoint_layout(model, state_dict | ranks) == state_dict
    assert checkpoint_buffers(model) == {}
    wrapped = get_peft_model(build("Qwen2"), VeraConfig(target_modules=["q_proj"]))
    assert any("vera_A" in name for name, _ in wrapped.get_base_model().named_buffers())
    assert checkpoint_buffers(wrapped) == {}
    projection = "model.layers.0.self_attn.q_proj"
    for path in ("", projection):
        model.get_submodule(path).register_buffer("qweight", torch.zeros(2))
    wrapped = get_peft_model(model, LORA)
    assert checkpoint_buffers(wrapped).keys() == {"qweight", f"{projection}.qweight"}
    model.is_quantized = True  # as `from_pretrained` marks it
    assert checkpoint_buffers(wrapped) == {}
