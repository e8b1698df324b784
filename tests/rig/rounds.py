"""Short trainings, by default at learning rate 0, with a record of each sample."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import yaml

from swift_grpo_ext.record.query import read_samples
from swift_grpo_ext.record.tables import SampleRow, to_rows
from swift_grpo_ext.sampling.seeding import SampleId
from tests.rig.processes import PLUGIN, ROOT, Finished, free_port, swift

Samples = dict[str, dict[str, Any]]
"""The record of each sample (`recorder.py`), by its name."""

SCENARIOS = "tests/rig/scenarios.py"
PLUGINS = ("examples/digits/rewards.py", SCENARIOS, "tests/rig/recorder.py")
FAULTY = "tests/rig/faults.py"
SECONDS_TO_END = 300
"""Bound on the end of a run after its last replica is lost. Two busy cores need a minute. A run
that hangs takes gloo's half hour, or does not end."""

PRESET = ROOT / "examples/digits/grpo.yaml"
GROUP_SIZE = 4
BATCH = 12  # samples in a generation batch: 3 prompts, for 1, 2, 3 and 6 ranks
HOT = ("--temperature", "2.0")
"""At this temperature the tiny model says anything: two equal completions share their noise."""

LEARNING = (
    *("--learning_rate", "2e-3", "--temperature", "1.0", "--beta", "0.1"),
    *("--full_determinism", "true"),
    *("--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "5"),
)
"""Arguments of a run that learns, and keeps a checkpoint of each step."""


def best_argv(rows: Path) -> list[str]:
    """Return arguments of a run that evaluates each step and at its end loads the best weights."""
    return [
        *("--eval_strategy", "steps", "--eval_steps", "1", "--load_best_model_at_end", "true"),
        *("--val_dataset", str(rows), "--per_device_eval_batch_size", str(BATCH)),
    ]


SHORT_STEPS = (
    "--vllm_engine_kwargs",
    '{"kv_cache_memory_bytes": 134217728, "max_num_batched_tokens": 96}',
)
"""Steps of vLLM, so short that a prompt takes several."""

LORA = ("--tuner_type", "lora", "--target_modules", "all-linear")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, values: Iterable[Any]) -> Path:
    lines = (json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def read_records(folder: Path, kind: str = "rank") -> list[dict[str, Any]]:
    """Read what `recorder.py` wrote of this kind, on all ranks."""
    return [line for file in sorted(folder.glob(f"{kind}*.jsonl")) for line in read_lines(file)]


def digits(assets: Path, order: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rows of the digits with these numbers, in this order."""
    rows = read_lines(assets / "digits/train.jsonl")
    return [deepcopy(rows[i]) for i in order]


def train(
    assets: Path, rows: Path, folder: Path, *argv: str, ranks: int = 1, **settings: Any
) -> Samples:
    """Train and return the samples by name; the run is `folder / "run"`, its log `log`."""
    run_training(assets, rows, folder, *argv, ranks=ranks, **settings).check()
    by_name = recorded(folder)
    assert_logged(folder / "run", by_name, ranks)
    return by_name


def recorded(folder: Path) -> Samples:
    """Return the recorded samples of a training, by name."""
    records = read_records(folder / "record")
    by_name = {record["name"]: record for record in records}
    assert len(by_name) == len(records), "a sample was generated twice"
    return by_name


def run_training(
    assets: Path,
    rows: Path,
    folder: Path,
    *argv: str,
    env: dict[str, str] | None = None,
    **settings: Any,
) -> Finished:
    """Run a training as `train` does, to a good or a bad end; settings are `training_command`'s."""
    command, own = training_command(assets, rows, folder, *argv, **settings)
    return swift(*command, log=folder / "log", env={**(env or {}), **own})


def training_command(
    assets: Path,
    rows: Path,
    folder: Path,
    *argv: str,
    ranks: int = 1,
    steps: int = 3,
    plugins: Sequence[str] = (),
    preset: Path = PRESET,
) -> tuple[list[str], dict[str, str]]:
    """Make the folder of a training; return the arguments of `swift`, and the environment.

    Args:
        plugins: further ones.
    """
    record_dir = folder / "record"
    record_dir.mkdir(parents=True)
    command = [
        *("rlhf", str(preset)),
        *("--model", str(assets / "tiny_vlm"), "--dataset", str(rows)),
        *("--external_plugins", PLUGIN, *PLUGINS, *plugins),
        *("--output_dir", str(folder / "run"), "--add_version", "false"),
        *("--max_steps", str(steps), "--save_strategy", "no"),
        *("--num_generations", str(GROUP_SIZE), "--learning_rate", "0", "--warmup_steps", "0"),
        *("--reward_funcs", "position", "--reward_weights", "1.0"),
        *("--per_device_train_batch_size", str(BATCH // ranks)),
        *(*HOT, *argv),
    ]
    env = {"RECORD_DIR": str(record_dir)}
    if ranks > 1:
        env["NPROC_PER_NODE"] = str(ranks)
    return command, env


FATE = ("--reward_funcs", "position", "fate", "--reward_weights", "1.0", "0.0")
"""Rewards of a training with faults (`faults.py`). If it waits for the file `go`, its test has to
make that file, also when the test fails."""

train_with_faults = partial(run_training, plugins=(FAULTY,))


def faults(*kinds: dict[str, Any]) -> dict[str, str]:
    """Return the environment with which `faults.py` makes these happen, and reports stalls."""
    return {"FAULTS": json.dumps(kinds), "STALL_MINUTES": "0.05"}


def let_go(waits: Path) -> None:
    """End the wait of a fault, which waits in this folder."""
    waits.mkdir(exist_ok=True)
    (waits / "go").touch()


def wait_until(is_so: Callable[[], bool], training: Future[Finished]) -> None:
    """Wait until a condition holds; fail if the training or the time ends before."""
    deadline = time.monotonic() + SECONDS_TO_END
    while not is_so():
        assert not training.done(), training.result().cause
        assert time.monotonic() < deadline
        time.sleep(0.25)


def assert_logged(run: Path, samples: Samples, ranks: int) -> None:
    """Assert that the record has each turn of each sample once, as it was generated."""
    logged: dict[str, list[SampleRow]] = {}
    for row in to_rows(read_samples(run)):
        logged.setdefault(replace(row.sample_id, turn=0).request_id, []).append(row)
    assert logged.keys() == samples.keys()
    for name, turns in logged.items():
        sample, first = samples[name], turns[0]
        tokens = [i for turn in sample["turns"] for i in turn] or sample["token_ids"]
        assert [i for turn in turns for i in turn.token_ids] == tokens
        assert [turn.sample_id.turn for turn in turns] == list(range(len(turns)))
        assert sample["infos"].get("seed", first.seed) == first.seed
        assert sample["infos"].get("replica", first.replica) == first.replica
        assert list(first.media) == [*sample["images"], *sample["videos"], *sample["audios"]]
        assert first.weight_version == sample["weights"]
        assert 0 <= first.rank < ranks


def server_argv(assets: Path, *argv: str, plugins: Sequence[str] = ()) -> list[str]:
    """Return arguments of a `swift rollout` with the tiny model."""
    return [
        *("--model", str(assets / "tiny_vlm"), "--external_plugins", PLUGIN, *plugins),
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--torch_dtype", "float32"),
        *("--vllm_max_model_len", "512", "--vllm_enforce_eager", "true"),
        *("--vllm_engine_kwargs", '{"kv_cache_memory_bytes": 134217728}'),
        *argv,
    ]


def client_argv(*ports: int) -> list[str]:
    """Return arguments of a training that uses these servers."""
    hosts = ["127.0.0.1"] * len(ports)
    return [
        *("--vllm_mode", "server", "--vllm_server_host", *hosts),
        *("--vllm_server_port", *map(str, ports)),
        # On a server that lives on, a trainer that was killed leaves the default port in use.
        *("--vllm_server_group_port", *(str(free_port()) for _ in ports)),
    ]


def token_ids(samples: Samples) -> dict[str, list[int]]:
    return {name: sample["token_ids"] for name, sample in samples.items()}


def logged_steps(run: Path) -> list[dict[str, Any]]:
    """Return what ms-swift logged of each step."""
    return [log for log in read_lines(run / "logging.jsonl") if "loss" in log]


def assert_same(samples: Samples, reference: Samples, steps: range = range(3)) -> None:
    """Assert that these are all samples of the steps, with the reference's prompts and tokens."""
    expected = {name: s for name, s in reference.items() if SampleId.parse(name).step in steps}
    assert len(expected) == BATCH * len(steps)
    assert token_ids(samples) == token_ids(expected)
    for name, sample in samples.items():
        for part in ("images", "solution"):
            assert sample[part] == expected[name][part]


@contextmanager
def web(folder: Path) -> Iterator[str]:
    """Serve a folder's files on this machine; yield the address."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def write_video(images: Sequence[str], path: Path) -> Path:
    """Write a video with these images as frames, one a second."""
    frames = [cv2.imread(image) for image in images]
    height, width, _ = frames[0].shape
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 1, (width, height))
    for frame in frames:
        writer.write(frame)
    writer.release()
    return path


def without_vllm(folder: Path) -> Path:
    """Write the digits' preset with `--use_vllm false` and, as ms-swift wants, no vLLM setting."""
    settings = yaml.safe_load(PRESET.read_text(encoding="utf-8"))
    settings = {name: value for name, value in settings.items() if not name.startswith("vllm_")}
    preset = folder / "preset.yaml"
    preset.write_text(yaml.safe_dump({**settings, "use_vllm": False}), encoding="utf-8")
    return preset
