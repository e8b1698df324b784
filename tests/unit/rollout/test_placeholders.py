"""Placeholder tokens of media have no probability in training, in any loss (M2)."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from swift_grpo_ext.rollout.placeholders import mask_models, mask_placeholders
from swift_grpo_ext.upstream.placeholders import placeholder_ids

VOCAB, MASKED = 64, [3, 7]
OTHERS = [i for i in range(VOCAB) if i not in MASKED]


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2)
    sizes |= dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_hidden_layers=1, **sizes))


def test_ids_of_a_template_and_a_configuration() -> None:
    """Gemma3's processor and model name different tokens. vLLM refuses requests that ban a token
    outside the vocabulary. Training of an omni model fails if a completion ends with the start of
    a medium (transformers 5.19, `get_rope_index`)."""

    def ids(placeholder_tokens: list[Any], **fields: Any) -> list[int]:
        return placeholder_ids(SimpleNamespace(placeholder_tokens=placeholder_tokens, **fields))

    assert ids([9, 4, None, "<x>", 4, -100]) == [4, 9]
    text = SimpleNamespace(vocab_size=20)
    named = {"boi_token_index": 8, "image_token_index": 12, "audio_token_id": 20, "eos_token_id": 3}
    starts = {"audio_start_token_id": 15, "vision_start_token_id": 16}
    config = SimpleNamespace(**named, **starts, text_config=text)
    assert ids([9], config=config) == [8, 9, 12]
    assert ids([], config=SimpleNamespace(thinker_config=config)) == [8, 12, 15, 16]


def test_all_models_are_masked(model: Qwen2ForCausalLM, warnings: list[str]) -> None:
    """A model of images that names no placeholder gets a warning."""
    reference = copy.deepcopy(model)
    loss = lambda *, lin_weight, bias: bias  # noqa: E731
    trainer: Any = SimpleNamespace(model=model, ref_model=reference, teacher_model=None)
    trainer.use_liger_loss, trainer.liger_grpo_loss = True, loss
    template: Any = SimpleNamespace(placeholder_tokens=[3])
    mask_models(trainer, template)
    for masked in (model, reference):
        assert masked(torch.tensor([[1, 2]])).logits[..., 3].max() < -1e29
    for dtype, bias in ((torch.float32, None), (torch.bfloat16, torch.ones(VOCAB))):
        weight = torch.zeros(VOCAB, 2, dtype=dtype)
        biased = trainer.liger_grpo_loss(lin_weight=weight, bias=bias)
        assert (biased < -1e29).nonzero().tolist() == [[3]]
        assert biased[4] == (bias is not None)
    assert warnings == []
    trainer.model, trainer.liger_grpo_loss = torch.nn.Linear(2, 2), loss
    bare: Any = SimpleNamespace(placeholder_tokens=[])
    bare.model_meta = SimpleNamespace(is_multimodal=True)
    mask_models(trainer, bare)
    assert "names no output embedding and no placeholder of media" in warnings[0]
    assert trainer.liger_grpo_loss is loss


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-6, 2.0])
def test_the_softmax_is_over_the_others(
    model: Qwen2ForCausalLM, lora: bool, dtype: torch.dtype, temperature: float
) -> None:
    model = model.to(dtype)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if lora else model
    ids_BT = torch.randint(VOCAB, (2, 5))
    full = wrapped(ids_BT).logits.detach()
    mask_placeholders(wrapped, MASKED)
    logits = wrapped(ids_BT).logits
    assert torch.equal(logits[..., OTHERS], full[..., OTHERS])
    probs = (logits / temperature).softmax(-1)
    assert probs[..., MASKED].abs().max() == 0
    entropy = -(probs * (logits / temperature).log_softmax(-1)).sum(-1)
    entropy.sum().backward()
    gradients = [p.grad for p in wrapped.parameters() if p.grad is not None]
    assert gradients
    assert all(each.isfinite().all() for each in (entropy, *gradients))
