"""`check` makes the real start, and refuses exactly what a training or a server refuses (R6).

    python -m tests.stack.test_check CASES.json FOUND.jsonl

starts runs as `check` does, up to their template and data, each forked from one process.
"""

import json
import os
import re
import shlex
import socket
import sys
import traceback
from argparse import Namespace
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
import swift as ms_swift
import yaml

from swift_grpo_ext.checks.finding import Finding
from swift_grpo_ext.tools.check.command import begin_run, describe_rounds
from swift_grpo_ext.tools.harness import begin
from swift_grpo_ext.tools.sources import Side, Source, read_sources, sources_of, to_argv
from tests.rig.checks import said
from tests.rig.processes import COMMAND, PLUGIN, ROOT, run, run_module, swift
from tests.rig.rounds import PRESET, read_lines, server_argv, write_lines

PRESETS = sorted((ROOT / "examples/presets").glob("*.yaml"))
HEALTHY = "healthy"
"""The rows of this case are encoded on both sides, too, which takes as long as several starts."""

ENDS = "`swift rlhf`: ends with"
ELSEWHERE = ("--sleep_level", "--reward_funcs")
"""Settings of presets that fail here: engines sleep on GPUs alone, and rewards want other rows."""

TRAININGS: dict[str, list[str]] = {
    # Arguments alone
    "--rollout_timeout 0.5 --seed -1 --deepspeed zero3 --streaming true --max_steps 9 "
    "--resume_from_checkpoint FOLDER --callbacks diversty --multi_turn_scheduler gym "
    "--reward_funcs acuracy --template qwen2_5_v --model_type qwen9": [
        *("--rollout_timeout", "--seed", "--deepspeed", "--streaming", "--resume_from_checkpoint"),
        *("--callbacks", "--multi_turn_scheduler", "--reward_funcs", "--template", "--model_type"),
    ],
    "--vllm_mode server --vllm_server_base_url http://me:secret@127.0.0.1:8000": [
        "`swift rlhf`: --vllm_server_base_url holds a password"
    ],
    # The model, and stops
    "--tuner_type lora --vllm_enable_lora true --use_dora true --router_replay_mode R3": [
        "--vllm_enable_lora true: vLLM does not take the adapter: vLLM does not yet support DoRA",
        "--router_replay_mode R3: expected a mixture",
    ],
    "--stop_token_ids 151936": ["--stop_token_ids 151936: 151936 is no token"],
    # Rows
    "--gradient_accumulation_steps 1000": ["--dataset FOLDER/rows.jsonl: 64 rows are fewer"],
    "--dataset FOLDER/missing.jsonl": ["--dataset: row 1 of FOLDER/missing.jsonl"],
    "--dataset FOLDER/boxes.jsonl": ["Data set FOLDER/boxes.jsonl: no row is left"],
    # ms-swift's own
    "--num_generations 7": [f"{ENDS} ValueError: generation_batch_size ("],
    f"--external_plugins {PLUGIN} FOLDER/broken.py": [f"{ENDS} ModuleNotFoundError: No module"],
    "--logit_shim off": ["Unknown argument --logit_shim"],
    "--learning_rate fast": ["Settings: argument --learning_rate"],
}
"""Arguments, and the beginnings of the errors that they cause."""

SERVERS: dict[str, list[str]] = {
    "--port TAKEN --rollout_timeout 0.5 --seed -1 --template qwen2_5_v "
    "--multi_turn_scheduler gym --vllm_use_async_engine true": [
        *("--port", "--rollout_timeout", "--seed", "--template", "--multi_turn_scheduler")
    ],
    "--api_key secret": ["`swift rollout`: --api_key is in the command line"],
    "--vllm_pipeline_parallel_size 2": ["`swift rollout`: ends with ValueError: RolloutArguments"],
}


