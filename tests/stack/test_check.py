"""`check` makes the real start, and refuses exactly what a training or a server refuses."""

from __future__ import annotations

import json
import re
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swift_grpo_ext.checks.finding import Finding
from swift_grpo_ext.tools.check.command import MODULE
from swift_grpo_ext.tools.check.glance import check_sources
from swift_grpo_ext.tools.sources import Source, read_sources, sources_of
from tests.rig.processes import COMMAND, PLUGIN, started
from tests.rig.rounds import PRESET, server_argv, write_lines
from tests.rig.starts import begun

LORA = ("--tuner_type", "lora", "--vllm_enable_lora", "true")
ADAPTER = "--vllm_enable_lora true: vLLM does not take the adapter"
URL = "http://me:secret@127.0.0.1:8000"
SERVED = ("--vllm_mode", "server", "--vllm_server_host", "127.0.0.1", "--vllm_server_port", "8000")
REWARDS = """
from swift.rewards import ORM, orms

class One(ORM):
    def __call__(self, completions, **kwargs):
        return 1.0

class Narrow(ORM):
    def __call__(self, completions):
        return [1.0] * len(completions)

class Odd(ORM):
    def __init__(self):
        pass

orms.update(one=One, narrow=Narrow, odd=Odd)
"""

TRAININGS: dict[str, tuple[str, ...]] = {
    # Ranges and what does not go together
    "--rollout_timeout 0.5: expected": ("--rollout_timeout", "0.5"),
    "--tool_timeout 0.0: expected": ("--tool_timeout", "0"),
    "--sample_log_gb -1.0: expected": ("--sample_log_gb", "-1"),
    "--seed -1: expected": ("--seed", "-1"),
    "--streaming true: expected": ("--streaming", "true", "--max_steps", "9"),
    "--sleep_level 1: needs accelerators": ("--sleep_level", "1"),
    "--deepspeed zero3: needs accelerators": ("--deepspeed", "zero3"),
    "--fsdp fsdp2: needs accelerators": ("--fsdp", "fsdp2"),
    "--tuner_type adapter: adds parts": ("--tuner_type", "adapter"),
    f"{ADAPTER}: vLLM does not yet support DoRA": (*LORA, "--use_dora", "true"),
    f"{ADAPTER}: vLLM only supports modules_to_save": (*LORA, "--modules_to_save", "merger"),
    "--resume_from_checkpoint {folder}: is no whole": ("--resume_from_checkpoint", "{folder}"),
    "--router_replay_mode R3: does not go with --torch_compile": (
        *("--router_replay_mode", "R3", "--torch_compile", "true"),
    ),
    "--router_replay_mode R3: expected a mixture": ("--router_replay_mode", "R3"),
    "`swift rlhf`: --vllm_server_base_url holds a password": (
        *("--vllm_mode", "server", "--vllm_server_base_url", URL),
    ),
    # Names
    "--callbacks diversty: is registered": ("--callbacks", "diversty"),
    "--multi_turn_scheduler gym: is registered": ("--multi_turn_scheduler", "gym"),
    "--reward_model_plugin zzz: is registered": ("--reward_model_plugin", "zzz"),
    "--reward_funcs acuracy: is registered": ("--reward_funcs", "acuracy"),
    "--template qwen2_5_v: is registered": ("--template", "qwen2_5_v"),
    "--model_type qwen9: is registered": ("--model_type", "qwen9"),
    # Rounds
    "--dataset {rows}: 512 rows are fewer": ("--gradient_accumulation_steps", "1000"),
    "--val_dataset: 512 rows make no batch": (
        *("--val_dataset", "{rows}", "--eval_strategy", "steps"),
        *("--per_device_eval_batch_size", "8000"),
    ),
    # Stops, tokens and the model
    "--stop_words holds an empty string": ("--stop_words", ""),
    "--stop_token_ids 151936: 151936 is no token": ("--stop_token_ids", "151936"),
    "--new_special_tokens": ("--new_special_tokens", *(f"<new{i}>" for i in range(500))),
    "--vllm_speculative_config": ("--vllm_engine_kwargs", '{{"speculative_config": {{"a": 1}}}}'),
    # Rows and rewards
    "--dataset: row 1 of {folder}/missing.jsonl": ("--dataset", "{folder}/missing.jsonl"),
    "Data set {folder}/boxes.jsonl: no row is left": ("--dataset", "{folder}/boxes.jsonl"),
    "--reward_funcs digit_accuracy: does not fit ms-swift's call: missing a required": (
        *("--dataset", "{folder}/renamed.jsonl"),
    ),
    "--reward_funcs: is missing": ("-reward_funcs",),  # a minus leaves the setting out
    "--reward_funcs accuracy: ms-swift cannot make it": ("--reward_funcs", "accuracy"),
    "--reward_funcs one: returned": ("--reward_funcs", "one"),
    "--reward_funcs narrow: does not fit ms-swift's call: got": ("--reward_funcs", "narrow"),
    "--reward_funcs odd: ms-swift cannot make it": ("--reward_funcs", "odd"),
    # ms-swift's own
    "`swift rlhf`: ends with ValueError: generation_batch_size (": ("--num_generations", "7"),
    "`swift rlhf`: ends with ValueError: num_generations must be": ("--num_generations", "1"),
    "`swift rlhf`: ends with ValueError: GRPO requires": ("--truncation_strategy", "split"),
    "`swift rlhf`: ends with AssertionError: async generate": ("--async_generate", "true"),
    "`swift rlhf`: ends with ModuleNotFoundError: No module named 'no_such'": (
        *("--external_plugins", PLUGIN, "{folder}/broken.py"),
    ),
    "Unknown argument --logit_shim": ("--logit_shim", "off"),
    "Settings: argument --learning_rate": ("--learning_rate", "fast"),
    "Settings: argument --reward_funcs": ("--reward_funcs",),
}
"""The beginning of each refusal, and the arguments that cause it."""

