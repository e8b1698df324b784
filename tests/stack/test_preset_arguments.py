"""Every preset starts as the real `swift rlhf` and `swift rollout` do, up to template and data."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import swift
import yaml

from swift_grpo_ext.checks.finding import Finding
from swift_grpo_ext.tools.check.start import Job
from swift_grpo_ext.tools.sources import read_sources
from tests.stack.processes import ROOT, started

pytestmark = pytest.mark.stack

PRESETS = sorted((ROOT / "examples/presets").glob("*.yaml"))
ELSEWHERE = ("sleep_level", "reward_funcs")
"""Presets of GPU machines let their engines sleep; rewards want rows of their own."""


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_starts(preset: Path, assets: Path, tmp_path: Path) -> None:
    """With the tiny model and the digits in place of its own: no network, no GPU."""
    settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
    if deepspeed := settings.pop("deepspeed", None):
        # It needs accelerators; what ms-swift would read is there all the same.
        assert (Path(swift.__file__).parent / f"config/{deepspeed}.json").is_file()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    argv = ["--model", str(assets / "tiny_vlm"), "--torch_dtype", "float32"]
    if "model_type" not in settings:  # the presets' own models are known by their names
        argv += ["--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"]
    side = "rollout" if preset.name.endswith(".rollout.yaml") else "training"
    if side == "rollout":
        argv += ["--port", "0"]
    else:
        argv += ["--dataset", str(assets / "digits/train.jsonl"), "--check_model", "false"]
        argv += ["--output_dir", str(tmp_path / "out")]
    [source] = read_sources(tmp_path / "run.yaml", overrides=argv).values()
    job = Job(sources={side: source._replace(side=side)})
    command = [sys.executable, "-m", "swift_grpo_ext.tools.check.start", json.dumps(asdict(job))]
    with started(command, tmp_path / "log", out=tmp_path / "found") as running:
        finished = running.wait(300)
    assert finished.returncode == 0, finished.cause
    lines = (tmp_path / "found").read_text(encoding="utf-8").splitlines()
    found = [Finding(**json.loads(line)) for line in lines]
    errors = [
        f.sentence for f in found if f.level == "error" if not f.setting.startswith(ELSEWHERE)
    ]
    assert errors == []
    assert not (tmp_path / "out").exists()
    said = {finding.setting: finding.text for finding in found}
    assert said["template"].startswith("qwen2_5_vl: a turn ends with")
    if side == "training":
        ranks = int(source.env.get("NPROC_PER_NODE", 1)) * int(source.env.get("NNODES", 1))
        steps = settings.get("steps_per_generation") or settings["gradient_accumulation_steps"]
        size = ranks * settings["per_device_train_batch_size"] * steps
        assert said["num_generations"].startswith(f"a round is {size} samples ({ranks} ranks x")
