"""What the verification of weight updates costs: updates with it and without, in turns.

    python scripts/bench/weight_updates.py --model DIR --data DIR [--large]

Colocated, it trains the digits' model for some steps with the real `swift rlhf`. Served, it sends
the model's weights to a `swift rollout` on this machine as the trainer does, as often as `--pairs`
says: a training between updates would only add noise. `timed_updates.py` switches verification on
and off from one update to the next. The first two, which set things up, are left out. With
`--large`, a model of the same architecture with 145 million random weights takes its place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT
from large_model import write_large_model
from rollout_server import server_argv
from server_process import rollout_server

SWIFT = Path(sys.executable).with_name("swift")
PLUGINS = ("plugins/grpo_ext.py", "examples/digits/rewards.py", "scripts/bench/timed_updates.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="what make_digits.py wrote")
    parser.add_argument("--steps", type=int, default=42, help="of the colocated training")
    parser.add_argument("--pairs", type=int, default=60, help="of updates of a server")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--large", action="store_true", help="579 MB of weights; 13 GB of memory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.large:
            tiny, options.model = options.model, Path(folder) / "model"
            write_large_model(tiny, options.model)
        print_table(options)


def print_table(options: argparse.Namespace) -> None:
    size = sum(f.stat().st_size for f in options.model.glob("*.safetensors"))
    print(f"Updates of {size / 1e6:.0f} MB:\n")
    print("| engine | pairs of updates | without | with verification | ratio |")
    print("|---|---|---|---|---|", flush=True)
    for mode in options.modes:
        with tempfile.TemporaryDirectory() as folder:
            times = Path(folder) / "times.jsonl"
            os.environ["UPDATE_TIMES"] = str(times)
            MODES[mode](options)
            print(row(mode, times), flush=True)


def update_server(options: argparse.Namespace) -> None:
    argv = [*server_argv(), "--external_plugins", PLUGINS[0], PLUGINS[2]]
    with rollout_server(options.model, 1, argv) as server:
        argv = [sys.executable, PLUGINS[2], str(options.model), str(server.port)]
        subprocess.run([*argv, str(2 * options.pairs + 2)], cwd=ROOT, check=True)


def train(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as run:
        argv = [
            *(str(SWIFT), "rlhf", "examples/digits/grpo.yaml", "--external_plugins", *PLUGINS),
            *("--model", str(options.model.resolve())),
            *("--dataset", str(options.data.resolve() / "train.jsonl"), "--output_dir", run),
            *("--max_steps", str(options.steps), "--save_strategy", "no"),
            *("--per_device_train_batch_size", "8"),
        ]
        log = Path(run) / "swift.log"
        with log.open("wb") as f:
            status = subprocess.run(argv, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT).returncode
        if status:
            raise SystemExit(f"swift rlhf ended with {status}:\n{log.read_text()[-3000:]}")


def row(mode: str, times: Path) -> str:
    entries = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()][2:]
    plain, verified = (
        [1000 * e["seconds"] for e in entries if e["verified"] is is_verified]
        for is_verified in (False, True)
    )
    ratios = [with_it / without for without, with_it in zip(plain, verified, strict=True)]
    values = (statistics.median(v) for v in (plain, verified, ratios))
    return f"| {mode} | {len(plain)} | " + "{:.0f} ms | {:.0f} ms | {:.3f} |".format(*values)


MODES = {"colocate": train, "server": update_server}

if __name__ == "__main__":
    main()
