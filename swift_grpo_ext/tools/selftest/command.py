"""Run the command `selftest`: a process for each topology, and their results.

What one process breaks, or takes of a device, the next does not notice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch

from swift_grpo_ext.tools.check.glance import check_files, check_names
from swift_grpo_ext.tools.check.machine import SHOWN, installed_versions
from swift_grpo_ext.tools.harness import last_error
from swift_grpo_ext.tools.selftest.outcome import ALL, PROMISES, SAME_TOKENS, Result
from swift_grpo_ext.tools.selftest.worker import Job
from swift_grpo_ext.tools.share import DEFAULTS
from swift_grpo_ext.tools.sources import by_flag, environment, read_settings, to_argv
from swift_grpo_ext.version import __version__

MOST_SECONDS = 1800.0
"""The time that a process may take: a large model loads for minutes."""

SECONDS_BETWEEN_LOOKS = 0.5
STARTED = time.monotonic()

CHANGED: Mapping[str, Any] = {
    "add_version": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "sample_log": "none",
    "max_steps": 1,
    # A group for each rank, however many there are.
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
}
"""Settings that are other ones here."""

LEFT_OUT = (
    *("deepspeed", "fsdp", "callbacks", "resume_from_checkpoint", "async_generate", "eval_steps"),
    *("load_best_model_at_end", "push_to_hub", "generation_batch_size", "output_dir", "ENV"),
)
"""Settings that have no part in it."""

SERVER_SETTINGS = ("vllm_server_host", "vllm_server_port", "vllm_server_base_url")
LAUNCHER_VARIABLES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(options: argparse.Namespace) -> int:
    """Check, print, and write `selftest.json`.

    Returns:
        1 where a promise does not hold, 2 where none could be tried, else 0.
    """
    settings, folder = read_training(options), options.output
    flags = by_flag(to_argv(settings))
    for finding in chain(check_names("training", flags), check_files(flags)):
        raise ValueError(finding.sentence)
    folder.mkdir(parents=True, exist_ok=True)
    if torch.accelerator.is_available():
        device = str(torch.accelerator.current_accelerator())
        named = str(environment(settings).get("CUDA_VISIBLE_DEVICES", ""))
        num_devices = len([*filter(None, named.split(","))]) or torch.accelerator.device_count()
    else:
        device, num_devices = "cpu", len(os.sched_getaffinity(0))  # each core holds a rank
    given = environment(settings)
    env = {name: str(value) for name, value in given.items() if name not in LAUNCHER_VARIABLES}
    results: list[Result] = []
    jobs = plan(settings, folder)
    Path(jobs[0].first_round).unlink(missing_ok=True)  # of another run
    for number, job in enumerate(jobs):
        tell(job.topology)
        measured: list[Result] = []
        reason = f"{job.ranks} devices are needed, and {num_devices} are there ({device})"
        if job.ranks <= num_devices:
            measured, reason = run_job(job, folder / f"part-{number}.log", env)
        if number == 0 and not measured:
            print(f"swift-grpo-ext selftest: no check can start. {reason}", file=sys.stderr)
            return 2
        done = {result.check for result in measured}
        results += measured
        results += [
            Result(check=check, topology=job.topology, reason=reason)
            for check in job.checks
            if check not in done
        ]
    versions = installed_versions()
    report = {
        "machine": {
            "swift-grpo-ext": __version__,
            **{name: versions[name] for name in SHOWN if name in versions},
            "Python": platform.python_version(),
            "system": platform.platform(),
            "devices": f"{num_devices} x {device}",
        },
        "results": [asdict(result) for result in results],
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (folder / "selftest.json").write_text(f"{text}\n", encoding="utf-8")
    if options.json:
        print(text)
    else:
        show(results)
        print(f"\nwritten: {folder / 'selftest.json'}")
    counts = Counter(result.status for result in results)
    said = [f"{counts['holds']} of {len(results)} checks hold"]
    said += [f"{number} {status}" for status, number in counts.items() if status != "holds"]
    tell(f"Verdict: {', '.join(said)}.")
    if counts["does not hold"]:
        return 1
    return 0 if counts["holds"] else 2


def read_training(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of `swift rlhf`: of the file, `--model`, `--dataset`, and behind `--`."""
    overrides = ["--model", options.model] if options.model else []
    overrides += ["--dataset", *options.dataset] if options.dataset else []
    from_file = read_settings(options.config) if options.config else DEFAULTS
    won: dict[str, Any] = {
        name: values[0] if len(values) == 1 else values
        for name, values in by_flag([*overrides, *options.rest]).items()
    }
    settings = {**from_file, **won}
    if not (settings.get("model") and settings.get("dataset")):
        raise ValueError("selftest: give a YAML file of `swift rlhf`, or --model and --dataset.")
    algorithm = settings.get("rlhf_type")
    if algorithm == "gkd":
        # Seeds, stops, weights and passes are the same code; `beta` is another thing there.
        tell("--rlhf_type gkd: rollouts and passes are checked as those of grpo; its loss is not.")
        kept = {name: value for name, value in settings.items() if not name.startswith("teacher")}
        return {**kept, "rlhf_type": "grpo", "reward_funcs": ["format"], "beta": 0.0}
    if algorithm != "grpo":
        raise ValueError(f"--rlhf_type {algorithm}: expected grpo or gkd.")
    return settings


