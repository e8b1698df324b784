"""Hundreds of rounds against a real `swift rollout`: memory and open files stay level.

    python scripts/bench/soak.py --model DIR --data DIR --output scripts/bench/results/soak

A real `swift rlhf` of one rank trains in small rounds (2 prompts with an image, G = 2). Before each
round all weights go to the replicas, are verified, and the canary is drawn. The prompts come from
a data set that the warm-up sees once, so that caches with a bound are full by then. At the end of
every tenth round this file, as a plugin of the training, writes down resident memory and open file
descriptors of the trainer, the server and each replica. Fails where one of them exceeds the value
after the warm-up by more than 5% (files: by more than one that comes and goes, if that is more).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import DEFAULT_MODEL, ROOT, command, environment
from server_process import SWIFT, _free_port, rollout_server
from transformers import TrainerCallback

NUM_PROMPTS, GROUP_SIZE = 2, 2
GROWTH = 0.05
UNITS = ("memory_mb", "files")

Sample = dict[str, Any]
"""`round`, and of each process `memory_mb` and `files`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--data", type=Path, default=DEFAULT_MODEL.with_name("digits"))
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=30, help="rounds before the first value")
    parser.add_argument("--every", type=int, default=10, help="rounds between two samples")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json")
    options = parser.parse_args()
    result = {"command": command(), "environment": environment()}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        samples, canaries = soak(options, Path(folder))
    measured = [s for s in samples if s["round"] >= options.warm_up]
    growth = {name: largest_growth(measured, name) for name in samples[-1]["processes"]}
    result |= {
        "rounds": options.rounds,
        "warm_up": options.warm_up,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "canaries": len(canaries),
        "largest_canary_gap": max(canaries),
        "growth": growth,
        "samples": samples,
    }
    if options.output:
        text = json.dumps(result, indent=1) + "\n"
        options.output.with_suffix(".json").write_text(text, encoding="utf-8")
    print(json.dumps(growth, indent=1))
    if len(canaries) < options.rounds:
        raise SystemExit(f"{len(canaries)} of {options.rounds} rounds had a canary.")
    first = measured[0]["processes"]
    grown = [name for name, share in growth.items() if not is_level(first[name], share)]
    if grown:
        raise SystemExit(f"Not level: {', '.join(grown)}.")


def largest_growth(measured: list[Sample], name: str) -> dict[str, float]:
    """Return, for each unit, by what share a process's largest value exceeds its first."""
    series = {unit: [s["processes"][name][unit] for s in measured] for unit in UNITS}
    return {unit: round(max(values) / values[0] - 1, 4) for unit, values in series.items()}


def is_level(first: dict[str, float], growth: dict[str, float]) -> bool:
    one_file = 1 / first["files"]  # of a connection that comes and goes
    return growth["memory_mb"] <= GROWTH and growth["files"] <= max(GROWTH, one_file)


def soak(options: argparse.Namespace, folder: Path) -> tuple[list[Sample], list[float]]:
    """Return what the plugin wrote down, and the canary's gap of each round."""
    rows = (options.data / "train.jsonl").read_text(encoding="utf-8").splitlines()
    num_rows = NUM_PROMPTS * options.warm_up
    (folder / "rows.jsonl").write_text("\n".join(rows[:num_rows]) + "\n", encoding="utf-8")
    with rollout_server(options.model, options.replicas, server_argv()) as server:
        own = {"SOAK_SAMPLES": str(folder / "samples.jsonl"), "SOAK_EVERY": str(options.every)}
        own["SOAK_SERVER"] = str(server.process.pid)
        argv = trainer_argv(options, folder, server.port)
        log = ROOT / "output" / "bench" / "soak.log"
        with log.open("wb") as f:
            status = subprocess.run(
                argv, cwd=ROOT, stdout=f, stderr=f, env={**os.environ, **own}
            ).returncode
    if status:
        raise SystemExit(f"swift rlhf ended with {status}:\n{log.read_text()[-3000:]}")
    steps = read_lines(folder / "run/logging.jsonl")
    canaries = [step["rollout_gap/canary"] for step in steps if "rollout_gap/canary" in step]
    return read_lines(folder / "samples.jsonl"), canaries


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def server_argv() -> list[str]:
    return [
        *("--model_type", "qwen2_5_vl", "--template", "qwen2_5_vl", "--torch_dtype", "float32"),
        *("--vllm_max_model_len", "512", "--vllm_enforce_eager", "true"),
        *("--vllm_engine_kwargs", '{"kv_cache_memory_bytes": 134217728}'),
    ]


def trainer_argv(options: argparse.Namespace, folder: Path, port: int) -> list[str]:
    plugins = ("plugins/grpo_ext.py", "examples/digits/rewards.py", "scripts/bench/soak.py")
    return [
        *(str(SWIFT), "rlhf", "examples/digits/grpo.yaml", "--external_plugins", *plugins),
        *("--model", str(options.model.resolve()), "--dataset", str(folder / "rows.jsonl")),
        *("--output_dir", str(folder / "run"), "--add_version", "false"),
        *("--max_steps", str(options.rounds), "--save_strategy", "no"),
        *("--num_generations", str(GROUP_SIZE), "--max_completion_length", "6"),
        *("--per_device_train_batch_size", str(NUM_PROMPTS * GROUP_SIZE)),
        *("--learning_rate", "1e-6", "--callbacks", "diversity", "soak"),
        *("--vllm_mode", "server", "--vllm_server_host", "127.0.0.1"),
        *("--vllm_server_port", str(port), "--vllm_server_group_port", str(_free_port())),
    ]


# --- in the training's process ---


class Soak(TrainerCallback):
    """Writes down what the processes hold, while the server has nothing to do."""

    def __init__(self, args: Any, trainer: Any) -> None:
        self._every = int(os.environ["SOAK_EVERY"])
        self._processes = {"trainer": psutil.Process()}
        first = psutil.Process(int(os.environ["SOAK_SERVER"]))
        for process in [first, *first.children(recursive=True)]:
            words = " ".join(process.cmdline())
            if "spawn_main" in words:
                self._processes[f"replica {len(self._processes) - 2}"] = process
            elif "rollout.py" in words:
                self._processes["server"] = process

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._every:
            return
        held = {
            name: {"memory_mb": p.memory_info().rss / 1e6, "files": p.num_fds()}
            for name, p in self._processes.items()
        }
        line = json.dumps({"round": state.global_step, "processes": held})
        with Path(os.environ["SOAK_SAMPLES"]).open("a", encoding="utf-8") as f:
            f.write(line + "\n")


if __name__ == "__main__":
    main()
elif "SOAK_SAMPLES" in os.environ:
    from swift.callbacks import callbacks_map

    callbacks_map["soak"] = Soak
