"""Run the command `selftest`: one process for each topology.

    python -m swift_grpo_ext.tools.selftest.command JOB_AS_JSON

is such a process: it builds the training of some settings, checks it, and prints each result. A
process that breaks, or keeps the memory of a device, does not affect the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swift_grpo_ext.tools.check.glance import check_sources, devices_of
from swift_grpo_ext.tools.check.machine import SHOWN, installed_versions
from swift_grpo_ext.tools.harness import ChildError, result_writer, run_child, with_trainer
from swift_grpo_ext.tools.selftest.outcome import (
    ALL,
    PROMISES,
    REMEDIES,
    REPORT,
    SAME_TOKENS,
    NotTriedError,
    Result,
)
from swift_grpo_ext.tools.sources import Source, by_flag, sources_of, to_argv

if TYPE_CHECKING:
    from swift_grpo_ext.tools.selftest.checks import Check
    from swift_grpo_ext.tools.selftest.rig import Rig
    from swift_grpo_ext.training.trainer import RolloutGRPOTrainer

say = partial(print, flush=True)

CHANGED: Mapping[str, Any] = {
    "add_version": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "sample_log": "none",
    "max_steps": 1,
    # A group for each rank, with any number of ranks.
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
}

LEFT_OUT = (
    *("deepspeed", "fsdp", "callbacks", "resume_from_checkpoint", "async_generate", "eval_steps"),
    *("load_best_model_at_end", "push_to_hub", "generation_batch_size", "sequence_parallel_size"),
)

SERVER_SETTINGS = ("vllm_server_host", "vllm_server_port", "vllm_server_base_url")
LAUNCHER_VARIABLES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one process."""

    topology: str  # in words, as results name it
    argv: list[str]  # of `swift rlhf`
    checks: list[str]
    first_round: str  # the file with round 0 of the first topology
    ranks: int = 1


def run(options: argparse.Namespace) -> int:
    """Run all jobs, print their results, and write `selftest.json`; return 1 if a promise does
    not hold, 2 if none could be tried, else 0."""
    source, folder = read_training(options), options.output
    folder.mkdir(parents=True, exist_ok=True)
    if torch.accelerator.is_available():
        device = str(torch.accelerator.current_accelerator())
        num_devices = len(devices_of(source)) or torch.accelerator.device_count()
    else:
        device, num_devices = "cpu", len(os.sched_getaffinity(0))  # each core holds a rank
    env = {name: value for name, value in source.env.items() if name not in LAUNCHER_VARIABLES}
    results: list[Result] = []
    for number, job in enumerate(plan(source.given, folder)):
        say(job.topology)
        num_before, reason = len(results), ""
        if job.ranks > num_devices:
            reason = f"{job.ranks} devices are needed, and {num_devices} are there ({device})"
        else:
            log = folder / f"part-{number}.log"
            say(f"  starts as `swift rlhf` does, for a minute or more ({log})")
            try:
                for found in run_child(
                    __name__, asdict(job), {**env, **os.environ}, log, job.ranks
                ):
                    results.append(Result(**found))
                    show(results[-1])
            except ChildError as e:
                reason = f"its process {e}"
        if not results:
            print(f"swift-grpo-ext selftest: no check can start. {reason}", file=sys.stderr)
            return 2
        for check in job.checks[len(results) - num_before :]:
            results.append(Result(check=check, topology=job.topology, reason=reason))
            show(results[-1])
    versions = installed_versions()
    machine = {name: versions[name] for name in ("swift-grpo-ext", *SHOWN) if name in versions}
    machine |= {"Python": platform.python_version(), "system": platform.platform()}
    machine |= {"devices": f"{num_devices} x {device}"}
    report = {"machine": machine, "results": [asdict(result) for result in results]}
    text = json.dumps(report, indent=1, ensure_ascii=False)
    (folder / "selftest.json").write_text(f"{text}\n", encoding="utf-8")
    counts = Counter(result.status for result in results)
    summary = [f"{counts['holds']} of {len(results)} checks hold"]
    summary += [f"{number} {status}" for status, number in counts.items() if status != "holds"]
    say(f"Verdict: {', '.join(summary)}. Written: {folder / 'selftest.json'}")
    if counts["does not hold"]:
        return 1
    return 0 if counts["holds"] else 2


def read_training(options: argparse.Namespace) -> Source:
    """Return the settings of `swift rlhf`: of the file, `--model`, `--dataset`, and behind `--`."""
    source = sources_of(options).get("training")
    if source is None or not {"model", "dataset"} <= source.given.keys():
        raise ValueError("selftest: give a YAML file of `swift rlhf`, or --model and --dataset.")
    for finding in check_sources({"training": source}, looks_at_files=True):
        raise ValueError(finding.sentence)
    return source