@pytest.fixture(scope="module")
def folder(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good rows, bad rows of two kinds, and a bad plugin."""
    folder = tmp_path_factory.mktemp("check")
    question = [{"role": "user", "content": "<image>Which digit is this?"}]
    row = {"messages": question, "solution": "7", "images": [str(folder / "none.png")]}
    write_lines(folder / "missing.jsonl", [row] * 8)
    boxes = {"ref": ["digit"], "bbox": [1, 2, 3, 4]}
    write_lines(folder / "boxes.jsonl", [{**row, "objects": boxes}] * 8)
    rows = (assets / "digits/train.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "rows.jsonl").write_text("\n".join(rows[:64]))
    (folder / "broken.py").write_text("import no_such")
    return folder


def training(assets: Path, folder: Path, words: str) -> Source:
    own = ["--model", str(assets / "tiny_vlm"), "--dataset", str(folder / "rows.jsonl")]
    own += ["--external_plugins", PLUGIN, "examples/digits/rewards.py"]
    own += ["--output_dir", str(folder / "run"), *shlex.split(words)]
    return read_sources(PRESET, overrides=own)["training"]


def here(preset: Path, assets: Path, folder: Path) -> Source:
    """Return a preset with the tiny model and the digits in place of its own."""
    settings = yaml.safe_load(preset.read_text(encoding="utf-8"))
    if deepspeed := settings.pop("deepspeed", None):
        # DeepSpeed needs accelerators, so assert only that ms-swift has the named file.
        assert (Path(ms_swift.__file__).parent / f"config/{deepspeed}.json").is_file()
    argv = ["--model", str(assets / "tiny_vlm"), "--torch_dtype", "float32"]
    if "model_type" not in settings:  # the presets' own models are known by their names
        argv += ["--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl"]
    side: Side = "rollout" if preset.name.endswith(".rollout.yaml") else "training"
    if side == "rollout":
        argv += ["--port", "0"]
    else:
        argv += ["--dataset", str(assets / "digits/train.jsonl"), "--check_model", "false"]
        argv += ["--output_dir", str(folder / "run")]
    env = {name: str(value) for name, value in (settings.get("ENV") or {}).items()}
    return Source(side, [*to_argv(settings), *argv], env)


@pytest.fixture(scope="module")
def found(assets: Path, folder: Path) -> dict[str, list[Finding]]:
    """The findings of each start by its case; all are forked from one process."""
    cases = {preset.name: here(preset, assets, folder) for preset in PRESETS}
    cases[HEALTHY] = training(assets, folder, "--stop_words </answer>")
    for case, rest in (
        ("model alone", []),
        ("model with names", ["--template", "qwen2_5_vl", "--model_type", "qwen2_5_vl"]),
    ):
        given = {"model": str(assets / "tiny_vlm"), "dataset": [str(folder / "rows.jsonl")]}
        cases[case] = sources_of(Namespace(config=None, **given, rest=rest))["training"]
    cases["model of a hub"] = training(assets, folder, "--model No-Such/Model")
    cases["rows of a hub"] = training(assets, folder, "--dataset Org/rows")
    for words in TRAININGS:
        cases[words] = training(assets, folder, words.replace("FOLDER", str(folder)))
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        for words in SERVERS:
            argv = server_argv(assets, "--port", "0", *shlex.split(words.replace("TAKEN", port)))
            cases[words] = Source("rollout", argv, {})
        paths = folder / "cases.json", folder / "found.jsonl"
        paths[0].write_text(json.dumps(cases))
        run_module(__name__, *map(str, paths), log=folder / "log")
    found: dict[str, list[Finding]] = {name: [] for name in cases}
    for name, finding in read_lines(paths[1]):
        found[name].append(Finding(**finding))
    return found


def start(name: str, source: Source) -> list[Finding]:
    """Return the findings of a start."""
    findings = list[Finding]()
    try:
        if name == HEALTHY:
            begin_run({source.side: source}, findings.append)
        elif (begun := begin(source, findings.append)) and source.side == "training":
            findings += describe_rounds(begun)
    except BaseException:
        traceback.print_exc()
    return findings


def errors_of(findings: list[Finding]) -> list[str]:
    return [finding.sentence for finding in findings if finding.level == "error"]


def test_each_refusal(found: dict[str, list[Finding]], folder: Path) -> None:
    """Each fault of a start is named. Errors that follow from it come later."""
    unsaid = {}
    for words, expected in {**TRAININGS, **SERVERS}.items():
        beginnings = [text.replace("FOLDER", str(folder)) for text in expected]
        errors = errors_of(found[words])
        are_named = all(any(e.startswith(b) for e in errors) for b in beginnings)
        first = errors[: len(beginnings)]
        if not (are_named and all(e.startswith(tuple(beginnings)) for e in first)):
            unsaid[words] = said(found[words])
    assert unsaid == {}
    assert not (folder / "run").exists()


def test_presets_start(found: dict[str, list[Finding]]) -> None:
    """They pass the real start up to template and data. No network and no GPU is needed."""
    for preset in PRESETS:
        findings = found[preset.name]
        errors = errors_of(findings)
        assert [e for e in errors if not e.startswith(ELSEWHERE)] == [], preset.name
        if not preset.name.endswith(".rollout.yaml"):
            texts = {finding.setting: finding.text for finding in findings}
            assert texts["template"].startswith("qwen2_5_vl: a turn ends with"), preset.name


def test_a_start_without_a_file_and_with_names_of_hubs(found: dict[str, list[Finding]]) -> None:
    """What is not on this machine is not looked at."""
    [error] = errors_of(found["model alone"])
    assert error.startswith(f"{ENDS} ValueError: Failed to automatically match")
    for case in ("model with names", "model of a hub", "rows of a hub"):
        assert errors_of(found[case]) == [], case
    [only] = said(found["model of a hub"])
    assert only.startswith("skipped: --model No-Such/Model: is not on this machine")
    first, *_, last = said(found["rows of a hub"])
    assert first.startswith("skipped: --dataset Org/rows: is on a hub")
    assert last.startswith("ok: --template: qwen2_5_vl")


def test_a_run_that_starts(found: dict[str, list[Finding]]) -> None:
    rounds, stops, rows, lengths = said(found[HEALTHY])
    assert rounds.startswith("note: --num_generations: a round is 64 samples (1 ranks x")
    expected = "ok: --template: qwen2_5_vl: a turn ends with <|im_end|>; stop words: '</answer>'."
    assert stops == expected
    equal = "32 rows with 32 media are equal in rollout and training, in tokens and positions."
    assert rows == f"ok: --dataset: {equal}"
    assert lengths.startswith("note: --dataset: prompts have ")


def test_the_command_with_both_sides(assets: Path, folder: Path) -> None:
    """It names the errors of both sides. Each side encodes rows with its own settings."""
    (folder / "run.train.yaml").write_bytes(PRESET.read_bytes())
    rollout = dict(pairwise(server_argv(assets, "--seed", "-1", "--max_pixels", "784")))
    settings = {name[2:]: value for name, value in rollout.items() if name.startswith("--")}
    (folder / "run.rollout.yaml").write_text(yaml.safe_dump(settings))
    words = "--vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 8000"
    argv = [*("--model", settings.pop("model"), "--ranks", "2", "--", *words.split())]
    argv += ["--dataset", str(folder / "rows.jsonl"), "--output_dir", str(folder / "run")]
    command = (*COMMAND, "check", str(folder / "run"), *argv)
    finished = run(*command, log=folder / "log.check", out=folder / "out")
    output = (folder / "out").read_text(encoding="utf-8")
    assert finished.returncode == 1, output
    for line in (
        r"(ok|note): Versions: ",
        r"note: --num_generations: a round is 128 samples \(2 ranks x",
        r"error: --seed -1: expected 0 or more",
        r"error: --dataset: row \d+ of .*: the rollout saw a prompt of",
        r"Not ready \(errors: \d+, warnings: \d+\)\.$",
    ):
        assert re.search(f"^{line}", output, re.MULTILINE), output


def test_swift_prints_a_refusal_alone(assets: Path, folder: Path, tmp_path: Path) -> None:
    """A real `swift` prints no traceback, and loads no weights."""
    argv = training(assets, folder, f"--dataset {folder}/missing.jsonl").argv
    finished = swift("rlhf", *argv, log=tmp_path / "log")
    assert finished.returncode == 1
    expected = (
        r"^error: --dataset: row 1 of .*missing\.jsonl \(which asks '<image>Which digit is this\?'"
        r"\): images\[0\]: '.*none\.png' does not exist\. Correct"
    )
    assert re.search(expected, finished.output, re.MULTILINE), finished.cause
    # At the beginning of a line: ms-swift logs tracebacks of rows that it leaves out.
    assert not re.search(r"^(\[rank0\]: )?Traceback", finished.output, re.MULTILINE)
    assert "Loading weights" not in finished.output


if __name__ == "__main__":
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        if not (child := os.fork()):
            findings = start(name, Source(*case))
            with Path(sys.argv[2]).open("a") as file:
                file.writelines(json.dumps([name, asdict(each)]) + "\n" for each in findings)
            os._exit(0)
        os.waitpid(child, 0)
