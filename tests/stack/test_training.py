"""Every way of training that CPU runs support, with the real `swift`, vLLM and Qwen2.5-VL.

Each trains three steps and proves that the engine sampled with the weights that training had made:
the log-probabilities of the rollout that began at step s are those of checkpoint s, recomputed with
transformers alone, and no longer those of the model before.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from swift_grpo_ext.record.reader import read_samples
from tests.stack import policy
from tests.stack.processes import PLUGIN, Finished, rollout_server, swift
from tests.stack.rounds import client_argv

pytestmark = pytest.mark.stack

SAME = 1e-3
"""Nats. Two implementations in float32 agree to 1e-5 here; a step makes a gap of 1 and more."""

STEPS = 3
BATCH = 8  # samples in a generation batch, over all ranks


@dataclass(frozen=True)
class Mode:
    ranks: int = 1
    replicas: int = 0
    """0: colocate."""

    argv: tuple[str, ...] = field(default=())

    def environment(self, record_dir: Path) -> dict[str, str]:
        ranks = {"NPROC_PER_NODE": str(self.ranks)} if self.ranks > 1 else {}
        return {"RECORD_DIR": str(record_dir), **ranks}


LORA = ("--tuner_type", "lora", "--target_modules", "all-linear")
MODES = {
    "colocate": Mode(),
    "colocate-2-ranks": Mode(ranks=2, argv=LORA),
    "colocate-tp-2": Mode(ranks=2, argv=("--vllm_tensor_parallel_size", "2")),
    "server": Mode(replicas=1, argv=LORA),
    "server-2-replicas": Mode(ranks=2, replicas=2),
}


def train(mode: Mode, assets: Path, folder: Path, *server: str) -> Finished:
    argv = [
        *("rlhf", "examples/digits/grpo.yaml"),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(assets / "digits/train.jsonl")),
        *("--external_plugins", PLUGIN, "examples/digits/rewards.py", "tests/stack/recorder.py"),
        *("--output_dir", str(folder / "run"), "--add_version", "false"),
        *("--max_steps", str(STEPS), "--save_steps", "1", "--save_total_limit", str(STEPS)),
        *("--num_generations", "4", "--learning_rate", "2e-3", "--warmup_steps", "0"),
        *("--reward_funcs", "position", "--reward_weights", "1.0"),
        *("--per_device_train_batch_size", str(BATCH // mode.ranks)),
        *mode.argv,
        *server,
    ]
    record_dir = folder / "record"
    record_dir.mkdir()
    return swift(*argv, log=folder / "train.log", env=mode.environment(record_dir))


def train_against_server(mode: Mode, assets: Path, folder: Path) -> Finished:
    server = [
        *("--model", str(assets / "tiny_vlm"), "--external_plugins", PLUGIN),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--torch_dtype", "float32"),
        *("--vllm_max_model_len", "512", "--vllm_enforce_eager", "true"),
        *("--vllm_data_parallel_size", str(mode.replicas)),
    ]
    with rollout_server(*server, log=folder / "server.log") as port:
        return train(mode, assets, folder, *client_argv(port))


@pytest.mark.parametrize("name", MODES)
def test_engine_samples_with_the_trained_weights(name: str, assets: Path, tmp_path: Path) -> None:
    mode = MODES[name]
    run = train_against_server if mode.replicas else train
    finished = run(mode, assets, tmp_path)
    assert finished.returncode == 0, finished.cause

    records = policy.read_records(tmp_path / "record")
    assert len(records) == STEPS * BATCH
    base = assets / "tiny_vlm"
    for step in range(STEPS):
        rollout = [r for r in records if r["step"] == step]
        assert len(rollout) == BATCH
        assert all(len(r["token_ids"]) == len(r["logprobs"]) > 0 for r in rollout)
        trained = tmp_path / "run" / f"checkpoint-{step}" if step else base
        assert policy.max_logprob_gap(trained, base, rollout) < SAME
    # That would prove nothing, had training moved no weight.
    last_rollout = [r for r in records if r["step"] == STEPS - 1]
    assert policy.max_logprob_gap(base, base, last_rollout) > 5 * SAME

    recorded = json.loads((tmp_path / "run" / "args.json").read_text(encoding="utf-8"))
    assert recorded["rollout_seed_mode"] == "sample"
    assert recorded["use_cpu"] is True
    assert recorded["ignore_args_error"] is False


def test_without_vllm(assets: Path, tmp_path: Path) -> None:
    """The plugin lets ms-swift's transformers engine draw; groups with a bad row are replaced."""
    lines = (assets / "digits/train.jsonl").read_text(encoding="utf-8").splitlines()[:6]
    rows = [json.loads(line) for line in lines]
    (tmp_path / "bad.png").write_text("not an image")
    for row in rows[::2]:
        row["images"] = [str(tmp_path / "bad.png")]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    argv = [
        *("rlhf", "--rlhf_type", "grpo"),
        *("--external_plugins", PLUGIN, "examples/digits/rewards.py"),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(data)),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--torch_dtype", "float32"),
        *("--check_model", "false", "--use_vllm", "false", "--tuner_type", "full"),
        *("--reward_funcs", "digit_accuracy", "--num_generations", "4", "--max_steps", "3"),
        *("--per_device_train_batch_size", "8", "--max_completion_length", "12"),
        *("--truncation_strategy", "delete", "--max_length", "500"),
        *("--report_to", "none", "--output_dir", str(tmp_path / "run"), "--add_version", "false"),
    ]
    finished = swift(*argv, log=tmp_path / "log")
    assert finished.returncode == 0, finished.cause
    assert (tmp_path / "run/checkpoint-3/model.safetensors").is_file()
    samples = read_samples(tmp_path / "run", columns=["media"])["media"].to_pylist()
    assert len(samples) == 3 * 8
    assert all("bad.png" not in str(media) for media in samples)
    # Each of the three rows stands in an epoch of three steps, and is drawn once.
    assert finished.output.count("takes the place of the whole group") == 3
