"""What settings name is looked up here: keys' values, files, registries, packages, GPUs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from swift_grpo_ext.checks.finding import Findings
from swift_grpo_ext.tools.check import lookup
from swift_grpo_ext.tools.check.settings import Run
from swift_grpo_ext.tools.cli import main

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = str(ROOT / "plugins/grpo_ext.py")


def said(findings: Findings) -> list[str]:
    return [str(finding) for finding in findings]


def run_of(**training: Any) -> Run:
    return Run(training={"rlhf_type": "grpo", **training})


# --- names ---


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reward_funcs": ["acuracy"]}, "reward_funcs acuracy: .*Did you mean accuracy?"),
        ({"reward_funcs": ["format", "zzz"]}, "reward_funcs zzz: .*Known: .*repetition"),
        ({"callbacks": ["diversty"]}, "callbacks diversty: .*Did you mean diversity?"),
        ({"reward_model_plugin": ["defualt"]}, "reward_model_plugin defualt: .*mean default?"),
        ({"multi_turn_scheduler": "gym_schedular"}, "multi_turn_scheduler gym_sch.*gym_scheduler?"),
    ],
)
def test_names_that_nobody_registers(settings: dict[str, Any], expected: str) -> None:
    [finding] = lookup.check_names(run_of(**settings))
    assert finding.level == "error"
    before, _, after = expected.partition(".*")
    assert str(finding).startswith(f"error: {before.strip()}"), finding
    assert after.rpartition(".*")[2] in str(finding)


def test_names_that_are_registered() -> None:
    settings = {"reward_funcs": ["accuracy", "format"], "callbacks": ["diversity"]}
    assert said(lookup.check_names(run_of(**settings, external_plugins=[PLUGIN]))) == []


def test_names_that_a_plugin_registers(tmp_path: Path) -> None:
    plugin = tmp_path / "own_rewards.py"
    plugin.write_text("from swift.rewards import orms\norms['looked_up'] = object\n")
    run = run_of(reward_funcs=["looked_up"], external_plugins=[PLUGIN])
    assert "looked_up" in said(lookup.check_names(run))[0]
    run = run_of(reward_funcs=["looked_up"], external_plugins=[PLUGIN, str(plugin)])
    assert said(lookup.check_names(run)) == []


def test_a_scheduler_of_the_servers_alone() -> None:
    run = Run(training={}, rollout={"multi_turn_scheduler": "none_such"})
    assert "multi_turn_scheduler none_such" in said(lookup.check_names(run))[0]
    run = Run(training={}, rollout={"multi_turn_scheduler": "gym_scheduler"})
    assert said(lookup.check_names(run)) == []


def test_plugins_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("import no_such_module")
    rewards = ["registered_there"]  # nothing is said of it
    run = run_of(reward_funcs=rewards, external_plugins=["none.py", "broken.py", "none.py"])
    missing, broken = said(lookup.check_names(run))
    assert f"external_plugins none.py: there is no such file in {tmp_path}." in missing
    assert "broken.py: cannot be imported (ModuleNotFoundError: No module named" in broken


# --- data and model ---


def test_data_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    Path("rows.jsonl").touch()
    Path("folder").mkdir()
    Path("ms/datasets/Org/data").mkdir(parents=True)
    there = ["rows.jsonl", "rows.jsonl#10", str(tmp_path / "rows.jsonl"), "folder", "Org/data"]
    assert said(lookup.check_data(run_of(dataset=there))) == []
    for name in ("none.jsonl", "none.json#5", "/none", "./none", "~/none", "a/none.parquet"):
        [text] = said(lookup.check_data(run_of(dataset=[name])))
        assert text.startswith(f"error: dataset {name}: there is no such file in {tmp_path}")
    [text] = said(lookup.check_data(run_of(val_dataset=["none.csv"])))
    assert text.startswith("error: val_dataset none.csv:")
    [text] = said(lookup.check_data(run_of(dataset=["Org/other"])))
    assert text == "note: dataset Org/other: is no file here, so it is taken for a hub id."
    assert said(lookup.check_data(Run())) == []


@pytest.mark.parametrize(
    ("model", "parallel", "expected"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8, "8 does not divide the 28 attention .* one of 1, 2, 4."),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 4, None),
        ("Qwen/Qwen2.5-VL-32B-Instruct", 5, "the 16 of its vision tower: take one of 1, 2, 4, 8."),
        ("Org/unknown", 7, None),
        (None, 7, None),
    ],
)
def test_heads_of_known_models(model: str | None, parallel: int, expected: str | None) -> None:
    run = Run(rollout={"model": model, "vllm_tensor_parallel_size": parallel})
    found = said(lookup.check_heads(run.arguments("rollout")))
    assert len(found) == (expected is not None)
    for part in (expected or "").split(" .* "):
        assert not found or part in found[0]


@pytest.mark.parametrize(
    ("config", "parallel", "fits"),
    [
        ({"num_attention_heads": 6}, 3, True),
        ({"num_attention_heads": 6}, 4, False),
        ({"num_attention_heads": 6}, 1, True),
        ({"text_config": {"num_attention_heads": 6}, "num_attention_heads": 4}, 4, False),
        ({"model_type": "qwen2_vl", "vision_config": {"num_heads": 4}}, 3, False),
        ({"model_type": "other_vl", "vision_config": {"num_heads": 4}}, 3, True),
    ],
)
def test_heads_of_a_model_that_is_here(
    config: dict[str, Any], parallel: int, fits: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = Run(rollout={"model": str(tmp_path), "vllm_tensor_parallel_size": parallel})
    assert (said(lookup.check_heads(run.arguments("rollout"))) == []) is fits


# --- packages ---


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (
            {"reward_funcs": ["accuracy", "format"]},
            ["reward_funcs accuracy: needs the package math_"],
        ),
        ({"reward_funcs": ["cosine"]}, ["reward_funcs cosine: needs the package math_verify"]),
        ({"deepspeed": "zero3"}, ["deepspeed: needs the package deepspeed"]),
        ({"report_to": ["wandb", "none"]}, ["report_to wandb: needs the package wandb"]),
        ({"attn_impl": "flash_attn"}, ["attn_impl flash_attn: needs the package flash_attn"]),
        ({"use_liger_kernel": True}, ["use_liger_kernel: needs the package liger_kernel"]),
        ({"reward_funcs": ["format"], "deepspeed": None}, []),
    ],
)
def test_packages_that_settings_need(
    settings: dict[str, Any], missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = said(lookup.check_packages(run_of(**settings)))
    assert len(found) == len(missing)
    for text, start in zip(found, missing, strict=True):
        assert text.startswith(f"error: {start}")
        assert "which is not installed. pip install " in text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert said(lookup.check_packages(run_of(**settings))) == []


def test_a_reward_of_ones_own_by_that_name_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from swift.rewards import orms

    monkeypatch.setitem(orms, "accuracy", type("Own", (), {}))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert said(lookup.check_packages(run_of(reward_funcs=["accuracy"]))) == []
    assert said(lookup.check_packages(Run(rollout={}))) == []


# --- GPUs ---


def gpus(run: Run, present: int, named: list[str] | None = None) -> list[str]:
    return said(lookup.check_gpus(run, named, present))


def test_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    training = {"ENV": {"CUDA_VISIBLE_DEVICES": "2,3", "NPROC_PER_NODE": 2}}
    run = Run(training=training, rollout={"ENV": {"CUDA_VISIBLE_DEVICES": "0,1"}})
    assert gpus(run, 4) == []
    [text] = gpus(run, 3)
    assert "error: CUDA_VISIBLE_DEVICES: GPUs 3 are to be used, and this machine has 3" in text
    [text] = gpus(run, 0)
    assert "GPUs 2, 3, 0, 1 are to be used, and torch sees none" in text
    assert "swift-grpo-ext init cpu-run --preset cpu_2x6" in text
    assert gpus(run, 3, ["0", "2"]) == []
    assert "GPUs 5 are" in gpus(run, 3, ["0", "5"])[0]
    assert gpus(run, 0, []) == []  # for CPU
    assert gpus(run, 2, ["GPU-8932f937"]) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # ENV gives way to the shell
    assert gpus(run, 0) == []


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    run = Run(training={"ENV": {"NPROC_PER_NODE": "4"}})
    assert gpus(run, 4) == gpus(run, 0) == []
    assert "NPROC_PER_NODE: 4 processes, and this machine has 3 GPUs" in gpus(run, 3)[0]
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    assert gpus(run, 3) == []
    served = {"vllm_data_parallel_size": 2, "vllm_tensor_parallel_size": 2}
    [text] = gpus(Run(rollout=served), 3)
    assert "vllm_data_parallel_size: 4 processes, and this machine has 3 GPUs" in text
    assert gpus(Run(rollout=served), 4) == []


# --- the command ---


def test_check_refuses_what_a_new_user_mistypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each passed before, and failed when servers were up (issue 16)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("swift.utils.get_device_count", lambda: 0)
    lines = ["rlhf_type: grpo", f"external_plugins: [{PLUGIN}]", "num_generations: 2"]
    lines += ["per_device_train_batch_size: 2", 'eval_strategy: "no"']
    config = tmp_path / "run.yaml"

    def check(*more: str) -> list[str]:
        config.write_text("\n".join([*lines, *more]))
        status = main(["check", "--quiet", str(config)])
        found = [f"{line.strip()}" for line in capsys.readouterr().out.splitlines()[1:]]
        assert status == any(line.startswith("error") for line in found)
        return found

    own = ["reward_funcs: format", "model: Org/model", "dataset: Org/data"]
    assert check(*own) == []
    [text] = check(*own, "num_generation: 8")
    assert "did you mean num_generations?" in text
    [text] = check(*own, "diversity_acton: warn")
    assert "did you mean diversity_action?" in text
    assert "Did you mean accuracy?" in check("reward_funcs: acuracy", *own[1:])[0]
    assert "model ./none: there is no such" in check(own[0], "model: ./none", own[2])[0]
    assert "dataset rows.jsonl: there is no" in check(*own[:2], "dataset: rows.jsonl")[0]
    assert "diversity_alarm_p 2.0: expected" in check(*own, "diversity_alarm_p: 2")[0]
    [text] = check(*own, "ENV: {CUDA_VISIBLE_DEVICES: '0,1'}")
    assert "GPUs 0, 1 are to be used" in text
    assert main(["check", "--settings-only", "--quiet", str(config)]) == 0
