"""`swift-grpo-ext selftest`: runs the parts of the plan one by one, and shows what they find.

Each part is a process of its own, with its log in the output folder: what one part breaks, or takes
of a device, the next does not notice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markup import escape

from swift_grpo_ext.checks.preflight import free_port
from swift_grpo_ext.tools.check.settings import (
    Run,
    devices_of,
    files_of,
    from_command_line,
    parse,
    read_settings,
)
from swift_grpo_ext.tools.selftest import page, plan
from swift_grpo_ext.tools.selftest.plan import Part
from swift_grpo_ext.tools.selftest.result import Result, exit_status, untried
from swift_grpo_ext.tools.selftest.worker import BUDGET, COMPARE, INVARIANT, Job

ROUND = "round.json"
GRACE_SECONDS = 60.0
"""That a check has to end once the budget is spent."""

SECONDS_BETWEEN_LOOKS = 0.5
LOG_LINES = 3
"""Of a process that ended early, for the reason."""

ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception): .+)", re.MULTILINE)
"""How Python ends a traceback, also one of a rank; torchrun's own ones have no text."""

NAMES = {COMPARE: "seeds", INVARIANT: "batch invariance"}
"""What the table calls checks that have another name."""


def run(options: argparse.Namespace) -> int:
    """Check, print, write; returns the exit status (`exit_status`; 2 also for settings that `swift
    rlhf` does not take).

    Raises:
        ValueError: settings cannot be read, or name no model or data set.
        OSError: the output folder cannot be written.
    """
    training, served = settings_of(options)
    folder: Path = options.output
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ROUND).unlink(missing_ok=True)  # of another run
    count, kind = devices(training)
    settings, *found = plan.parts(
        _run_of(training, served), training, served,
        output_dir=folder / "run", num_devices=count, device=kind, address=options.server,
    )  # fmt: skip
    console = Console(stderr=options.json)
    machine = page.facts(page.device_words(count, kind))
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), style="dim")
    results: list[Result] = []

    def emit(result: Result) -> None:
        result = replace(result, name=NAMES.get(result.name, result.name))
        results.append(result)
        color = page.COLORS[result.status]
        console.print(f"[{color}]{result.status:18}[/] {result.name}, {escape(result.topology)}")

    deadline = time.time() + 60 * options.minutes
    if reason := refusal(settings, folder, deadline):
        print(f"swift-grpo-ext selftest: no check can start. {reason}", file=sys.stderr)
        return 2
    for number, part in enumerate(found):
        run_part(part, number, folder, deadline, emit)
    if options.json:
        print(json.dumps(page.masked([asdict(r) for r in results]), indent=1, ensure_ascii=False))
    else:
        console.print(page.table(results))
    for path in page.write(folder, results, training, machine):
        console.print(f"written: {path}", highlight=False)
    return exit_status(results)


# --- settings ---


