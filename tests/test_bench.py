"""Models of benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from tiny_vlm.families import FAMILIES, draw, make_config, make_family, numbering, sized
from transformers import AutoModelForImageTextToText


@pytest.mark.parametrize(
    ("family", "size", "billions"),
    [
        ("qwen2_5_vl", "3b", 3.755),
        ("qwen2_5_vl", "7b", 8.292),
        ("qwen3_5", "2b", 2.213),
        ("qwen2_5_vl", "195m", 0.192),
        ("qwen3_5", "195m", 0.201),
        ("gemma3", "195m", 0.198),
    ],
)
def test_a_size_has_so_many_parameters(family: str, size: str, billions: float) -> None:
    if not hasattr(transformers, FAMILIES[family].config["class"]):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = make_config(sized(family, size), numbering())
    model = draw(AutoModelForImageTextToText, config, "meta", torch.bfloat16)
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=5e-4)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_layers_repeat_a_pattern() -> None:
    text = sized("qwen3_5", "195m", 8).config["text_config"]
    assert text["layer_types"] == [*["linear_attention"] * 3, "full_attention"] * 2
    with pytest.raises(ValueError, match="6 layers of qwen3_5: expected a multiple of 4"):
        sized("qwen3_5", "195m", 6)
    with pytest.raises(ValueError, match=r"size 3b of qwen3_5: expected one that .* 2b"):
        sized("qwen3_5", "3b")


def test_large_models_are_drawn_as_transformers_draws_them(tmp_path: Path) -> None:
    make_family(FAMILIES["qwen2_5_vl"], tmp_path, 0, "cpu")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "model.safetensors", "pt") as f:
        weights = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    for name in ("model.embed_tokens.weight", "visual.patch_embed.proj.weight"):
        assert float(weights[name].float().std()) == pytest.approx(0.02, rel=0.05)
