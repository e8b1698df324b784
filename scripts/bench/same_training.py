"""Train the digits with and without `--logps_shared_prompt true`: where do they part, and how far?

    python scripts/bench/same_training.py --output scripts/bench/results/same_training.json

Both trainings of a seed draw the same noise, and differ by rounding. Once a token differs, so does
all that follows: rewards then differ by chance, which the interval over prompts tells from more.
Further seeds show how much a seed changes. Runs stay in `--runs`, and are not made again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from common import DEFAULT_MODEL, ROOT, Results
from server_process import free_port

from swift_grpo_ext.tools.diff import diff
from swift_grpo_ext.tools.paired import compare, read_means

sys.path.insert(0, str(ROOT / "examples/digits"))
from records import rows_by_step

WAYS = {"plain": "false", "prompt once": "true"}
"""Values of `--logps_shared_prompt`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=DEFAULT_MODEL, help="the tiny model")
    add("--data", type=Path, default=DEFAULT_MODEL.with_name("digits"))
    add("--runs", type=Path, default=ROOT / "output/same_training")
    add("--seeds", type=int, nargs="+", default=[42, 43])
    add("--steps", type=int, default=100)
    add("--output", type=Path, help="write rows and environment there, as JSON")
    add("swift", nargs="*", help="further arguments for `swift rlhf`, after --")
    options = parser.parse_args()
    results = Results(options.output)
    for seed in options.seeds:
        runs = [train(options, seed, way) for way in WAYS]
        results.add([compared(seed, *runs)])
    print(as_markdown(results.rows))


def train(options: argparse.Namespace, seed: int, way: str) -> Path:
    """Train one way, unless that was done; return the run's folder."""
    run: Path = options.runs.resolve() / f"{way.replace(' ', '-')}-seed{seed}"
    argv = [sys.executable, "examples/digits/train.py", "--model", str(options.model.resolve())]
    argv += ["--data", str(options.data.resolve()), "--output", str(run), "--seed", str(seed)]
    argv += ["--max-steps", str(options.steps), "--", "--logps_shared_prompt", WAYS[way]]
    env = {**os.environ, "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    subprocess.run([*argv, *options.swift], cwd=ROOT, env=env, check=True)
    return run


def compared(seed: int, plain: Path, once: Path) -> dict[str, Any]:
    """Return where two runs part, their rewards, and the difference of those in each prompt."""
    log = (once / "swift.log").read_text(encoding="utf-8", errors="replace").splitlines()
    found = diff(plain, once)
    means = [read_means(str(run), phase="train", steps=None, reward=None) for run in (plain, once)]
    return {
        "seed": seed,
        "said": [line.partition("] ")[2] for line in log if "] --logps_shared_prompt" in line],
        "first_difference": found.difference and asdict(found.difference),
        "equal_rounds": found.num_rounds,
        "logprob_gap": found.logprob_gap,
        "rewards": {
            way: [row["reward"] for row in rows_by_step(run)]
            for way, run in zip(WAYS, (plain, once), strict=True)
        },
        "compared": asdict(compare({str(seed): (means[0], means[1])})),
    }


def as_markdown(rows: Sequence[dict[str, Any]], steps: int = 10) -> str:
    """Return mean rewards of every ten steps, and below them what is known of each pair."""
    num_steps = len(rows[0]["rewards"]["plain"])
    starts = range(0, num_steps, steps)
    columns = [f"to step {min(start + steps, num_steps)}" for start in starts]
    lines = [f"| seed | way | {' | '.join(columns)} | all |", "|" + "---|" * (len(columns) + 3)]
    for row in rows:
        for way, rewards in row["rewards"].items():
            parts = [*(rewards[start : start + steps] for start in starts), rewards]
            cells = [str(row["seed"]), way, *(f"{fmean(part):.3f}" for part in parts)]
            lines.append(f"| {' | '.join(cells)} |")
    for row in rows:
        parted, found = row["first_difference"], row["compared"]
        where = f"{parted['what']} in step {parted['step']}" if parted else "nowhere"
        low, high = found["interval"]
        lines += [
            "",
            f"Seed {row['seed']}: they first differ {where}, after {row['equal_rounds']} equal "
            f"rounds. Rewards of {found['num_prompts']} prompts differ by "
            f"{found['difference']:+.4f} [{low:+.4f}, {high:+.4f}] (95%). "
            f"{' '.join(row['said']) or 'Nothing was read once.'}",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