SERVERS: dict[str, tuple[str, ...]] = {
    "--port {taken}: is in use": ("--port", "{taken}"),
    "--rollout_timeout 0.5: expected": ("--rollout_timeout", "0.5"),
    "--seed -1: expected": ("--seed", "-1"),
    "`swift rollout`: --api_key is in the command line": ("--api_key", "secret"),
    "--multi_turn_scheduler gym: is registered": (
        *("--multi_turn_scheduler", "gym", "--vllm_use_async_engine", "true"),
    ),
    "--template qwen2_5_v: is registered": ("--template", "qwen2_5_v"),
    "--vllm_speculative_config": ("--vllm_speculative_config", '{{"a": 1}}'),
    "`swift rollout`: ends with ValueError: RolloutArguments does not support": (
        *("--vllm_pipeline_parallel_size", "2"),
    ),
}


@pytest.fixture(scope="module")
def folder(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good rows and plugins, and with bad ones of each kind."""
    folder = tmp_path_factory.mktemp("check")
    question = [{"role": "user", "content": "<image>Which digit is this?"}]
    row = {"messages": question, "solution": "7", "images": [str(folder / "none.png")]}
    write_lines(folder / "missing.jsonl", [row] * 8)
    boxes = {"ref": ["digit"], "bbox": [1, 2, 3, 4]}
    write_lines(folder / "boxes.jsonl", [{**row, "objects": boxes}] * 8)
    rows = (assets / "digits/train.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n".join(rows)
    (folder / "rows.jsonl").write_text(text)
    (folder / "renamed.jsonl").write_text(text.replace('"solution"', '"answer"'))
    (folder / "broken.py").write_text("import no_such")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def training(assets: Path, folder: Path, *argv: str) -> Source:
    own = ["--model", str(assets / "tiny_vlm"), "--dataset", str(folder / "rows.jsonl")]
    own += ["--external_plugins", PLUGIN, "examples/digits/rewards.py", str(folder / "rewards.py")]
    own += ["--output_dir", str(folder / "run")]
    more = [word for word in argv if not re.match(r"-\w+_", word)]
    source = read_sources(PRESET, overrides=[*own, *more])["training"]
    for name in (word.removeprefix("-") for word in argv if word not in more):
        start = source.argv.index(f"--{name}")
        del source.argv[start : start + 1 + len(source.given[name])]
    return source


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def test_each_refusal(assets: Path, folder: Path) -> None:
    """The first error of a case is the expected one."""
    with taken_port() as port:
        names = {"folder": str(folder), "rows": str(folder / "rows.jsonl"), "taken": port}
        cases = {"training ": training(assets, folder)}
        for expected, argv in TRAININGS.items():
            words = [word.format(**names) for word in argv]
            cases[f"training {expected.format(**names)}"] = training(assets, folder, *words)
        for expected, argv in SERVERS.items():
            words = server_argv(assets, "--port", "0", *(word.format(**names) for word in argv))
            cases[f"server {expected.format(**names)}"] = Source("rollout", words, {})
        found = begun(cases, folder)
    # A training that starts
    assert [finding.level for finding in found.pop("training ")] == ["note", "ok"]
    unsaid = {}
    for case, findings in found.items():
        errors = [finding.sentence for finding in findings if finding.level == "error"]
        if not (errors and errors[0].startswith(case.partition(" ")[2])):
            unsaid[case] = [f"{finding.level}: {finding.sentence}" for finding in findings]
    assert unsaid == {}
    assert not (folder / "run").exists()


def test_a_run_that_starts(assets: Path, folder: Path, tmp_path: Path) -> None:
    argv = [*training(assets, folder, "--stop_words", "</answer>").argv]
    command = [*COMMAND, "check", "--ranks", "2", "--", *argv]
    with started(command, tmp_path / "log", out=tmp_path / "out") as running:
        finished = running.wait(900)
    output = (tmp_path / "out").read_text(encoding="utf-8")
    assert finished.returncode == 0, output
    assert "warning: " not in output
    for line in (
        "ok: Versions: ",
        "a round is 128 samples (2 ranks x per_device_train_batch_size 64 x 1",
        "ok: --template: qwen2_5_vl: a turn ends with <|im_end|>; stop words: '</answer>'.",
        "ok: --dataset: 32 rows with 32 media are equal in rollout and training, in tokens and pos",
    ):
        assert line in output
    assert output.endswith(
        "Ready (warnings: 0). Not looked at: weights, and the memory that they need.\n"
    )


def text_of(folder: Path, *sources: Source) -> str:
    """Return the findings of a run's start, one a line."""
    job = {"sources": {source.side: source for source in sources}}
    command = [sys.executable, "-m", MODULE, json.dumps(job)]
    (folder / "out").unlink(missing_ok=True)
    with started(command, folder / "log", out=folder / "out") as running:
        finished = running.wait(900)
    assert finished.returncode == 0, finished.cause
    lines = (folder / "out").read_text(encoding="utf-8").splitlines()
    found = [Finding(**json.loads(line)) for line in lines]
    return "\n".join(f"{finding.level}: {finding.sentence}" for finding in found)


def test_both_sides(assets: Path, folder: Path, tmp_path: Path) -> None:
    """One start finds several errors. Each side encodes rows with its own settings."""
    trains = training(assets, folder, *SERVED, "--callbacks", "diversty", "--tool_timeout", "0")
    served = Source("rollout", server_argv(assets, "--seed", "-1", "--max_pixels", "784"), {})
    text = text_of(tmp_path, trains, served)
    for line in (
        "error: --callbacks diversty: is registered by neither",
        "error: --tool_timeout 0.0: expected",
        "error: --seed -1: expected 0 or more",
    ):
        assert line in text
    assert re.search(r"error: --dataset: row \d+ of .*: the rollout saw a prompt of", text), text


def test_what_is_not_here_is_not_looked_at(assets: Path, folder: Path) -> None:
    hubs = {"--model": "No-Such/Model", "--dataset": "Org/rows"}
    found = begun({flag: training(assets, folder, flag, hub) for flag, hub in hubs.items()}, folder)
    texts = {flag: [f"{f.level}: {f.sentence}" for f in found[flag]] for flag in hubs}
    assert not any(line.startswith("error: ") for lines in texts.values() for line in lines)
    [only] = texts["--model"]
    assert only.startswith("skipped: --model No-Such/Model: is not on this machine")
    first, *_, last = texts["--dataset"]
    assert first.startswith("skipped: --dataset Org/rows: is on a hub")
    assert last.startswith("ok: --template: qwen2_5_vl")


def test_a_model_and_rows_alone(assets: Path, folder: Path, tmp_path: Path) -> None:
    named = ["--template", "qwen2_5_vl", "--model_type", "qwen2_5_vl"]
    rows = [str(folder / "rows.jsonl")]
    for rest, expected in (
        ([], "error: `swift rlhf`: ends with ValueError: Failed to automatically match"),
        (named, "32 rows with 32 media are equal in rollout and training"),
    ):
        options = Namespace(config=None, model=str(assets / "tiny_vlm"), dataset=rows, rest=rest)
        sources = sources_of(options)
        assert [*check_sources(sources, looks_at_files=True)] == []
        text = text_of(tmp_path, *sources.values())
        assert expected in text
        assert ("error: " in text) == expected.startswith("error: ")