def plan(settings: Mapping[str, Any], folder: Path) -> list[Job]:
    """Return what to run, in this order: the user's own engine first, others to compare with it."""
    served = {name: value for name, value in settings.items() if name not in LEFT_OUT}
    served |= {
        **CHANGED,
        "per_device_train_batch_size": settings.get("num_generations", 8),
        "output_dir": str(folder / "run"),
    }
    topologies = [("server", 1, served)] if settings.get("vllm_mode") == "server" else []
    size = int(settings.get("vllm_tensor_parallel_size") or 1)
    for ranks, tensor_parallel in dict.fromkeys([(size, size), (2, 1), (2, 2)]):
        colocated = {name: value for name, value in served.items() if name not in SERVER_SETTINGS}
        colocated |= {"vllm_mode": "colocate", "vllm_tensor_parallel_size": tensor_parallel}
        name = f"colocate, ranks: {ranks}, tensor parallel: {tensor_parallel}"
        topologies.append((name, ranks, colocated))
    return [
        Job(
            topology=name,
            argv=[*to_argv(changes)],
            ranks=ranks,
            checks=[SAME_TOKENS] if number else ALL,
            results=str(folder / "results.jsonl"),
            first_round=str(folder / "round.pickle"),
        )
        for number, (name, ranks, changes) in enumerate(topologies)
    ]


def run_job(job: Job, log: Path, env: Mapping[str, str]) -> tuple[list[Result], str]:
    """Run the process of a topology, with its output in `log`.

    Returns:
        The results that the process wrote, and why it wrote no more where it ended early.
    """
    results = Path(job.results)
    results.write_text("", encoding="utf-8")
    with socket.socket() as any_free:
        any_free.bind(("", 0))
        port = str(any_free.getsockname()[1])
    command = [sys.executable, "-m"]
    if job.ranks > 1:
        command += ["torch.distributed.run", "--nproc_per_node", str(job.ranks)]
        command += ["--master_port", port, "-m"]
    command += ["swift_grpo_ext.tools.selftest.worker", json.dumps(asdict(job))]
    with log.open("wb") as file:
        process = psutil.Popen(
            command,
            env={"MASTER_PORT": port, **env, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    tell(f"  starts as `swift rlhf` does, for a minute or more ({log}); next: {job.checks[0]}")
    try:
        status = wait(process, job)
        reason = f"its process ended with {status}: {last_error(log)}" if status else ""
        if status is None:
            reason = f"its process did not end within {MOST_SECONDS:g} seconds"
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            # Ranks of torchrun and engines live in sessions of their own.
            for member in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it left behind may hold a GPU's memory
        process.wait()
    lines = results.read_text(encoding="utf-8").splitlines()
    return [Result(**json.loads(line)) for line in lines], reason


def wait(process: psutil.Popen, job: Job) -> int | None:
    """Return a process's exit status, None where it did not end in time; tell what it tries."""
    num_told = 0
    for _ in range(int(MOST_SECONDS / SECONDS_BETWEEN_LOOKS)):
        with contextlib.suppress(psutil.TimeoutExpired):
            return int(process.wait(SECONDS_BETWEEN_LOOKS))
        *lines, _ = Path(job.results).read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[num_told:], num_told + 1):
            coming = f"; next: {job.checks[number]}" if number < len(job.checks) else ""
            result = json.loads(line)
            tell(f"  {result['check']}: {result['status']}{coming}")
        num_told = len(lines)
    return None


def tell(text: str) -> None:
    """Print a line of progress, with the time since the start."""
    minutes, seconds = divmod(int(time.monotonic() - STARTED), 60)
    print(f"{minutes}:{seconds:02} {text}", file=sys.stderr, flush=True)


def show(results: list[Result]) -> None:
    """Print the results by topology."""
    topology = ""
    for result in results:
        if result.topology != topology:
            topology = result.topology
            print(f"\n{topology}")
        print(f"  {result.status:18} {result.check} ({PROMISES[result.check]})")
        for text in (result.reason, result.remedy):
            if text:
                print(f"      {text}")
        for name, value in result.values.items():
            print(f"      {name}: {value}")
