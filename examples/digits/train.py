"""Run `swift rlhf examples/digits/grpo.yaml` with a progress bar, or resume an interrupted run.

Arguments after `--` go to `swift rlhf` and override the preset. `machine.json` in the run's folder
gets the machine, the start time and the load average.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from machine import describe_machine
from tqdm import tqdm

from swift_grpo_ext.checks.resume import last_whole

PRESET = Path(__file__).with_name("grpo.yaml")
SWIFT = Path(sys.executable).with_name("swift")
NUM_FIRST_STEPS = 5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the tiny model's folder")
    parser.add_argument("--data", type=Path, required=True, help="the folder of make_digits.py")
    parser.add_argument("--output", type=Path, required=True, help="the run's folder")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--page", type=Path, help="file with the address of the run's page")
    parser.add_argument("swift", nargs="*", help="arguments for `swift rlhf`, after --")
    return parser.parse_args()


def last_checkpoint(run: Path) -> tuple[int, Path] | None:
    """Return step and path of a run's newest complete checkpoint, if there is one."""
    folder = last_whole(run)
    return None if folder is None else (int(folder.name.removeprefix("checkpoint-")), folder)


def command(options: argparse.Namespace, resume_from: Path | None) -> list[str]:
    resume = ["--resume_from_checkpoint", str(resume_from)] if resume_from else []
    return [
        *(str(SWIFT), "rlhf", str(PRESET)),
        *("--model", str(options.model), "--dataset", str(options.data / "train.jsonl")),
        *("--output_dir", str(options.output), "--add_version", "false"),
        *("--seed", str(options.seed), "--max_steps", str(options.max_steps)),
        *resume,
        *options.swift,
    ]


@contextmanager
def following(log: Path, argv: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with its output in `log`. Ctrl-C reaches the process too, so wait for it."""
    with log.open("ab") as f, subprocess.Popen(argv, stdout=f, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        except KeyboardInterrupt:
            process.wait()
            raise


def new_rows(logging: Path, seen: int) -> list[dict[str, Any]]:
    """Return the training steps in ms-swift's log after the first `seen` steps."""
    if not logging.is_file():
        return []
    lines = logging.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if "reward" in row][seen:]


def new_bar(done: int, total: int, *, has_estimate: bool) -> tqdm[NoReturn]:
    """Return a bar; the first steps get no estimate, because they take many times as long."""
    form = None if has_estimate else "{desc}: {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
    name = "training" if has_estimate else "starting"
    return tqdm(
        desc=name, initial=done, total=total, unit="step", bar_format=form, leave=has_estimate
    )


def page_line(page: Path | None) -> str:
    """Return a line with the address that the page's server printed into `page`."""
    lines = page.read_text(encoding="utf-8").splitlines() if page and page.is_file() else []
    for address in (line for line in lines if line.startswith("http")):
        return f"See samples, rewards and curves while it trains: {address}"
    return "The page of this run could not be served" + (f", see {page}" if page else "")


@contextmanager
def recorded(path: Path, first_step: int) -> Iterator[list[float]]:
    """Yield a list for load averages; at the end, write their mean and the machine to `path`.

    A load average counts the processes that run or wait for a core, also those of this run.
    """
    loads: list[float] = []
    started, start = datetime.now(timezone.utc), time.monotonic()
    try:
        yield loads
    finally:
        session = {
            "started": started.strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.monotonic() - start),
            "first_step": first_step,
            "load_average": round(fmean(loads), 1) if loads else None,
        }
        content = {**describe_machine(), **session}
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    options = parse_arguments()
    done = last_checkpoint(options.output)
    first_step, resume_from = done or (0, None)
    if first_step >= options.max_steps:
        print(f"{resume_from} exists; nothing to train.")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    argv = command(options, resume_from)
    log, logging = options.output / "swift.log", options.output / "logging.jsonl"
    print(f"$ {shlex.join(argv)}\n  (its output goes to {log})")
    seen = len(new_rows(logging, 0))
    record = recorded(options.output / "machine.json", first_step)
    bar = new_bar(first_step, options.max_steps, has_estimate=False)
    with record as loads, following(log, argv) as process:
        is_running = True
        while is_running:
            time.sleep(1)
            is_running = process.poll() is None
            rows = new_rows(logging, seen)
            seen += len(rows)
            if rows and not loads:
                bar.write(f"\n{page_line(options.page)}\n")
            for row in rows:
                loads.append(os.getloadavg()[0])
                bar.set_postfix(reward=f"{row['reward']:.2f}", refresh=False)
                bar.update()
                if len(loads) == NUM_FIRST_STEPS:
                    bar.close()
                    bar = new_bar(
                        first_step + NUM_FIRST_STEPS, options.max_steps, has_estimate=True
                    )
            if sys.stderr.isatty():  # update the seconds, but not in a log file
                bar.refresh()
    bar.close()
    if process.returncode:
        print("\n".join(log.read_text(encoding="utf-8").splitlines()[-25:]), file=sys.stderr)
        print(f"error: training ended with status {process.returncode}; see {log}", file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
