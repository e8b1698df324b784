"""Every preset goes through the real argument parsing of `swift rlhf` and `swift rollout`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import swift
import yaml

from swift_grpo_ext.tools.check.settings import read_run
from tests.stack.processes import ROOT, started

pytestmark = pytest.mark.stack

PRESETS = sorted((ROOT / "examples/presets").glob("*.yaml"))
SHIPPED_BY_SWIFT = Path(swift.__file__).parent / "config"


def case(preset: Path, assets: Path, folder: Path) -> dict[str, Any]:
    """A preset with the tiny model and the digits in place of its own: no network, no GPU."""
    settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
    deepspeed = settings.get("deepspeed")
    if deepspeed:
        # It needs a package and accelerators; what ms-swift would read is there all the same.
        assert (SHIPPED_BY_SWIFT / f"{deepspeed}.json").is_file()
        del settings["deepspeed"]
    copy = folder / preset.name
    copy.write_text(yaml.safe_dump(settings), encoding="utf-8")
    argv = [str(copy), "--model", str(assets / "tiny_vlm"), "--torch_dtype", "float32"]
    if preset.name.endswith(".rollout.yaml"):
        return {"command": "rollout", "argv": [*argv, "--port", "0"], "ranks": 1}
    argv += ["--dataset", str(assets / "digits/train.jsonl"), "--check_model", "false"]
    argv += ["--output_dir", str(folder / "out"), "--max_steps", "1"]
    return {"command": "rlhf", "argv": argv, "ranks": read_run(preset).num_ranks}


@pytest.fixture(scope="module")
def results(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("presets")
    path = folder / "cases.json"
    path.write_text(json.dumps([case(p, assets, folder) for p in PRESETS]), encoding="utf-8")
    command = [sys.executable, "-m", "tests.stack.parsed", str(path)]
    with started(command, folder / "log") as running:
        finished = running.wait(900)
    assert finished.returncode == 0, finished.cause
    found = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {preset.name: result for preset, result in zip(PRESETS, found, strict=True)}


def test_every_preset_is_parsed(
    results: dict[str, dict[str, Any]], subtests: pytest.Subtests
) -> None:
    assert len(results) == len(PRESETS) >= 9
    for preset in PRESETS:
        with subtests.test(preset.name):
            result = results[preset.name]
            assert result["status"] == 0, result["output"][-3000:]
            assert "external_plugins: ['plugins/grpo_ext.py'" in result["output"]
            assert_same_batch(preset, result["args"])
            settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
            for name in ("num_generations", "stop_words", "max_turns", "vllm_max_model_len"):
                if name in settings:
                    assert result["args"][name] == settings[name]


def assert_same_batch(preset: Path, args: dict[str, Any]) -> None:
    """Our checker works batches and addresses out as ms-swift does."""
    run = read_run(preset)
    if preset.name.endswith(".rollout.yaml"):
        return
    assert args["world_size"] == run.num_ranks
    assert args["generation_batch_size"] == run.generation_batch
    assert args["steps_per_generation"] == run.steps_per_generation
    if run.has_servers:
        assert args["vllm_server_host"] == run.train("vllm_server_host")
        assert args["vllm_server_port"] == run.train("vllm_server_port")