def settings_of(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The training's settings, and those of `swift rollout` where its file is known."""
    served: dict[str, Any] | None = None
    if options.config is None:
        if not (options.model and options.dataset):
            raise ValueError(
                "selftest: give a YAML file of `swift rlhf`, or --model and --dataset."
            )
        training = plan.bare_settings(options.model, options.dataset)
    else:
        first, second = files_of(Path(options.config))
        second = Path(options.rollout) if options.rollout else second
        if first is None:
            raise ValueError(f"{options.config}: selftest needs the settings of `swift rlhf` too.")
        training = read_settings(first)
        served = read_settings(second) if second else None
    given = {"model": options.model, "dataset": options.dataset}
    overrides = {name.replace("-", "_"): value for name, value in from_command_line(options.rest)}
    training |= {name: value for name, value in given.items() if value} | overrides
    if served is not None and options.model:
        served["model"] = options.model
    return training, served


def _run_of(training: Mapping[str, Any], served: Mapping[str, Any] | None) -> Run:
    parsed: dict[str, Any] = {}
    for side, settings in (("training", training), ("rollout", served)):
        if settings is not None:
            parsed[side], findings = parse(side, settings)  # type: ignore[arg-type]
            for finding in findings:
                if finding.level == "error":
                    raise ValueError(finding.sentence)
    found = Run(**parsed)
    if found.train("rlhf_type") != "grpo":
        raise ValueError(f"rlhf_type {found.train('rlhf_type')}: expected grpo.")
    if not found.train("use_vllm"):
        raise ValueError("use_vllm false: selftest checks rollouts of vLLM; expected true.")
    return found


def devices(training: Mapping[str, Any]) -> tuple[int, str]:
    """How many devices the training may use, and of which kind; each core of a CPU holds a rank."""
    import torch

    if not torch.accelerator.is_available():
        return len(os.sched_getaffinity(0)), "cpu"
    named = devices_of(training)
    count = len(named) if named else torch.accelerator.device_count()
    accelerator = torch.accelerator.current_accelerator()
    return count, accelerator.type if accelerator else "cpu"


# --- processes ---


def run_part(
    part: Part, number: int, folder: Path, deadline: float, emit: Callable[[Result], None]
) -> None:
    """Give `emit` a result for each check of a part, whatever becomes of its process."""
    reason = part.obstacle or (BUDGET if time.time() >= deadline else "")
    done: list[Result] = []

    def note(result: Result) -> None:
        done.append(result)
        emit(result)

    if not reason:
        log = folder / f"part-{number}.log"
        try:
            with server(part, folder / f"part-{number}.server.log", deadline):
                reason = _follow(part, number, folder, log, deadline, note)
        except (OSError, TimeoutError) as e:
            reason = str(e)
    names = {result.name for result in done}
    missing = [check for check in part.checks if check not in names]
    for check in missing:
        why = reason if check == missing[0] else f"as {missing[0]}"
        emit(untried(why, name=check, topology=part.topology))


def refusal(part: Part, folder: Path, deadline: float) -> str:
    """Return why `swift rlhf` does not take a part's settings; empty where it does, or where there
    is no time to find out."""
    log = folder / "settings.log"
    words = ["--settings", *plan.argv(part.settings)]
    command = [sys.executable, "-m", "swift_grpo_ext.tools.selftest.worker", *words]
    with started(command, log, {**part.env, **os.environ}) as process:
        while (status := process.poll()) is None:
            if time.time() >= deadline:
                return ""
            time.sleep(SECONDS_BETWEEN_LOOKS)
    return _end_of(log) if status else ""


def _follow(
    part: Part,
    number: int,
    folder: Path,
    log: Path,
    deadline: float,
    emit: Callable[[Result], None],
) -> str:
    """Run a part's process, hand on its results as they come; returns why it has no more."""
    job = Job(
        argv=plan.argv(part.settings),
        checks=list(part.checks),
        topology=part.topology,
        deadline=deadline,
        results=str(folder / f"part-{number}.jsonl"),
        rounds=str(folder / ROUND),
    )
    path, results = folder / f"part-{number}.job.json", Path(job.results)
    path.write_text(json.dumps(asdict(job), ensure_ascii=False), encoding="utf-8")
    results.write_text("", encoding="utf-8")
    env = {"MASTER_PORT": str(free_port()), **part.env, **os.environ}
    command = [sys.executable, "-m", "swift_grpo_ext.tools.selftest.worker", str(path)]
    if part.ranks > 1:
        launch = ["torch.distributed.run", "--nproc_per_node", str(part.ranks)]
        port = ["--master_port", env["MASTER_PORT"]]
        command = [sys.executable, "-m", *launch, *port, *command[1:]]
    seen = 0
    with started(command, log, env) as process:
        while True:
            is_over = process.poll() is not None
            lines = results.read_text(encoding="utf-8").splitlines(keepends=True)
            for line in [line for line in lines[seen:] if line.endswith("\n")]:
                emit(Result(**json.loads(line)))
                seen += 1
            if is_over:
                return f"its process ended with {process.returncode}: {_end_of(log)}"
            if time.time() >= deadline + GRACE_SECONDS:
                return BUDGET
            time.sleep(SECONDS_BETWEEN_LOOKS)


@contextlib.contextmanager
def server(part: Part, log: Path, deadline: float) -> Iterator[None]:
    """The part's `swift rollout`, healthy, if it needs one that does not run already.

    Raises:
        OSError, TimeoutError: it did not come up.
    """
    if part.server is None:
        yield
        return
    url = f"http://127.0.0.1:{part.settings['vllm_server_port'][0]}/health"
    if _answers(url):
        yield
        return
    env = {**{k: str(v) for k, v in (part.server.get("ENV") or {}).items()}, **os.environ}
    words = plan.argv({name: value for name, value in part.server.items() if name != "ENV"})
    command = [sys.executable, "-m", "swift.cli.main", "rollout", *words]
    with started(command, log, env) as process:
        while not _answers(url):
            if process.poll() is not None:
                raise OSError(f"swift rollout ended with {process.returncode}: {_end_of(log)}")
            if time.time() >= deadline:
                raise TimeoutError(BUDGET)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        yield


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
        return bool(response.status == 200)
    return False


@contextlib.contextmanager
def started(
    command: list[str], log: Path, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file; it and all that it started end with the block."""
    with log.open("wb") as f:
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=f, stderr=f,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for member in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _end_of(log: Path) -> str:
    """The last exception that a log names, or its last lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    errors = [match[1].strip() for match in ERROR.finditer(text)]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return errors[-1] if errors else " | ".join(lines[-LOG_LINES:])
