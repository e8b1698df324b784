"""Measure with mutmut how many small changes of the code the unit tests detect.

    python scripts/dev/mutation.py              300 random mutants of all rooms
    python scripts/dev/mutation.py --only sampling --sample 60    60 of one room, with its tests
    python scripts/dev/mutation.py --only 'swift_grpo_ext.stops.rule.*' --sample 0    a module

mutmut copies the tree to `mutants/`, changes one expression at a time, and runs the unit tests that
reach the changed function. `[tool.mutmut]` in pyproject.toml lists rooms and tests. A mutant is
killed if it makes a test fail, crash or hang. Two kinds are not counted: mutants that change only
the words of a message, and mutants that behave like the code (`tests/equivalent_mutants.toml`).
mutmut skips decorated functions. Do not change the tree while mutmut copies it.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tomllib

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "mutants"
EQUIVALENT = ROOT / "tests/equivalent_mutants.toml"
PACKAGE = "swift_grpo_ext"

SURVIVED, NO_TESTS, HUNG = (0,), (5, 33), (36, -24, 24, 152, 255)
"""mutmut's exit codes for mutants that no test kills, and for those that took too long, which count
as killed; any other code is a kill."""

ONLY_ROOMS = """
import os, pathlib, sys, types
import pytest
from mutmut import __main__ as mutmut
from mutmut.configuration import config
if rooms := sys.argv.pop(1).split():
    config().only_mutate = [f"swift_grpo_ext/{room}/*" for room in rooms]
    config().pytest_add_cli_args_test_selection = [
        path for room in rooms for path in map(str, pathlib.Path("tests").glob(f"[fu]*/{room}"))
    ]
"""
"""Beginning of every mutmut process: limits rooms and tests if rooms are given."""

GENERATE = """
mutmut.set_mutant_under_test("mutant_generation")
pathlib.Path("mutants").mkdir(exist_ok=True)
mutmut.copy_src_dir()
mutmut.copy_also_copy_files()
mutmut.setup_source_paths()
mutmut.create_mutants(int(sys.argv[1]))
"""
"""The first steps of `mutmut run` (3.8.1), which has no command to only make the mutants."""

RUN = """
from mutmut.runners import harness
from mutmut.state import state

class Children:
    def __init__(self):
        self.file = pathlib.Path("called_by_children").absolute()
        self.called = {}
        os.register_at_fork(after_in_child=self.begin_child)
    def begin_child(self):
        names = set()
        def add(name):
            if name not in names:
                names.add(name)
                with self.file.open("a") as f:
                    f.write(name + chr(10))
        state()._stats = types.SimpleNamespace(add=add)
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item):
        called = self.called.setdefault(item.path, set())
        if self.file.exists():
            called.update(self.file.read_text().split())
            self.file.unlink()
        state()._stats |= called
    def pytest_runtest_makereport(self, item, call):
        if call.when == "setup":
            state().duration_by_test[item.nodeid] += call.duration

run_pytest = harness.PytestRunner.execute_pytest

def execute_pytest(self, params, plugins=()):
    return run_pytest(self, params, plugins=[*plugins, Children()] if plugins else [])

harness.PytestRunner.execute_pytest = execute_pytest
mutmut.cli(["run", *sys.argv[1:]])
"""
"""Runs the tests.

mutmut records only calls within its own process. `Children` also records the calls of forked
processes (whole trainings), and adds a fixture's seconds to its test, or the test seems to hang.
"""

SHOW = """
import json, sys
from mutmut.mutation.diff_apply import get_diff_for_mutant
names = json.load(sys.stdin)
print(json.dumps([get_diff_for_mutant(name, path=path) for name, path in names]))
"""

STRING = re.compile(r"""(?s)[rfbu]*(['"])((?:\\.|(?!\1).)*)\1""")
"""A string literal. With a space inside, it is a message and not a key or name."""


class Change(NamedTuple):
    """A mutant, with the removed and added lines of its diff."""

    name: str
    removed: str
    added: str

    @property
    def function(self) -> str:
        """Return a name such as `swift_grpo_ext.sampling.seeding.sample_seed`."""
        module, _, mangled = self.name.rpartition("__mutmut_")[0].rpartition(".")
        name = mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
        return f"{module}.{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=300, help="number of random mutants; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--only", nargs="+", default=["*"], help="rooms, or patterns of mutants' names"
    )
    parser.add_argument("--children", type=int, default=2, help="number of parallel processes")
    options = parser.parse_args()
    start = time.monotonic()
    patterns = [p if "." in p or "*" in p else f"{PACKAGE}.{p}.*" for p in options.only]
    rooms = "" if "*" in patterns else " ".join(dict.fromkeys(p.split(".")[1] for p in patterns))
    run_python(ONLY_ROOMS + GENERATE, rooms, str(options.children))
    file_of = {
        name: file
        for file, codes in exit_codes().items()
        for name in codes
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }
    chosen = choose(file_of, options.sample, options.seed)
    if not chosen:
        raise SystemExit(f"--only {' '.join(options.only)} matches no mutant; expected rooms.")
    seconds = time.monotonic() - start
    print(f"{len(file_of)} mutants, {len(chosen)} of them to run ({seconds:.0f} s)", flush=True)
    run_tests([change.name for change in chosen], rooms, options.children)
    print(report(chosen, {n: c for codes in exit_codes().values() for n, c in codes.items()}))
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.0f} minutes with {options.children} processes")


