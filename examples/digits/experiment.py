"""The digit example as an experiment: ten seeds, variations, and the band for runs to come.

    python examples/digits/experiment.py run --output DIR --jobs 2   make what is missing
    python examples/digits/experiment.py report DIR                  write results, plots, tables
    python examples/digits/experiment.py report RESULTS.json         print the tables of results
    python examples/digits/experiment.py check output/digits-seed42  is a run within the band?

`run` starts `scripts/demo.sh` for each run; one that was cut off is made again from its beginning.
A run takes one core (OMP_NUM_THREADS=1), 6 GB of memory and 250 MB of disk. `check` exits with 1
where a run is outside, and with 2 where there is none that can be compared.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from band import FIGURES, missing_gain, outside, start_differs
from figures import draw
from plan import BASE, NUM_STEPS, PARTS, PlannedRun, plan
from records import (
    RESULTS,
    Record,
    deviations,
    is_finished,
    of_variant,
    read_results,
    read_run,
    settings,
    write_results,
)
from result_tables import all_tables
from tqdm import tqdm
from train import new_rows

ROOT = Path(__file__).resolve().parents[2]
TABLES = "tables.md"
COMMAND = "python examples/digits/experiment.py run --output DIR"


def free_port() -> int:
    """A port for torch's rendezvous: two runs on one machine cannot share the default."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def start(planned: PlannedRun, folder: Path) -> subprocess.Popen[bytes]:
    """The demo with this run's seed and settings, as a process group; its output goes to a file."""
    run = folder / planned.name
    if run.exists():
        shutil.rmtree(run)
    env = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "SEED": str(planned.seed),
        "STEPS": str(NUM_STEPS),
        "RUN": str(run),
        "MASTER_PORT": str(free_port()),
    }
    command = ["bash", "scripts/demo.sh", *planned.variant.arguments]
    with (folder / f"{planned.name}.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )


def make_runs(missing: Sequence[PlannedRun], folder: Path, jobs: int) -> list[str]:
    """Make the runs, `jobs` at a time, with a bar of steps; the names of those that failed."""
    pending, failed = deque(missing), []
    running: dict[PlannedRun, subprocess.Popen[bytes]] = {}
    steps: dict[str, int] = {}
    with tqdm(total=NUM_STEPS * len(missing), unit="step", mininterval=5) as bar:
        try:
            while pending or running:
                while pending and len(running) < jobs:
                    planned = pending.popleft()
                    running[planned] = start(planned, folder)
                time.sleep(1)
                for planned, process in list(running.items()):
                    ended = process.poll() is not None
                    steps[planned.name] = len(new_rows(folder / planned.name / "logging.jsonl", 0))
                    if ended:
                        del running[planned]
                        if process.returncode:
                            failed.append(planned.name)
                            tail(folder / f"{planned.name}.log", bar)
                bar.set_description(" ".join(p.name for p in running), refresh=False)
                bar.update(sum(steps.values()) - bar.n)
        finally:
            for process in running.values():
                os.killpg(process.pid, signal.SIGTERM)
            for process in running.values():
                process.wait()
    return failed


def tail(log: Path, bar: tqdm) -> None:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    bar.write(f"{log} ends with:\n" + "\n".join(lines[-15:]), file=sys.stderr)


def command_run(options: argparse.Namespace) -> int:
    folder: Path = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    planned = plan(options.parts)
    missing = [p for p in planned if not is_finished(folder / p.name)]
    print(f"{len(planned) - len(missing)} of {len(planned)} runs are there", flush=True)
    if missing:  # once, before runs side by side would each make them
        subprocess.run(
            ["bash", "-c", "bash scripts/setup.sh && source scripts/common.sh && make_assets"],
            cwd=ROOT,
            check=True,
        )
    failed = make_runs(missing, folder, options.jobs)
    if failed:
        print(f"error: these runs failed: {', '.join(failed)}", file=sys.stderr)
        return 1
    print(f"Next: python examples/digits/experiment.py report {shlex.quote(str(options.output))}")
    return 0


def read_planned(folder: Path) -> list[Record]:
    """The finished runs of the plan in a folder.

    Raises ValueError where there is none, and for a run whose settings are not those planned.
    """
    records = []
    for planned in plan():
        run = folder / planned.name
        if is_finished(run):
            _check_settings(planned, run)
            records.append(read_run(run))
    if not records:
        raise ValueError(f"{folder} holds no finished run; make them: {COMMAND}")
    return records


def _check_settings(planned: PlannedRun, run: Path) -> None:
    made = settings(run)
    wanted = {word.removeprefix("--") for word in planned.variant.arguments[::2]}
    found = deviations(made)
    if not planned.variant.vllm:
        found = {name: words for name, words in found.items() if not name.startswith("vllm_")}
    if set(found) != wanted or made["seed"] != planned.seed:
        raise ValueError(
            f"{run} was not made by `{planned.command}`: seed {made['seed']}, "
            f"{'; '.join(found.values()) or 'the published settings'}; remove it and run again"
        )


def command_report(options: argparse.Namespace) -> int:
    path: Path = options.path
    records = read_results(path) if path.is_file() else read_planned(path)
    tables = all_tables(records, COMMAND)
    print(tables)
    output = options.output or (None if path.is_file() else RESULTS.parent)
    if output:
        output.mkdir(parents=True, exist_ok=True)
        write_results(output / RESULTS.name, COMMAND, records)
        (output / TABLES).write_text(tables, encoding="utf-8")
        plots = draw(output, records)
        written = [output / RESULTS.name, output / TABLES, *plots]
        print("wrote " + ", ".join(map(str, written)), file=sys.stderr)
    return 0


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Finished runs of the published settings among the given directories and in them.

    Raises ValueError where a named run has other settings, and where nothing is found.
    """
    found = []
    for path in paths:
        if is_finished(path):
            other = deviations(settings(path))
            if other:
                raise ValueError(f"{path} cannot be compared: {'; '.join(other.values())}")
            found.append(path)
            continue
        children = sorted(filter(is_finished, path.iterdir())) if path.is_dir() else []
        found += [child for child in children if not deviations(settings(child))]
    if not found:
        raise ValueError(
            f"no finished run with the published settings in {', '.join(map(str, paths))}; "
            "make one: bash scripts/demo.sh"
        )
    return found


def resumed(record: Record) -> list[str]:
    step = (record.machine or {}).get("first_step")
    return [f"resumed after step {step}: not one run from its beginning"] if step else []


def command_check(options: argparse.Namespace) -> int:
    published = of_variant(read_results(options.results), BASE.name)
    status = 0
    for run in find_runs(options.runs):
        record = read_run(run)
        wrong, short = outside(record, published), missing_gain(record)
        shown = ", ".join(f"{figure.label} {figure.show(figure.of(record))}" for figure in FIGURES)
        verdict = "outside the band" if wrong else "within the band"
        print(f"{run.name}: {verdict} of {len(published)} published seeds ({shown})")
        for line in (*wrong, *short, *start_differs(record, published), *resumed(record)):
            print(f"  {line}")
        status |= bool(short or (wrong and not options.gain_only))
    return status


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="make the runs that are missing")
    run.add_argument("--output", type=Path, required=True, help="folder of the runs")
    run.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    run.set_defaults(do=command_run)
    report = commands.add_parser("report", help="write results, plots and tables; print tables")
    report.add_argument("path", type=Path, help="folder of the runs, or a results file")
    report.add_argument("--output", type=Path, help="folder to write (default: results/ beside "
                        "this script; of a results file, tables are only printed)")  # fmt: skip
    report.set_defaults(do=command_report)
    check = commands.add_parser("check", help="compare runs with the published band")
    check.add_argument("runs", type=Path, nargs="+", help="runs, or folders of runs")
    check.add_argument("--results", type=Path, default=RESULTS, help="the published results")
    check.add_argument("--gain-only", action="store_true",
                       help="exit with 1 for a gain below 15 points alone")  # fmt: skip
    check.set_defaults(do=command_check)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    try:
        return int(options.do(options))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
