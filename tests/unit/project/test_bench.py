"""The bench of whole steps: its models, and its settings for a GPU, checked without one."""

from __future__ import annotations

import dataclasses
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from swift.arguments import RLHFArguments
from tiny_vlm.families import FAMILIES, draw, make_config, make_family, numbering, sized
from transformers import AutoModelForImageTextToText

from scripts.bench.measure import Measures, interleave
from swift_grpo_ext.flags import ExtFlags
from tests.conftest import ROOT


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command's module; it imports others of its folder."""
    monkeypatch.syspath_prepend(ROOT / "scripts/bench")
    import step

    return step


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


def arguments(step: Any, *words: str) -> dict[str, list[str]]:
    """Return the values of each flag of a training's command line. The last occurrence counts."""
    options = step.parse(step.GPU, ["--size", "3b", *words])
    options.model = Path("/model")
    argv = step.swift_argv("ours", options, step.GPU, Path("/rows.jsonl"), 256)
    found: dict[str, list[str]] = {}
    for word in argv[3:]:
        if word.startswith("--"):
            name = word.removeprefix("--")
            found[name] = []
        else:
            found[name].append(word)
    return found


def test_a_gpu_is_asked_for_what_pays_there(step: Any) -> None:
    options = step.parse(step.GPU, [])
    assert (options.image_sides, options.max_tokens) == ((1024,), (256, 1024))
    flags = arguments(step)
    known = {f.name for cls in (RLHFArguments, ExtFlags) for f in dataclasses.fields(cls)}
    assert flags.keys() <= known
    graphs = json.loads(flags["vllm_engine_kwargs"][0])["compilation_config"]
    assert (graphs["mode"], graphs["cudagraph_mode"]) == (0, "FULL_DECODE_ONLY")
    assert graphs["cudagraph_capture_sizes"] == [8, 16, 24, 32]
    assert "vllm_enforce_eager" not in flags
    assert flags["torch_dtype"] == ["bfloat16"]
    assert flags["sleep_level"] == ["1"]
    assert flags["gradient_checkpointing"] == ["true"]
    assert "use_cpu" not in flags
    eager = arguments(step, "--eager", "--", "--attn_impl", "eager")
    assert (eager["vllm_enforce_eager"], eager["attn_impl"]) == (["true"], ["eager"])
    assert "vllm_engine_kwargs" not in eager


@pytest.mark.parametrize(
    ("device", "words", "message"),
    [
        ("CPU", "--size 3b", "--size 3b: torch finds no GPU. Use --size 195m"),
        ("GPU", "--size 3b --family qwen3_5", "--size 3b: qwen3_5 has 195m and 2b"),
        ("GPU", "--size 3b --model m", "--model has its own size"),
        ("CPU", "--layers 8 --model m", "--model has its own size"),
        ("CPU", "--steps 2", "--steps 2: expected at least 3; two warm up"),
    ],
)
def test_what_cannot_be_is_refused(
    step: Any, device: str, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        step.parse(getattr(step, device), words.split())
    assert message in capsys.readouterr().err


def test_ways_take_turns_in_an_order_that_rotates() -> None:
    turns: list[tuple[str, int]] = []

    def turn(way: str, seconds: float, repetition: int) -> Measures:
        time.sleep(seconds)
        turns.append((way, repetition))
        return {"seconds": float(repetition)}

    found = interleave({way: partial(turn, way, 0.0) for way in "ab"}, 2, "turns")
    assert turns == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert found == {way: [{"seconds": 1.0}, {"seconds": 2.0}] for way in "ab"}
    # Without time for more, the repetition that warms up counts.
    found = interleave({"a": partial(turn, "a", 0.02)}, 2, "turns", max_seconds=0.01)
    assert found == {"a": [{"seconds": 0.0}]}
