"""Runs `swift rlhf examples/digits/grpo.yaml` with a progress bar; resumes what was interrupted.

Arguments after `--` go to `swift rlhf` as they are, and win over the preset.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

PRESET = Path(__file__).with_name("grpo.yaml")
SWIFT = Path(sys.executable).with_name("swift")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the tiny model's directory")
    parser.add_argument("--data", type=Path, required=True, help="what make_digits.py wrote")
    parser.add_argument("--output", type=Path, required=True, help="the run's directory")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("swift", nargs="*", help="arguments for `swift rlhf`, after --")
    return parser.parse_args()


def last_checkpoint(run: Path) -> tuple[int, Path] | None:
    """The newest whole checkpoint of a run with its step; None where there is none."""
    steps = {
        int(folder.name.removeprefix("checkpoint-")): folder
        for folder in run.glob("checkpoint-*")
        if (folder / "trainer_state.json").is_file()
    }
    return max(steps.items(), default=None)


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
    """A process whose output goes to `log`; on Ctrl-C it has got the signal too, and is awaited."""
    with log.open("ab") as f, subprocess.Popen(argv, stdout=f, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        except KeyboardInterrupt:
            process.wait()
            raise


def new_rows(logging: Path, seen: int) -> list[dict[str, Any]]:
    """ms-swift's log rows of training steps after the first `seen`."""
    if not logging.is_file():
        return []
    lines = logging.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in rows if "reward" in row][seen:]


def main() -> int:
    options = parse_arguments()
    done = last_checkpoint(options.output)
    first_step, resume_from = done or (0, None)
    if first_step >= options.max_steps:
        print(f"{resume_from} is there: nothing to train.")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    argv = command(options, resume_from)
    log, logging = options.output / "swift.log", options.output / "logging.jsonl"
    print(f"$ {shlex.join(argv)}\n  (its output goes to {log})")
    seen = len(new_rows(logging, 0))
    bar = tqdm(total=options.max_steps, initial=first_step, desc="starting", unit="step")
    with bar, following(log, argv) as process:
        while process.poll() is None:
            time.sleep(1)
            rows = new_rows(logging, seen)
            seen += len(rows)
            for row in rows:
                bar.set_description("training")
                bar.set_postfix(reward=f"{float(row['reward']):.2f}")
                bar.update()
    if process.returncode:
        print("\n".join(log.read_text(encoding="utf-8").splitlines()[-25:]), file=sys.stderr)
        print(f"error: training ended with {process.returncode}; see {log}", file=sys.stderr)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
