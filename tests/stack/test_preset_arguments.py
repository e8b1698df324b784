"""Every preset goes through the real argument parsing of `swift rlhf` and `swift rollout`.

    python -m tests.stack.test_preset_arguments (rlhf | rollout) NUM_RANKS OUTPUT ARGV...

parses in a process of its own. In place of the other ranks there is torch's own fake process group,
and servers are not connected to.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import swift
import yaml

from swift_grpo_ext.tools.check.settings import read_run
from tests.stack.processes import ROOT, started

pytestmark = pytest.mark.stack

PRESETS = sorted((ROOT / "examples/presets").glob("*.yaml"))


def parse(command: str, num_ranks: str, argv: list[str]) -> dict[str, Any]:
    import swift.rlhf_trainers
    from swift.cli.main import parse_yaml_args
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from swift_grpo_ext.checks import preflight, rules

    parse_yaml_args(argv)
    pipeline: Any
    # A rollout's module tells a server from a training where it is loaded: not before it is needed.
    if command == "rollout":
        from swift.pipelines.infer.rollout import SwiftRolloutDeploy as pipeline
    else:
        from swift.pipelines.train.rlhf import SwiftRLHF as pipeline

        # Each rank is taken to have a node of its own.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=num_ranks, LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        group = {"store": FakeStore(), "rank": 0, "world_size": int(num_ranks)}
        distributed.init_process_group("fake", **group)
        client = swift.rlhf_trainers.VLLMClient
        for method in ("check_server", "init_communicator", "close_communicator"):
            setattr(client, method, lambda *_, **__: None)
        client.get_engine_type = lambda self: setattr(self, "enable_lora", False)
        # It is taken to have accelerators, as presets of GPU machines let their engines sleep, and
        # what rewards need: `accuracy` a package, and a data set of its own.
        rules.has_accelerator = lambda: True
        preflight.check_rewards = lambda *args, **options: iter(())

    args = pipeline._parse_args(SimpleNamespace(args_class=pipeline.args_class), argv)
    training = getattr(args, "training_args", None)
    names = ("generation_batch_size", "steps_per_generation", "world_size")
    return {**vars(args), **{name: getattr(training, name) for name in names if training}}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_is_parsed(preset: Path, assets: Path, tmp_path: Path) -> None:
    """With the tiny model and the digits in place of its own: no network, no GPU."""
    settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
    if deepspeed := settings.pop("deepspeed", None):
        # It needs accelerators; what ms-swift would read is there all the same.
        assert (Path(swift.__file__).parent / f"config/{deepspeed}.json").is_file()
    copy, output, run = tmp_path / preset.name, tmp_path / "args.json", read_run(preset)
    copy.write_text(yaml.safe_dump(settings), encoding="utf-8")
    is_server = preset.name.endswith(".rollout.yaml")
    argv = [str(copy), "--model", str(assets / "tiny_vlm"), "--torch_dtype", "float32"]
    if "model_type" not in settings:  # the presets' own models are known by their names
        argv += ["--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"]
    if is_server:
        argv += ["--port", "0"]
    else:
        argv += ["--dataset", str(assets / "digits/train.jsonl"), "--check_model", "false"]
        argv += ["--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    how = ("rollout", "1") if is_server else ("rlhf", str(run.num_ranks))
    command = [sys.executable, "-m", "tests.stack.test_preset_arguments", *how, str(output), *argv]
    with started(command, tmp_path / "log") as running:
        finished = running.wait(300)
    assert finished.returncode == 0, finished.cause
    args = json.loads(output.read_text(encoding="utf-8"))
    assert args["external_plugins"][0] == "plugins/grpo_ext.py"
    for name in ("num_generations", "stop_words", "max_turns", "vllm_max_model_len"):
        if name in settings:
            assert args[name] == settings[name]
    if not is_server:  # our checker works batches and addresses out as ms-swift does
        assert args["world_size"] == run.num_ranks
        batch = run.batch()
        assert args["generation_batch_size"] == batch.generation_batch_size
        assert args["steps_per_generation"] == batch.steps_per_generation
        if run.has_servers:
            assert args["vllm_server_host"] == run.train("vllm_server_host")
            assert args["vllm_server_port"] == run.train("vllm_server_port")


if __name__ == "__main__":
    found = parse(sys.argv[1], sys.argv[2], sys.argv[4:])
    Path(sys.argv[3]).write_text(json.dumps(found, default=str), encoding="utf-8")
