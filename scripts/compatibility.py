"""Tests this project beside releases of ms-swift, vLLM and Python, and writes the tables of them.

    python scripts/compatibility.py --write                        every cell that was not tried yet
    python scripts/compatibility.py --cells 4.6.0-0.23.0 --keep    one, and its environment stays

A cell is an environment of its own under --environments: what ms-swift's release asks for beside
vLLM's CPU build, made by uv in a minute (6 GB, most of it shared with the others), tested for a
quarter of an hour, and removed. In it: what an installation of the plugin would change; the pins of
upstream names, one by one; the unit tests; real trainings and servers (`compat/trial.py`).
What was found is kept in --environments, so that a run that was ended goes on. WORKERS is as for
`scripts/test.sh`, 2 by default; vLLM 0.11 wants 1 on 24 GB of memory.

Exit status 1: a cell that was tried does not work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from compat.environment import PYTHON, ROOT, STACKS, SWIFT, Cell, Environment, uv
from compat.table import table, write_tables
from compat.trial import Trial, try_out


def main() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that uv and pytest end too
    folder = options.environments.resolve()
    results = folder / "results"
    shutil.rmtree(folder / "wheel", ignore_errors=True)
    subprocess.run(uv("build", "--quiet", "--wheel", "-o", folder / "wheel", ROOT), check=True)
    [wheel] = (folder / "wheel").glob("*.whl")
    assets = make_assets()
    for number, cell in enumerate(options.cells, start=1):
        path = results / f"{cell}.json"
        if options.again:
            path.unlink(missing_ok=True)
        if path.is_file() and (options.quick or not Trial.load(path).left):
            continue
        print(f"== {cell} ({number} of {len(options.cells)})", flush=True)
        environment = Environment(cell, folder / str(cell))
        try:
            trial = try_out(environment, path, wheel, assets, quick=options.quick)
        finally:
            if not options.keep:
                environment.remove()
        print(table([trial]), flush=True)
    trials = [Trial.load(path) for path in sorted(results.glob("*.json"))]
    print(f"\n{table(trials)}")
    if options.write:
        write_tables(trials)
    asked = {str(cell) for cell in options.cells}
    tried = [trial for trial in trials if trial.cell in asked and not trial.excluded]
    return int(any(trial.tests and not trial.works for trial in tried))


def make_assets() -> Path:
    """Make the digits and the tiny model, unless they are there, by this Python."""
    assets = Path(os.environ.setdefault("ASSETS", str(ROOT / ".assets"))).resolve()
    command = ["bash", "-c", "source scripts/common.sh && make_assets"]
    venv = {"VENV": str(Path(sys.executable).parents[1]), "ASSETS": str(assets)}
    subprocess.run(command, cwd=ROOT, env={**os.environ, **venv}, check=True)
    return assets


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    all_cells = [Cell(s, v, p) for p in reversed(PYTHON) for s in reversed(SWIFT) for v in STACKS]
    parser.add_argument(
        "--cells",
        nargs="+",
        type=Cell.of,
        default=all_cells,
        metavar="CELL",
        help="MS_SWIFT-VLLM[-PYTHON], Python 3.12 where it is left out (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="only names and the dry run")
    parser.add_argument("--again", action="store_true", help="also what has passed before")
    parser.add_argument("--keep", action="store_true", help="leave environments where they are")
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT / ".compat",
        metavar="DIR",
        help="where environments and results are kept (default: .compat)",
    )
    parser.add_argument("--write", action="store_true", help="put the tables into docs/ and README")
    return parser


if __name__ == "__main__":
    sys.exit(main())