def plan(given: Mapping[str, Sequence[str]], folder: Path) -> list[Job]:
    """Return the jobs: the first has the user's own engine, and the others are compared with it."""
    served = {name: values for name, values in given.items() if name not in LEFT_OUT}
    if given["rlhf_type"] == ["gkd"]:
        # Seeds, stops, weights and passes are the same code; `beta` has another meaning.
        say("--rlhf_type gkd: rollouts and passes are checked as those of grpo. Its loss is not.")
        served = {name: v for name, v in served.items() if not name.startswith("teacher")}
        served |= {"rlhf_type": ["grpo"], "reward_funcs": ["format"], "beta": ["0.0"]}
    served |= by_flag(to_argv({**CHANGED, "output_dir": folder / "run"}))
    served["per_device_train_batch_size"] = given.get("num_generations", ["8"])
    size = int(given.get("vllm_tensor_parallel_size", ["1"])[-1])
    colocated = {name: values for name, values in served.items() if name not in SERVER_SETTINGS}
    topologies: list[tuple[str, int, Mapping[str, Sequence[str]]]] = []
    if given.get("vllm_mode") == ["server"]:
        topologies.append(("server", 1, served))
    for ranks, tensor_parallel in dict.fromkeys([(size, size), (2, 1), (2, 2)]):
        changes = {"vllm_mode": ["colocate"], "vllm_tensor_parallel_size": [str(tensor_parallel)]}
        name = f"colocate, ranks: {ranks}, tensor parallel: {tensor_parallel}"
        topologies.append((name, ranks, {**colocated, **changes}))
    return [
        Job(
            topology=name,
            argv=[word for flag, values in settings.items() for word in (f"--{flag}", *values)],
            ranks=ranks,
            checks=[SAME_TOKENS] if number else ALL,
            first_round=str(folder / "round.pickle"),
        )
        for number, (name, ranks, settings) in enumerate(topologies)
    ]


def show(result: Result) -> None:
    """Print a result and its values."""
    say(f"  {result.status:18} {result.check} ({PROMISES[result.check]})")
    values = (f"{name}: {value}" for name, value in result.values.items())
    for text in filter(None, (result.reason, result.remedy, *values)):
        say(f"      {text}")


# --- in the process of a topology ---


def check_all(job: Job, report: Callable[[Result], None], trainer: RolloutGRPOTrainer) -> None:
    """Run the job's checks, and report their results."""
    from swift_grpo_ext.tools.selftest.checks import CHECKS, check_same_tokens
    from swift_grpo_ext.tools.selftest.rig import Rig

    rig, is_first_rank = Rig(trainer), trainer.ranks.rank == 0
    first_round = Path(job.first_round)
    if job.checks == ALL:
        samples = pickle.dumps(rig.first_round)  # all ranks generate it
        if is_first_rank:
            first_round.write_bytes(samples)
    checks: dict[str, Check] = {**CHECKS, SAME_TOKENS: partial(check_same_tokens, path=first_round)}
    for name in job.checks:
        result = attempt(rig, name, checks[name])
        if is_first_rank:
            report(replace(result, topology=job.topology))


def attempt(rig: Rig, name: str, check: Check) -> Result:
    """Run a check. Some errors mean a broken promise; after others the promise is untested."""
    from swift_grpo_ext.ranks import RolloutError
    from swift_grpo_ext.training.group import DisagreementError
    from swift_grpo_ext.weights.update import WeightUpdateError

    values: dict[str, Any] = {}
    try:
        values, faults = check(rig)
    except (WeightUpdateError, DisagreementError, RolloutError) as e:
        faults = [f"{type(e).__name__}: {e}"]
    except NotTriedError as e:
        return Result(check=name, reason=str(e))
    except Exception as e:  # the other checks can still be tried
        reason = f"the check itself failed ({type(e).__name__}: {e})"
        return Result(check=name, reason=reason, remedy="Report it.")
    if not faults:
        return Result(check=name, status="holds", values=values)
    reason, remedy = "; ".join(faults), REMEDIES.get(name, REPORT)
    return Result(check=name, status="does not hold", values=values, reason=reason, remedy=remedy)


if __name__ == "__main__":
    job = Job(**json.loads(sys.argv[1]))
    with result_writer() as report:
        with_trainer(job.argv, partial(check_all, job, report))