def exit_codes() -> dict[str, dict[str, int | None]]:
    """Return the mutants' exit codes (None: not run) by mutated file, if the file still exists."""
    codes = {}
    for meta in sorted((MUTANTS / PACKAGE).rglob("*.meta")):
        file = str(meta.relative_to(MUTANTS).with_suffix(""))
        if (ROOT / file).exists():
            codes[file] = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
    return codes


def choose(file_of: Mapping[str, str], count: int, seed: int) -> list[Change]:
    """Return `count` random mutants (0: all) that change more than words of messages."""
    order = sorted(file_of)
    random.Random(seed).shuffle(order)
    chosen: list[Change] = []
    while order and (not count or len(chosen) < count):
        step = 2 * count or len(order)
        some, order = order[:step], order[step:]
        diffs = run_python(SHOW, stdin=json.dumps([(name, file_of[name]) for name in some]))
        for name, diff in zip(some, json.loads(diffs), strict=True):
            lines = [line for line in diff.splitlines() if line[:3] not in ("---", "+++")]
            removed, added = (
                "\n".join(line[1:].strip() for line in lines if line.startswith(sign))
                for sign in "-+"
            )
            if without_words(removed) != without_words(added):
                chosen.append(Change(name, removed, added))
    return chosen[:count] if count else chosen


def without_words(code: str) -> str:
    """Return code with all messages replaced by the same string."""
    return STRING.sub(lambda string: '" "' if " " in string[2] else string[0], code)


def run_tests(names: Sequence[str], rooms: str, children: int) -> None:
    """Let mutmut run all tests without a mutant, then the tests of these mutants."""
    log = MUTANTS / "run.log"
    argv = [sys.executable, "-c", ONLY_ROOMS + RUN, rooms, "--max-children", str(children), *names]
    # All mutants share what `tests/rig/arguments.py` parses.
    env = {**os.environ, "PYTEST_XDIST_TESTRUNUID": f"mutants-{os.getpid()}"}
    with log.open("w", encoding="utf-8") as f:
        if subprocess.run(argv, cwd=ROOT, env=env, stdout=f, stderr=f, check=False).returncode == 0:
            return
    # mutmut hides pytest's output if a test fails without a mutant.
    end = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")[-3000:]
    raise SystemExit(
        f"mutmut failed; the end of {log}:\n{end}\nIf it failed to collect stats, find the failing "
        "test: cd mutants && MUTANT_UNDER_TEST=stats PY_IGNORE_IMPORTMISMATCH=1 python -m pytest "
        "-x --rootdir=. -p no:xdist --ignore=tests/unit/upstream/test_patches.py "
        "tests/fast tests/unit"
    )


def run_python(code: str, *args: str, stdin: str = "") -> str:
    """Run code in a new process, because mutmut has global state; return its stdout."""
    command = [sys.executable, "-c", code, *args]
    done = subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mutmut failed:\n{done.stderr[-3000:]}")
    return done.stdout


def report(chosen: Sequence[Change], codes: Mapping[str, int | None]) -> str:
    """Return the surviving mutants, and a table of the share killed in each room."""
    entries = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))["mutant"]
    known = {(e["function"], e["removed"], e["added"]) for e in entries}
    counted = [c for c in chosen if (c.function, c.removed, c.added) not in known]
    unknown = [c.name for c in counted if codes[c.name] is None]
    if unknown:
        raise SystemExit(f"mutmut did not run {len(unknown)} mutants, such as {unknown[0]}.")
    alive = [c for c in counted if codes[c.name] in (*SURVIVED, *NO_TESTS)]
    lines = []
    for change in alive:
        kind = "no test" if codes[change.name] in NO_TESTS else "survived"
        lines.append(f"{change.function} ({kind})\n  - {change.removed}\n  + {change.added}")
    rooms = Counter(c.name.split(".")[1] for c in counted)
    lost = Counter(c.name.split(".")[1] for c in alive)
    lines += ["", "| room | mutants | killed |", "|---|---|---|"]
    lines += [f"| {room} | {n} | {1 - lost[room] / n:.0%} |" for room, n in sorted(rooms.items())]
    lines.append(f"| all | {len(counted)} | {1 - len(alive) / max(len(counted), 1):.1%} |")
    hung = sum(codes[c.name] in HUNG for c in counted)
    others = len(chosen) - len(counted)
    lines.append(f"\n{hung} of these took too long; {others} more are equivalent to the code.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
