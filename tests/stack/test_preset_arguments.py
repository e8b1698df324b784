"""Presets pass the real start of `swift rlhf` and `swift rollout`, up to template and data."""

from __future__ import annotations

from pathlib import Path

import swift
import yaml

from swift_grpo_ext.tools.sources import Side, Source, to_argv
from tests.rig.processes import ROOT
from tests.rig.starts import begun

PRESETS = sorted((ROOT / "examples/presets").glob("*.yaml"))
ELSEWHERE = ("sleep_level", "reward_funcs")
"""Settings that fail here: engines sleep on GPUs alone, and rewards want other rows."""


def here(preset: Path, assets: Path, folder: Path) -> Source:
    """Return a preset with the tiny model and the digits in place of its own."""
    settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
    if deepspeed := settings.pop("deepspeed", None):
        # DeepSpeed needs accelerators, so assert only that ms-swift has the named file.
        assert (Path(swift.__file__).parent / f"config/{deepspeed}.json").is_file()
    argv = ["--model", str(assets / "tiny_vlm"), "--torch_dtype", "float32"]
    if "model_type" not in settings:  # the presets' own models are known by their names
        argv += ["--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"]
    side: Side = "rollout" if preset.name.endswith(".rollout.yaml") else "training"
    if side == "rollout":
        argv += ["--port", "0"]
    else:
        argv += ["--dataset", str(assets / "digits/train.jsonl"), "--check_model", "false"]
        argv += ["--output_dir", str(folder / "out")]
    env = {name: str(value) for name, value in (settings.get("ENV") or {}).items()}
    return Source(side, [*to_argv(settings), *argv], env)


def test_presets_start(assets: Path, tmp_path: Path) -> None:
    """No network and no GPU is needed."""
    sources = {preset.name: here(preset, assets, tmp_path) for preset in PRESETS}
    found = begun(sources, tmp_path)
    assert not (tmp_path / "out").exists()
    for name, source in sources.items():
        errors = [
            finding.sentence
            for finding in found[name]
            if finding.level == "error" and not finding.setting.startswith(ELSEWHERE)
        ]
        assert errors == [], name
        if source.side == "training":
            texts = {finding.setting: finding.text for finding in found[name]}
            assert texts["template"].startswith("qwen2_5_vl: a turn ends with"), name
            given = source.given
            ranks = int(source.env.get("NPROC_PER_NODE", 1)) * int(source.env.get("NNODES", 1))
            steps = given.get("steps_per_generation") or given["gradient_accumulation_steps"]
            size = ranks * int(given["per_device_train_batch_size"][0]) * int(steps[0])
            expected = f"a round is {size} samples ({ranks} ranks x"
            assert texts["num_generations"].startswith(expected), name
