"""Runs where `import transformers` gives 4.48.3, whose models spell the keyword otherwise, or not.

    PYTHONPATH=FOLDER_OF_4.48.3:scripts python -m tests.stack.old_transformers

Real Qwen2 (`num_logits_to_keep`; swallows `logits_to_keep`) and Qwen2-VL (neither): fails where
values, gradients or the positions that are computed are not right, and prints one line of JSON.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

from swift_grpo_ext.logits.shim import LogitsShim
from swift_grpo_ext.tools.selftest.peak import peak_bytes
from tests.logits.compare import assert_close, counted_positions, values_and_gradients

VOCABULARY, LENGTH, KEPT = 32_768, 1024, 65
IMAGE, VISION_START, VISION_END = 151, 153, 154
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


def qwen2() -> tuple[Any, dict[str, Any]]:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**TEXT))
    return model, {"input_ids": torch.randint(3, 150, (1, LENGTH))}


def qwen2_vl() -> tuple[Any, dict[str, Any]]:
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(
        **TEXT,
        vision_config=vision,
        rope_scaling={"type": "mrope", "mrope_section": [4, 2, 2]},
        image_token_id=IMAGE,
        video_token_id=152,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    input_ids = torch.randint(3, 150, (1, LENGTH))
    image = torch.tensor([VISION_START, *[IMAGE] * 4, VISION_END])
    input_ids[0, : len(image)] = image
    pixels = {"pixel_values": torch.randn(16, 1176), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    attention_mask = torch.ones_like(input_ids)
    # Without them, a second forward of this version takes the first one's for a text's.
    position_ids, _ = model.get_rope_index(
        input_ids, pixels["image_grid_thw"], attention_mask=attention_mask
    )
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    return model, {**inputs, "position_ids": position_ids, **pixels}


def check(name: str, *, lora: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, inputs = {"Qwen2": qwen2, "Qwen2-VL": qwen2_vl}[name]()
    if lora:
        adapter = LoraConfig(target_modules=["q_proj"], lora_dropout=0.0, init_lora_weights=False)
        model = get_peft_model(model, adapter)
    model.train()
    mask = torch.zeros_like(inputs["input_ids"], dtype=torch.bool)
    mask[:, -KEPT:] = True
    targets = inputs["input_ids"].roll(-1, 1)[mask]
    shim = LogitsShim(model, strict=True)

    def all_logits() -> Tensor:
        return model(**inputs).logits[:, -KEPT:]

    def last_logits() -> Tensor:
        return shim.last(model, inputs, KEPT).logits

    def logps(chunk_size: int) -> Tensor:
        return shim.logps(model, inputs, mask, targets, chunk_size=chunk_size).logps_N

    def all_logps() -> Tensor:
        return all_logits()[0].log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    assert_close(values_and_gradients(model, last_logits), values_and_gradients(model, all_logits))
    expected = values_and_gradients(model, all_logps)
    for chunk_size in (0, 8):
        assert_close(values_and_gradients(model, lambda n=chunk_size: logps(n)), expected)
    with torch.no_grad(), counted_positions(model) as counts:
        last_logits()
    with torch.no_grad():
        new_spelling = model(**inputs, logits_to_keep=KEPT).logits if name == "Qwen2" else None
    return {
        "way": shim.way,
        "positions": counts,
        "peak_all": peak_bytes(lambda: all_logps().sum().backward()),
        "peak_ours": peak_bytes(lambda: logps(0).sum().backward()),
        "positions_by_new_spelling": None if new_spelling is None else new_spelling.shape[1],
    }


if __name__ == "__main__":
    results = {
        f"{name}{', LoRA' if lora else ''}": check(name, lora=lora)
        for name in ("Qwen2", "Qwen2-VL")
        for lora in (False, True)
    }
    version = {"version": transformers.__version__, "length": LENGTH, "kept": KEPT}
    print(json.dumps({**version, "results": results}))
