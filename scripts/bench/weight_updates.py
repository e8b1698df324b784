"""The share of weight updates that their verification takes (checksums on both sides, comparison).

    python scripts/bench/weight_updates.py --model DIR --data DIR

Trains the digits' model for some steps with the real `swift rlhf`, colocated and against a
`swift rollout` on this machine, and sums what `timed_updates.py` writes down. The first update,
which sets things up, is left out. Checksums of the server's worker count as if the trainer waited
for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT
from rollout_server import server_argv
from server_process import rollout_server

SWIFT = Path(sys.executable).with_name("swift")
PLUGINS = ("plugins/grpo_ext.py", "examples/digits/rewards.py", "scripts/bench/timed_updates.py")
FIRST = {"update": 1, "checksums": 3}  # of each kind: both sides and the comparison


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="what make_digits.py wrote")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    print("| engine | updates | median update | checksums of an update | share |")
    print("|---|---|---|---|---|", flush=True)
    for mode in ("colocate", "server"):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TIMES_DIR"] = folder
            if mode == "server":
                train_against_server(options)
            else:
                train(options)
            print(row(mode, Path(folder)), flush=True)


def train_against_server(options: argparse.Namespace) -> None:
    argv = [*server_argv(), "--external_plugins", PLUGINS[0], PLUGINS[2]]
    with rollout_server(options.model, 1, argv) as server:
        host = ("--vllm_server_host", "127.0.0.1", "--vllm_server_port", str(server.port))
        train(options, "--vllm_mode", "server", *host)


def train(options: argparse.Namespace, *more: str) -> None:
    with tempfile.TemporaryDirectory() as run:
        argv = [
            *(str(SWIFT), "rlhf", "examples/digits/grpo.yaml", "--external_plugins", *PLUGINS),
            *("--model", str(options.model.resolve())),
            *("--dataset", str(options.data.resolve() / "train.jsonl"), "--output_dir", run),
            *("--max_steps", str(options.steps), "--save_strategy", "no"),
            *("--per_device_train_batch_size", "8", *more),
        ]
        log = Path(run) / "swift.log"
        with log.open("wb") as f:
            status = subprocess.run(argv, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT).returncode
        if status:
            raise SystemExit(f"swift rlhf ended with {status}:\n{log.read_text()[-3000:]}")


def row(mode: str, folder: Path) -> str:
    seconds: dict[str, list[float]] = {"update": [], "checksums": []}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            seconds[entry["what"]].append(entry["seconds"])
    updates, checksums = (seconds[kind][FIRST[kind] :] for kind in FIRST)
    median = sorted(updates)[len(updates) // 2]
    each = sum(checksums) / len(updates)
    share = sum(checksums) / sum(updates)
    times = f"{median * 1000:.0f} ms | {each * 1000:.1f} ms | {share:.1%}"
    return f"| {mode} | {len(updates)} | {times} |"


if __name__ == "__main__":
    main()
