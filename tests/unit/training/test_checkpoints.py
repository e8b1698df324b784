"""Weights are loaded from a checkpoint, whatever names its files use (S4)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swift_grpo_ext.training.checkpoints import holds_whole_model, load_whole_model
from tests.rig.logits.models import add_lora, build


@pytest.mark.parametrize(("name", "shard_size"), [("Qwen2, tied", "1GB"), ("Qwen2.5-VL", "20KB")])
def test_every_parameter_comes_in_its_own_type(name: str, shard_size: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (shard_size == "20KB")
    assert holds_whole_model(tmp_path)
    resumed = build(name).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.add_(1.0)
    pointers = {n: p.data_ptr() for n, p in resumed.named_parameters()}
    load_whole_model(resumed, tmp_path)
    loaded, saved = resumed.state_dict(), model.to(torch.bfloat16).state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[n], saved[n]) for n in loaded)
    assert {n: p.data_ptr() for n, p in resumed.named_parameters()} == pointers, "an optimizer's"


def test_another_model_is_refused_and_adapters_are_left_to_peft(tmp_path: Path) -> None:
    build("Qwen2").save_pretrained(tmp_path)
    # Its configuration, else the vision tower would be a large one.
    build("Qwen2.5-VL").config.save_pretrained(tmp_path)
    expected = r"does not hold the weights of .*Qwen2_5_VL.* has no .*visual.*--model"
    with pytest.raises(ValueError, match=expected):
        load_whole_model(build("Qwen2.5-VL"), tmp_path)
    add_lora(build("Qwen2.5-VL")).save_pretrained(adapter := tmp_path / "adapter")
    assert not holds_whole_model(adapter)
